"""The files of a run folder: their formats, and functions that read and write them.

* ``config.yaml``: the checked configuration (`config_file`).
* ``metrics.jsonl``: one row per logged step and per epoch; ``metrics.csv`` contains the same rows as a table (`rows`).
* ``step_stats.jsonl``: one row per recorded optimizer step, if `step_stats.interval` is set (`step_stats`).
* ``results.json``: the results of a finished run (`results`).

This package imports neither training code nor models, so that every tool that reads runs can import it.
"""
