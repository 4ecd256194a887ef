"""Generated parts of the documentation (`scripts/docs.py`): tables, numbers and figures from benchmarks/*.json."""
