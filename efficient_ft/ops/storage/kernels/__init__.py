"""Kernels of the packed forms, each with the same results, bit for bit, as the plain torch form.

`cpu` runs numba's kernels, `gpu` Triton's. Both are optional: without them the plain torch forms are used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from efficient_ft.ops.storage.kernels import cpu, gpu


def kernels_for(x: Tensor) -> Any:
    """Return the module whose kernels take this tensor, or None: use the plain torch form."""
    return next((module for module in (cpu, gpu) if module.supports(x)), None)
