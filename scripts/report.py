"""Figures of what a run has recorded (``step_stats.interval=1``): ``python scripts/report.py RUN``"""

from efficient_ft.cli.commands import run_command

if __name__ == "__main__":
    run_command("report")
