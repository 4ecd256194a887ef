"""The CPU kernel of the block-wise step. From the same gradients it finds the codes and scales of the plain torch form;
parameters differ by rounding, since torch's square root is not exact to the last bit.

Optional: without numba the plain torch form is used.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efficient_ft.ops.blockwise.form import BLOCK, SMALLEST, codebook
from efficient_ft.ops.packing.kernels.cpu import _run as run_in_threads

_AT_A_TIME = 1 << 14  # values that a thread updates at a time


def supports(x: Tensor) -> bool:
    """Return whether the kernel takes this tensor."""
    return x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0 and _kernels() is not None


def adam_step(
    p: Tensor, grad: Tensor, first: Sequence[Tensor], second: Sequence[Tensor], bits: int, factors: Sequence[float]
) -> None:
    """Compute `blockwise.adam_step` with the `factors` of its step."""
    size, n = BLOCK[bits], p.numel()
    at_a_time = _AT_A_TIME // size
    numbers = np.array([*factors, SMALLEST], np.float32)
    tables = [array.ctypes.data for signed in (True, False) for array in search_table(bits, signed)]
    addresses = [t.data_ptr() for t in (p, grad, *first, *second)]
    jobs = -(-(n // size) // at_a_time)
    run_in_threads(_kernels().adam_step(bits), [jobs, at_a_time, n, *addresses, numbers.ctypes.data, *tables])


@functools.cache
def search_table(bits: int, signed: bool) -> tuple[Any, Any]:
    """Return the tables that find the nearest code of a number x from -1 to 1 without a search.

    Returns:
        start: (2^16,) uint8: by the upper half of the bits of x, the code of the smallest number with this half. It
            is that of x too, or the next one: in each half there is at most one midpoint.
        table: (2 · 2^bits,) float32: the values of the codes, and the numbers from which on the next code is nearer.
    """
    values = np.array(codebook(bits, signed), np.float64).astype(np.float32)
    midpoints = ((values[:-1].astype(np.float64) + values[1:]) / 2).astype(np.float32)
    halves = np.arange(1 << 16, dtype=np.uint32) << 16
    ends = np.stack((halves, halves | 0xFFFF)).view(np.float32)
    low, high = np.sort(ends, 0)  # NaN last
    start, stop = (np.searchsorted(midpoints, end, side="right") for end in (low, high))
    numbers = np.isfinite(low) & (np.abs(low) <= 2) & np.isfinite(high)
    assert (stop - start)[numbers].max() <= 1
    start[~np.isfinite(ends).all(0)] = len(values) - 1  # as torch.bucketize places NaN
    return start.astype(np.uint8), np.concatenate((values, midpoints, np.array([np.inf], np.float32)))


@functools.cache
def _kernels() -> Any:
    try:
        from efficient_ft.ops.blockwise import numba_kernels
    except ImportError:
        return None
    return numba_kernels
