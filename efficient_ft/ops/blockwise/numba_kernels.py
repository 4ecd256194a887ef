"""The loops of `blockwise.kernels`, compiled by numba; importing this module needs numba.

The job is a C function of one pointer, as in `packing.kernels.numba_kernels`.
"""
# mypy: ignore-errors
# (numba's types, not Python's)

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32, int32, njit, uint8, uint32

from efficient_ft.ops.blockwise.form import BLOCK
from efficient_ft.ops.packing.kernels.numba_kernels import _address, _take, as_job

# Division as the processor does it: by 0 it is infinite, and the loop is vectorized.
_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy")


@_jit
def _decode_8(codes, scale, values, x):
    for i in range(len(x)):
        x[i] = values[codes[i]] * scale


@_jit
def _decode_4(codes, scale, values, x):
    for i in range(len(codes)):
        x[2 * i] = values[codes[i] >> uint8(4)] * scale
        x[2 * i + 1] = values[codes[i] & uint8(15)] * scale


@_jit
def _largest(bits, largest):
    """Return the largest magnitude: as integers, without the sign bit, floats keep their order, NaN last."""
    for i in range(len(bits)):
        largest = max(largest, bits[i] & int32(0x7FFFFFFF))
    return largest


@_jit
def _encode(x, scale, start, table, codes):
    midpoints = table[len(table) // 2 :]
    for i in range(len(x)):
        x[i] = x[i] / scale
    bits = x.view(np.uint32)
    for i in range(len(x)):
        code = start[bits[i] >> uint32(16)]
        codes[i] = code + uint8(x[i] >= midpoints[code])


@_jit
def _store_8(codes, held):
    held[:] = codes


@_jit
def _store_4(codes, held):
    for i in range(len(held)):
        held[i] = uint8(codes[2 * i] << uint8(4)) | codes[2 * i + 1]


@_jit
def _step(p, grad, m, v, factors):
    l2, decay, beta1, rest1 = factors[0], factors[1], factors[2], factors[3]
    beta2, rest2, correction, eps, rate = factors[4], factors[5], factors[6], factors[7], factors[8]
    for i in range(len(p)):
        g = grad[i] if l2 == float32(0) else p[i] * l2 + grad[i]
        m[i] = m[i] * beta1 + g * rest1
        v[i] = v[i] * beta2 + g * g * rest2
        denominator = np.sqrt(v[i]) * correction + eps
        p[i] = p[i] * decay - m[i] / denominator * rate


@functools.cache
def adam_step(bits: int) -> Any:
    """Compile the job that updates a parameter and its moments, some blocks at a time."""
    size, levels = BLOCK[bits], 1 << bits
    of = size * bits // 8  # bytes of the codes of a block

    @as_job(bits, cache=True)
    def job_of(pointer):
        job = carray(pointer, 16)
        jobs, at_a_time, n = job[1], job[2], job[3]
        blocks = n // size
        p, grad = carray(_address(job[4]), (blocks, size), float32), carray(_address(job[5]), (blocks, size), float32)
        m_codes, v_codes = carray(_address(job[6]), (blocks, of), uint8), carray(_address(job[8]), (blocks, of), uint8)
        m_scale, v_scale = carray(_address(job[7]), (blocks,), float32), carray(_address(job[9]), (blocks,), float32)
        factors = carray(_address(job[10]), (10,), float32)
        m_start, v_start = carray(_address(job[11]), (1 << 16,), uint8), carray(_address(job[13]), (1 << 16,), uint8)
        m_table = carray(_address(job[12]), (2 * levels,), float32)
        v_table = carray(_address(job[14]), (2 * levels,), float32)
        smallest = factors.view(np.int32)[9]
        m, v = np.empty(size, np.float32), np.empty(size, np.float32)
        m_bits, v_bits = m_scale.view(np.int32), v_scale.view(np.int32)
        codes = np.empty(size, np.uint8)
        while True:
            taken = _take(job)
            if taken >= jobs:
                return
            for b in range(taken * at_a_time, min((taken + 1) * at_a_time, blocks)):
                if bits == 8:
                    _decode_8(m_codes[b], m_scale[b], m_table, m)
                    _decode_8(v_codes[b], v_scale[b], v_table, v)
                else:
                    _decode_4(m_codes[b], m_scale[b], m_table, m)
                    _decode_4(v_codes[b], v_scale[b], v_table, v)
                _step(p[b], grad[b], m, v, factors)
                m_bits[b] = _largest(m.view(np.int32), smallest)
                v_bits[b] = _largest(v.view(np.int32), smallest)
                _encode(m, m_scale[b], m_start, m_table, codes)
                if bits == 8:
                    _store_8(codes, m_codes[b])
                else:
                    _store_4(codes, m_codes[b])
                _encode(v, v_scale[b], v_start, v_table, codes)
                if bits == 8:
                    _store_8(codes, v_codes[b])
                else:
                    _store_4(codes, v_codes[b])

    return job_of
