"""Points of accuracy that recipes lost in the finished studies of this project; shipped with the package."""

from __future__ import annotations

import functools
import json
from pathlib import Path

#: JSON file of accuracy losses relative to full fine-tuning, in percentage points: row -> study -> loss (written by
#: `scripts/docs.py --record lost`).
FILE = Path(__file__).with_name("studies.json")


@functools.cache
def _lost() -> dict[str, dict[str, float]]:
    found: dict[str, dict[str, float]] = json.loads(FILE.read_text(encoding="utf-8"))
    return found


def points_lost(row: str | None) -> dict[str, float]:
    """Return by study the points of test accuracy below full fine-tuning; negative: above. Empty: never studied."""
    return {} if row is None else dict(_lost().get(row, {}))
