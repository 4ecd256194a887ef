"""The papers' cost columns next to our count by the same rules: ``python scripts/published.py``"""

from efficient_ft.cli.commands import run_command

if __name__ == "__main__":
    run_command("published")
