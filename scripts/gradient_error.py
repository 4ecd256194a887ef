"""Measure the gradient error of low-rank backward passes: ``python scripts/gradient_error.py --help``"""

from efficient_ft.cli.commands import run_command

if __name__ == "__main__":
    run_command("gradient-error")
