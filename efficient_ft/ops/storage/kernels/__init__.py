"""Kernels of the storage formats. The module `cpu` uses numba, and the module `gpu` uses Triton.

numba and Triton are optional. If the library for a device is not installed, the reference implementations are used.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from efficient_ft.ops.storage.kernels import cpu, gpu


def kernels_for(x: Tensor) -> Any:
    """Return the module whose kernels support x, or None if the reference implementation must be used."""
    if cpu.supports(x):
        return cpu
    return gpu if gpu.supports(x) else None
