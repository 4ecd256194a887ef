"""How close low-rank backward passes come to the exact gradient: ``python scripts/gradient_error.py --help``"""

from efficient_ft.cli.commands import run_command

if __name__ == "__main__":
    run_command("gradient-error")
