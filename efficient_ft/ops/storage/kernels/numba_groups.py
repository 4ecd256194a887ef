"""Numba kernels of the group format. `numba_kernels` describes the structure of a job.

A function is compiled for each number of bits and each common group length. The group length is then a constant, so
that all loops are vectorized. No function is cached on disk, because numba cannot reload functions that close over
compiled functions.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32, int32, njit, uint8, uint16, uint32, uint64

from efficient_ft.ops.storage.kernels.numba_kernels import (
    _address,
    _bits_of,
    _float_of,
    _noise,
    _ordered,
    _take,
    as_job,
)

# This error model omits the check for division by zero, because the check would prevent vectorization.
_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy")


@_jit
def _to_half(value):
    """Round a float32 that is not NaN to fp16 (to nearest, ties to even), and return the fp16 bits as an int32."""
    bits = _bits_of(float32(value))
    sign, bits = (bits >> int32(16)) & int32(0x8000), bits & int32(0x7FFFFFFF)
    if bits >= int32(0x47800000):  # at least 2¹⁶
        return sign | int32(0x7C00)
    if bits < int32(0x38800000):  # for subnormal numbers, the sum rounds to multiples of 2⁻²⁴
        return sign | (_bits_of(_float_of(bits) + float32(0.5)) - int32(0x3F000000))
    odd = (bits >> int32(13)) & int32(1)
    return sign | ((bits - int32(0x38000000) + int32(0xFFF) + odd) >> int32(13))


@_jit
def _from_half(bits):
    """Convert the bits of a finite fp16 number to float32."""
    sign, bits = (bits & int32(0x8000)) << int32(16), bits & int32(0x7FFF)
    if bits < int32(0x0400):
        value = float32(bits) * float32(2.0**-24)
        return -value if sign else value
    return _float_of(sign | ((bits << int32(13)) + int32(0x38000000)))


@_jit
def _extremes(bits, start, count):
    """Return the minimum and the maximum of values as ordered integers (see `_ordered`).

    `bits` contains the float32 bits of the values.
    """
    low, high = int32(0x7FFFFFFF), int32(-0x80000000)
    for i in range(uint64(count)):
        value = _ordered(bits[start + i])
        low, high = min(low, value), max(high, value)
    return low, high


@_jit
def _range(low, high, levels, outward):
    """Return the fp16 bits of the minimum and of the step of a group. The step -1 means that all codes are 0.

    `low` and `high` are the extremes of the group, as `_extremes` returns them. If `outward` is True, the minimum is
    rounded down and the step is rounded up.
    """
    if high >= int32(0x7F800000) or low <= int32(-0x7F800001):  # a non-finite value
        return int32(0x7E00), int32(-1)
    lowest = _float_of(_ordered(low)) + float32(0.0)
    low_half = _to_half(lowest)
    if outward and low_half & int32(0x7FFF) != int32(0x7C00) and _from_half(low_half) > lowest:
        low_half += int32(1) if low_half & int32(0x8000) else int32(-1)
    if low_half & int32(0x7FFF) == int32(0x7C00):
        return low_half, int32(-1)
    wide = (_float_of(_ordered(high)) - _from_half(low_half)) / levels
    if not wide > 0:
        return low_half, int32(0)
    step_half = _to_half(wide)
    if outward and step_half != int32(0x7C00) and _from_half(step_half) < wide:
        step_half += int32(1)
    if step_half == int32(0x7C00):
        return int32(0x7C00), int32(-1)
    return low_half, step_half


@_jit
def _round(x, start, count, low, inverse, levels, codes):
    for i in range(uint64(count)):
        codes[i] = int32(min(max((x[start + i] - low) * inverse + float32(0.5), float32(0)), levels))


@_jit
def _round_at_random(x, start, count, low, inverse, levels, base, codes):
    for i in range(uint64(count)):
        codes[i] = int32(min(max((x[start + i] - low) * inverse + _noise(i, base), float32(0)), levels))


def _length(group: int) -> int:
    """Return `group` if loops are compiled for this group length, or 0 if the length is read from the job."""
    return group if group in (32, 40, 64, 128) else 0


@functools.cache
def _planes(bits: int, constant: int) -> Any:
    """Return a function that packs the codes of a group into bytes, and a function that unpacks bytes into values."""

    @_jit
    def pack(codes, length, out, at):
        size = uint64(constant if constant else length)
        if bits == 8:
            for j in range(size):
                out[at + j] = uint8(codes[j])
        elif bits == 4:
            half = size // uint64(2)
            for j in range(half):
                out[at + j] = uint8(codes[j] | codes[j + half] << int32(4))
        else:
            part = size // uint64(4)
            for j in range(part):
                out[at + j] = uint8(
                    codes[j] & int32(3)
                    | (codes[j + part] & int32(3)) << int32(2)
                    | (codes[j + uint64(2) * part] & int32(3)) << int32(4)
                    | (codes[j + uint64(3) * part] & int32(3)) << int32(6)
                )
            if bits == 3:
                eighth = size // uint64(8)
                for j in range(eighth):
                    byte = codes[j] >> int32(2)
                    for k in range(uint64(1), uint64(8)):
                        byte |= (codes[j + k * eighth] >> int32(2)) << int32(k)
                    out[at + part + j] = uint8(byte)

    @_jit
    def spread(packed, at, length, low, step, x, start):
        size = uint64(constant if constant else length)
        if bits == 8:
            for j in range(size):
                x[start + j] = float32(packed[at + j]) * step + low
        elif bits == 4:
            half = size // uint64(2)
            for j in range(half):
                byte = packed[at + j]
                x[start + j] = float32(int32(byte & uint8(15))) * step + low
                x[start + half + j] = float32(int32(byte >> uint8(4))) * step + low
        elif bits == 2:
            part = size // uint64(4)
            for k in range(uint64(4)):
                shift = int32(uint64(2) * k)
                for j in range(part):
                    x[start + k * part + j] = float32((int32(packed[at + j]) >> shift) & int32(3)) * step + low
        else:
            part, eighth = size // uint64(4), size // uint64(8)
            for k in range(uint64(8)):
                shift, first = int32(uint64(2) * (k // uint64(2))), at + (k % uint64(2)) * eighth
                for j in range(eighth):
                    code = (int32(packed[first + j]) >> shift) & int32(3)
                    code |= ((int32(packed[at + part + j]) >> int32(k)) & int32(1)) << int32(2)
                    x[start + k * eighth + j] = float32(code) * step + low

    return pack, spread


@functools.cache
def pack(bits: int, group: int, at_random: bool) -> Any:
    """Compile the job that packs groups of float32 values."""
    constant = _length(group)
    to_planes, _ = _planes(bits, constant)
    levels = np.float32(2**bits - 1)

    @as_job(bits, group, at_random, error_model="numpy")
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, groups, length, n = job[1], job[2], job[3], job[4], job[5]
        pieces, piece, stride, seed = job[6], job[7], job[8], uint32(job[9])
        x = carray(_address(job[10]), ((pieces - 1) * stride + piece,), float32)
        x_bits = carray(_address(job[10]), ((pieces - 1) * stride + piece,), int32)
        out = carray(_address(job[11]), (groups * length * bits // 8,), uint8)
        ranges = carray(_address(job[12]), (2 * groups,), uint16)
        size = uint64(constant if constant else length)
        bytes_of_group = size * uint64(bits) // uint64(8)
        codes = np.zeros(length, np.int32)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            for g in range(uint64(taken * block), uint64(min((taken + 1) * block, groups))):
                first = g * size
                count = min(uint64(n) - first, size)
                start = first if pieces == 1 else first // uint64(piece) * uint64(stride) + first % uint64(piece)
                if count == size:
                    lowest, highest = _extremes(x_bits, start, size)
                else:
                    lowest, highest = _extremes(x_bits, start, count)
                low_half, step_half = _range(lowest, highest, levels, at_random)
                ranges[g], ranges[uint64(groups) + g] = uint16(low_half), uint16(max(step_half, int32(0)))
                if step_half <= 0:
                    codes[:] = 0
                else:
                    low, inverse = _from_half(low_half), float32(1) / _from_half(step_half)
                    if count < size:
                        codes[:] = 0
                        if at_random:
                            _round_at_random(x, start, count, low, inverse, levels, uint32(first) + seed, codes)
                        else:
                            _round(x, start, count, low, inverse, levels, codes)
                    elif at_random:
                        _round_at_random(x, start, size, low, inverse, levels, uint32(first) + seed, codes)
                    else:
                        _round(x, start, size, low, inverse, levels, codes)
                to_planes(codes, length, out, g * bytes_of_group)

    return job_of


@functools.cache
def unpack(bits: int, group: int) -> Any:
    """Compile the job that unpacks groups into float32 values."""
    constant = _length(group)
    _, spread = _planes(bits, constant)

    @as_job(bits, group, error_model="numpy")
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, groups, length, n = job[1], job[2], job[3], job[4], job[5]
        packed = carray(_address(job[6]), (groups * length * bits // 8,), uint8)
        ranges = carray(_address(job[7]), (2 * groups,), float32)
        x = carray(_address(job[8]), (n,), float32)
        padded = np.empty(length, np.float32)
        size = uint64(constant if constant else length)
        bytes_of_group = size * uint64(bits) // uint64(8)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            for g in range(uint64(taken * block), uint64(min((taken + 1) * block, groups))):
                low, step, at = ranges[g], ranges[uint64(groups) + g], g * bytes_of_group
                start = g * size
                if start + size > uint64(n):
                    spread(packed, at, length, low, step, padded, uint64(0))
                    for i in range(uint64(n) - start):
                        x[start + i] = padded[i]
                else:
                    spread(packed, at, length, low, step, x, start)

    return job_of
