"""The numba kernel of stochastic rounding. Importing this module requires numba.

The job is a C function with one pointer argument, like the jobs in `ops.storage.kernels.numba_job`.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit, uint16, uint32

from efficient_ft.ops.storage.kernels.numba_job import _address, _hash, _take, as_job

_jit: Any = njit(nogil=True, boundscheck=False)


@_jit
def _round(x, base, y):
    """Write the upper halves of the float32 bits `x` to `y`, after the addition of random lower halves."""
    for i in range(len(x)):
        bits = x[i]
        rounded = uint32(uint32(bits + uint32(_hash(i, base) >> uint32(16))) >> uint32(16))
        size = uint32(bits & uint32(0x7FFFFFFF))
        # Infinity and NaN are truncated, and NaN keeps a nonzero mantissa.
        special = uint32(uint32(bits >> uint32(16)) | (uint32(0x40) if size > uint32(0x7F800000) else uint32(0)))
        y[i] = uint16(special if size >= uint32(0x7F800000) else rounded)


@functools.cache
def round_to_bf16() -> Any:
    """Compile the job that rounds a tensor, a fixed number of values at a time."""

    @as_job()
    def round_job(pointer):
        job = carray(pointer, 16)
        jobs, at_a_time, n, seed = job[1], job[2], job[3], uint32(job[4])
        x, y = carray(_address(job[5]), (n,), np.uint32), carray(_address(job[6]), (n,), np.uint16)
        while True:
            taken = _take(job)
            if taken >= jobs:
                return
            start = taken * at_a_time
            stop = min(start + at_a_time, n)
            _round(x[start:stop], uint32(seed + uint32(start)), y[start:stop])

    return round_job
