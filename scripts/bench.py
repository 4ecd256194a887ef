"""Measure recipes against each other: ``python scripts/bench.py step|layer|loop|gradient``, see ``--help``."""

from efficient_ft.cli.commands import run_command

if __name__ == "__main__":
    run_command("bench")
