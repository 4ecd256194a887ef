"""The numba kernel of the block-wise Adam step. Importing this module requires numba.

The job is a C function with one pointer argument, like the jobs in `ops.storage.kernels.numba_job`.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32, int16, int32, njit, uint8, uint32

from efficient_ft.ops.blockwise import BLOCK, LARGEST, SHIFT, UNIT, levels
from efficient_ft.ops.storage.kernels.numba_job import _address, _noise, _take, as_job

# With this error model, division by 0 returns infinity instead of raising an error, so that loops can be vectorized.
_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy")
_LARGEST, _FINITE = np.int32(LARGEST), np.finfo(np.float32).max
_SHIFT, _SHIFTS = np.float32(SHIFT), np.int32(1 / SHIFT)


@_jit
def _decode(ratio, root, scale, low, one, zero, m, v_bits):
    """Write the ratio m / √v to `m`, and the bits of the root √v to `v_bits`."""
    for i in range(len(m)):
        signed = int32(ratio[i]) - zero
        m[i] = float32(int32(signed * abs(signed))) * scale
        bits = min(max(int32(low + int32(int32(root[i]) - int32(1)) * one), int32(1)), _LARGEST)
        v_bits[i] = bits if root[i] != uint8(0) else int32(0)


@_jit
def _step(p, grad, m, v, factors):
    """Update p, m and v in place. `m` contains the ratio m / √v, and `v` contains the root √v."""
    l2, decay, beta1, rest1 = factors[0], factors[1], factors[2], factors[3]
    beta2, rest2, correction, eps, rate = factors[4], factors[5], factors[6], factors[7], factors[8]
    for i in range(len(p)):
        g = grad[i] if l2 == float32(0) else p[i] * l2 + grad[i]
        new = m[i] * v[i] * beta1 + g * rest1
        root = np.sqrt(v[i] * v[i] * beta2 + g * g * rest2)
        p[i] = p[i] * decay - new / (root * correction + eps) * rate
        ratio = new / root
        m[i] = ratio if abs(ratio) <= _FINITE else float32(0)
        v[i] = root


@_jit
def _bounds(m_bits, v_bits, largest, low, high):
    """Clamp the roots to at most `LARGEST`.

    Return the bits of the largest ratio, the smallest positive root and the largest root.
    """
    for i in range(len(m_bits)):
        largest = max(largest, m_bits[i] & int32(0x7FFFFFFF))
        bits = min(v_bits[i] & int32(0x7FFFFFFF), _LARGEST)
        v_bits[i] = bits
        low = min(low, bits if bits > int32(0) else _LARGEST)
        high = max(high, bits)
    return largest, low, high


@_jit
def _encode(m, v_bits, inverse, low, one, tops, base, ratio, root):
    """Write the codes to `ratio` and `root`, and return the shift.

    The function has many parameters, because a compiled function receives every array and number separately.
    """
    ratio_top, root_top, zero = tops
    down, positive = int32(0), int32(0)
    closer, unit = float32(1) / float32(one), min(float32(one) * float32(2.0**-22), float32(1))
    for i in range(len(m)):
        noise = _noise(i, base)
        place = float32(int32(v_bits[i] - low)) * closer
        code = int32(place)
        rest = place - float32(code)
        up = int32(noise < rest + unit * (rest - rest * rest))
        code = int32(code + up)
        some = int32(v_bits[i] > int32(0))
        root[i] = uint8((min(code, root_top) + int32(1)) * some)
        down += int32((int32(rest * float32(_SHIFTS)) - up * _SHIFTS) * some)
        positive += some
        noise = noise * float32(4096)
        noise = noise - float32(int32(noise))
        size = abs(m[i]) * inverse
        code = int32(np.sqrt(size))
        whole = float32(code)
        code = min(int32(code + int32(noise * (float32(2) * whole + float32(1)) < size - whole * whole)), ratio_top)
        ratio[i] = uint8(zero + (int32(-code) if m[i] < float32(0) else code))
    return int16(down // max(positive, int32(1)))


@_jit
def _spread(held, codes):
    for i in range(len(held)):
        codes[2 * i] = held[i] >> uint8(4)
        codes[2 * i + 1] = held[i] & uint8(15)


@_jit
def _join(codes, held):
    for i in range(len(held)):
        held[i] = uint8(codes[2 * i] << uint8(4)) | codes[2 * i + 1]


@functools.cache
def adam_step(bits: int) -> Any:
    """Compile the job that updates a parameter and its moments, several blocks at a time."""
    of = BLOCK * bits // 8  # number of bytes for the codes of one block
    ratio_top, root_top = (np.int32(top) for top in levels(bits))
    unit, zero = np.int32(UNIT[bits]), np.int32(2 ** (bits - 1))
    part, least = np.float32(1 / ratio_top**2), np.int32(root_top * unit)

    @as_job(bits)
    def job_of(pointer):
        job = carray(pointer, 16)
        jobs, at_a_time, n, seed = job[1], job[2], job[3], uint32(job[11])
        blocks = n // BLOCK
        p, grad = carray(_address(job[4]), (blocks, BLOCK), float32), carray(_address(job[5]), (blocks, BLOCK), float32)
        ratio, root = carray(_address(job[6]), (blocks, of), uint8), carray(_address(job[8]), (blocks, of), uint8)
        scale, range_ = carray(_address(job[7]), (blocks,), float32), carray(_address(job[9]), (blocks, 3), int16)
        factors = carray(_address(job[10]), (10,), float32)
        smallest = factors.view(np.int32)[9]
        m, v = np.empty(BLOCK, np.float32), np.empty(BLOCK, np.float32)
        m_bits, v_bits, largest = m.view(np.int32), v.view(np.int32), np.empty(1, np.float32)
        ratio_codes, root_codes = np.empty(BLOCK, np.uint8), np.empty(BLOCK, np.uint8)
        while True:
            taken = _take(job)
            if taken >= jobs:
                return
            for b in range(taken * at_a_time, min((taken + 1) * at_a_time, blocks)):
                if bits == 8:
                    ratio_codes, root_codes = ratio[b], root[b]
                else:
                    _spread(ratio[b], ratio_codes)
                    _spread(root[b], root_codes)
                low, one = int32(int32(range_[b, 0]) << int32(16)), int32(int32(range_[b, 1]) * unit)
                low = int32(low + int32(float32(range_[b, 2]) * float32(one) * _SHIFT))
                _decode(ratio_codes, root_codes, scale[b], low, one, zero, m, v_bits)
                _step(p[b], grad[b], m, v, factors)
                largest.view(np.int32)[0], low, high = _bounds(m_bits, v_bits, smallest, _LARGEST, int32(0))
                low = int32(low >> int32(16))
                distance = max(int32(int32(high - int32(low << int32(16)) + least - int32(1)) // least), int32(1))
                range_[b, 0], range_[b, 1] = int16(low), int16(distance)
                scale[b] = largest[0] * part
                low, one, inverse = int32(low << int32(16)), int32(distance * unit), float32(1) / scale[b]
                base = uint32(seed + uint32(b * BLOCK))
                tops = (ratio_top, root_top, zero)
                range_[b, 2] = _encode(m, v_bits, inverse, low, one, tops, base, ratio_codes, root_codes)
                if bits == 4:
                    _join(ratio_codes, ratio[b])
                    _join(root_codes, root[b])

    return job_of
