"""Formats of the files in a run folder, and functions that read and write these files.

* ``config.yaml``: the validated configuration (`config_file`).
* ``metrics.jsonl``: one row for each logged step and epoch (`rows`). ``metrics.csv`` contains the same rows.
* ``step_stats.jsonl``: one row for each recorded optimizer step, if `step_stats.interval` is set (`step_stats`).
* ``results.json``: the results of a finished run (`results`).

This package imports neither training code nor models, so that every tool that reads runs can import it.
"""
