"""Atomic writing: a file is complete at any moment, also after a kill or a power failure."""

from __future__ import annotations

import json
import math
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """Write a temporary file, sync it to disk, and rename it to `path`.

    The temporary file is ``<path>.tmp``. One process writes into a folder at a time, so one left by a killed process
    is overwritten.

    Args:
        path: the file to write; its folder is created.
        write: called with the temporary file's path.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.tmp")
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        temporary.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """`write_atomically` for a text, in UTF-8."""
    write_atomically(path, lambda temporary: _write_text(temporary, text))


def json_text(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON, which has no numbers that are not finite: null stands for these."""
    return json.dumps(_finite(value), indent=indent, allow_nan=False)


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, Mapping):
        return {key: _finite(of) for key, of in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return value


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    """Make a rename in `folder` durable; Windows cannot open a folder for it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)
