"""What `scripts/docs.py` generates: tables, numbers and figures of the documentation, from benchmarks/*.json."""
