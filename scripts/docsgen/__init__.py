"""Generated parts of the documentation (`scripts/docs.py`): tables, numbers and figures of the documentation, from benchmarks/*.json."""
