"""Functions that write records as JSON files."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from typing import Any

from efficient_ft.core.files import open_file, refuse_link, write_atomically, write_text_atomically

#: Name of the file that a process locks while it writes to a folder. The operating system releases the lock when that
#: process ends.
LOCK = ".lock"

__all__ = ["LOCK", "json_text", "open_file", "refuse_link", "write_atomically", "write_text_atomically"]


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON text. Numbers that are not finite are written as null."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value
