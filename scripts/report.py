"""Figures of what a run has recorded (``step_stats.interval=1``): ``python scripts/report.py RUN``"""

from efficient_ft.cli.report import main

if __name__ == "__main__":
    main()
