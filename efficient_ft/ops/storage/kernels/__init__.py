"""Kernels of the storage formats, `cpu` with numba and `gpu` with Triton.

Both libraries are optional. Without them, the reference implementations run.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from efficient_ft.ops.storage.kernels import cpu, gpu


def kernels_for(x: Tensor) -> Any:
    """Return the module whose kernels support this tensor, or None for the reference implementation."""
    return next((module for module in (cpu, gpu) if module.supports(x)), None)
