"""Numba kernel of the softmax of attention in bfloat16. `ops.storage.kernels.numba_job` describes a job."""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32, float64, int16, int32, njit, uint64

from efficient_ft.ops.storage.kernels.numba_job import (
    _address,
    _exp,
    _float_of,
    _ordered,
    _take,
    as_job,
    to_bits,
    to_float,
)

# `reassoc` permits the vectorization of sums, and `contract` fuses a product and a sum. NaN is preserved.
_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract", "reassoc"})


@_jit
def _largest(scores, rests, row, row_bits):
    """Write the sums of two bfloat16 rows to `row`, and return the maximum as an ordered integer (see `_ordered`)."""
    for i in range(len(scores)):
        row[i] = to_float(scores[i]) + to_float(rests[i])
    largest = int32(-0x80000000)
    for i in range(len(scores)):
        largest = max(largest, _ordered(row_bits[i]))
    return largest


@_jit
def _exponentials(row, largest):
    total = float32(0)
    for i in range(len(row)):
        e = _exp(row[i] - largest)
        row[i] = e
        total += e
    return total


@_jit
def _weights(row, inverse, weights):
    for i in range(len(row)):
        weights[i] = to_bits(weights, row[i] * inverse)


@_jit
def _weights_and_product(row, inverse, weights, gradients):
    total = float32(0)
    for i in range(len(row)):
        p = row[i] * inverse
        row[i] = p
        weights[i] = to_bits(weights, p)
        total += p * to_float(gradients[i])
    return total


@_jit
def _gradients(row, mean, scale, gradients):
    for i in range(len(row)):
        gradients[i] = to_bits(gradients, row[i] * (to_float(gradients[i]) - mean) * scale)


@functools.cache
def softmax(backward: bool) -> Any:
    """Compile the job that replaces bfloat16 scores by their softmax, and gradients of the softmax by those of scores.

    The scores are the sums of two tensors: rounded scores and their rounding errors.
    """

    @as_job(backward)
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, rows, n = job[1], job[2], job[3], job[4]
        scores, rests = carray(_address(job[5]), (rows, n), int16), carray(_address(job[6]), (rows, n), int16)
        gradients = carray(_address(job[7]), (rows if backward else 0, n), int16)
        scale = float32(job[8:9].view(float64)[0])
        row = np.empty(n, np.float32)
        row_bits = row.view(np.int32)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            for s in range(uint64(taken * block), uint64(min((taken + 1) * block, rows))):
                largest = _float_of(_ordered(_largest(scores[s], rests[s], row, row_bits)))
                inverse = float32(1) / _exponentials(row, largest)
                if backward:
                    mean = _weights_and_product(row, inverse, scores[s], gradients[s])
                    _gradients(row, mean, scale, gradients[s])
                else:
                    _weights(row, inverse, scores[s])

    return job_of
