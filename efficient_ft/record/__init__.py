"""The files of a run folder: their formats, and how they are written and read.

========================  ==========================================================================
``config.yaml``           the checked configuration (`config_file`)
``metrics.jsonl``         one row per logged step and per epoch; ``metrics.csv`` is the same as a table (`rows`)
``step_stats.jsonl``      one row per recorded optimizer step, with `step_stats.interval` (`step_stats`)
``results.json``          written when the run has finished (`results`)
========================  ==========================================================================

Nothing here trains or needs a model: every tool that reads a run can import it.
"""
