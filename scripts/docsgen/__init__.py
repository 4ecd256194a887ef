"""Generate the tables, numbers and figures of the documentation, for `scripts/docs.py`."""
