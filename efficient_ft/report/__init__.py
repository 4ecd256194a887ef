"""Figures and a page of what a run has recorded (``step_stats.interval=1``)."""

from efficient_ft.report.page import Written, write_report

__all__ = ["Written", "write_report"]
