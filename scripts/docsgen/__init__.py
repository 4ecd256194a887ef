"""Generate the tables, numbers and figures of the documentation, for `scripts/docs.py`."""

from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
