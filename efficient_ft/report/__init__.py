"""Figures and an HTML page for a recorded run (``step_stats.interval=1``), and an HTML page for several runs."""

from efficient_ft.report.page import Written, write_report
from efficient_ft.report.runs import write_runs_page

__all__ = ["Written", "write_report", "write_runs_page"]
