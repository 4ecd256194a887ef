"""Figures and a page for a recorded run (``step_stats.interval=1``), and a page for several runs."""
