"""Import of modules that depend on optional libraries."""

from __future__ import annotations

import functools
import importlib
from typing import Any


@functools.cache
def optional_module(name: str) -> Any:
    """Return the module with the full name `name`, or None if importing it raises ImportError.

    The reason may be that a library is not installed, or that numba cannot compile kernels on this machine.
    """
    try:
        return importlib.import_module(name)
    except ImportError:
        return None
