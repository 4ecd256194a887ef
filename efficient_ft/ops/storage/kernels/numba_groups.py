"""Numba kernels of the group format. `numba_job` describes the structure of a job.

A function is compiled for each number of bits, each common group length, and each size of the values (bfloat16 or
float32). The group length is then a constant, so that all loops are vectorized. bfloat16 values are converted in
registers.

The job that packs processes many groups at a time: first the extremes of all groups, then all ranges, and then all
codes. The ranges are computed without branches, so that this loop is vectorized, too.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from numba import carray, float32, int16, int32, int64, njit, uint8, uint16, uint32, uint64

from efficient_ft.ops.storage.kernels.numba_job import (
    _address,
    _bits_of,
    _float_of,
    _noise,
    _ordered,
    _take,
    as_job,
    to_bits,
    to_float,
    variant_of,
)

# This error model omits the check for division by zero, because the check would prevent vectorization.
_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy")


@_jit
def _to_half(value):
    """Round a float32 that is not NaN to fp16 (to nearest, ties to even), and return the fp16 bits as an int32."""
    bits = _bits_of(value)
    sign, bits = (bits >> int32(16)) & int32(0x8000), bits & int32(0x7FFFFFFF)
    normal = int32(bits - int32(0x38000000) + int32(0xFFF) + ((bits >> int32(13)) & int32(1))) >> int32(13)
    # For subnormal numbers, the sum rounds to multiples of 2⁻²⁴.
    subnormal = _bits_of(_float_of(bits) + float32(0.5)) - int32(0x3F000000)
    half = int32(subnormal) if bits < int32(0x38800000) else int32(normal)
    return int32(sign | (int32(0x7C00) if bits >= int32(0x47800000) else half))  # at least 2¹⁶


@_jit
def _from_half(bits):
    """Convert the bits of a finite fp16 number to float32."""
    sign, bits = (bits & int32(0x8000)) << int32(16), bits & int32(0x7FFF)
    subnormal = float32(int32(bits)) * float32(2.0**-24)
    normal = _float_of((bits << int32(13)) + int32(0x38000000))
    return _float_of(_bits_of(subnormal if bits < int32(0x0400) else normal) | sign)


@_jit
def _extremes(x, start, count):
    """Return the minimum and the maximum of `count` values as ordered integers (see `_ordered`)."""
    low, high = int32(0x7FFFFFFF), int32(-0x80000000)
    for i in range(uint64(count)):
        ordered = _ordered(_bits_of(to_float(x[start + i])))
        low, high = min(low, ordered), max(high, ordered)
    return low, high


@_jit
def _ranges(lows, highs, levels, outward, low_halves, step_halves):
    """Compute the fp16 bits of the minimum and of the step of each group. The step -1 means that all codes are 0.

    `lows` and `highs` are the extremes of the groups as ordered integers (see `_ordered`). If `outward` is True, the
    minimum is rounded down and the step is rounded up.
    """
    for g in range(len(lows)):
        lowest = _float_of(_ordered(lows[g])) + float32(0.0)
        low = _to_half(lowest)
        if outward:
            down = int32(1) if low & int32(0x8000) else int32(-1)
            exceeds = (low & int32(0x7FFF) != int32(0x7C00)) & (_from_half(low) > lowest)
            low = int32(low + (down if exceeds else int32(0)))
        wide = (_float_of(_ordered(highs[g])) - _from_half(low)) / levels
        step = _to_half(wide)
        if outward:
            exceeds = (step != int32(0x7C00)) & (_from_half(step) < wide)
            step = int32(step + (int32(1) if exceeds else int32(0)))
        step = step if wide > float32(0) else int32(0)
        low = int32(0x7C00) if step == int32(0x7C00) else low
        step = int32(-1) if low & int32(0x7FFF) == int32(0x7C00) else step
        finite = (highs[g] < int32(0x7F800000)) & (lows[g] > int32(-0x7F800001))
        low_halves[g] = low if finite else int32(0x7E00)
        step_halves[g] = step if finite else int32(-1)


def _word(count: int) -> Any:
    """Return the largest unsigned integer type whose size divides `count` bytes."""
    return next(word for word in (uint64, uint32, uint16, uint8) if count % (word.bitwidth // 8) == 0)


@functools.cache
def _plane(group: int, bits: int, width: int, skipped: int) -> tuple[Any, Any, Any]:
    """Return a type of words, and functions that pack and unpack `width` bits of each code of a group.

    Codes of `bits` bits are stored as bytes. The lowest `skipped` bits of each code are ignored. Up to eight codes are
    processed at a time as the bytes of a word.
    """
    word, parts = _word(group // 8 * math.gcd(width, bits)), 8 // width
    size = word.bitwidth // 8
    words, mask = uint64(group * width // 8 // size), word(int.from_bytes(bytes([2**width - 1] * size), "little"))

    variant = variant_of(group, bits, width, skipped)

    @_jit
    @variant
    def pack(codes, out, at):
        for j in range(words):
            number = uint64(0)
            for k in range(uint64(parts)):
                number |= ((uint64(codes[j + k * words]) >> uint64(skipped)) & mask) << (uint64(width) * k)
            out[at + j] = word(number)

    @_jit
    @variant
    def unpack(packed, at, codes, at_codes):
        for k in range(uint64(parts)):
            for j in range(words):
                number = ((uint64(packed[at + j]) >> (uint64(width) * k)) & mask) << uint64(skipped)
                codes[at_codes + j + k * words] = word(
                    (number | codes[at_codes + j + k * words]) if skipped else number
                )

    return word, pack, unpack


def _length(group: int) -> int:
    """Return `group` if loops are compiled for this group length, or 0 if the length is read from the job."""
    return group if group in (32, 40, 64, 128) else 0


@functools.cache
def pack(bits: int, group: int, at_random: bool, is_half: bool) -> Any:
    """Compile the job that packs groups of bfloat16 values if `is_half` is True, or of float32 values otherwise."""
    constant, levels = _length(group), np.float32(2**bits - 1)
    integer = int16 if is_half else int32
    word, low_plane, _ = _plane(group, bits, 2 if bits == 3 else bits, 0)
    high_word, high_plane, _ = _plane(group, bits, 1, 2)
    # Numbers of words per group, and the position of the word with the first high bits in a group with 3 bits.
    words, high_words = uint64(group * bits // word.bitwidth), uint64(group * bits // high_word.bitwidth)
    high = uint64(group * 2 // high_word.bitwidth)

    @_jit
    @variant_of(bits, group, at_random, is_half)
    def encode(x, start, count, low, inverse, base, codes, at):
        for i in range(uint64(count)):
            added = _noise(i, base) if at_random else float32(0.5)
            steps = min(max((to_float(x[start + i]) - low) * inverse + added, float32(0)), levels)
            codes[at + i] = uint8(int32(steps))

    @as_job(bits, group, at_random, is_half, error_model="numpy")
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, groups, length, n = job[1], job[2], job[3], job[4], job[5]
        pieces, piece, stride, seed = job[6], uint64(job[7]), uint64(job[8]), uint32(job[9])
        x = carray(_address(job[10]), ((pieces - 1) * job[8] + job[7],), integer)
        size = uint64(constant if constant else length)
        bytes_of_group = size * uint64(bits) // uint64(8)
        out = carray(_address(job[11]), (groups * length * bits // 8,), uint8)
        out_words = carray(_address(job[11]), (groups * int64(words),), word)
        out_high = carray(_address(job[11]), (groups * int64(high_words),), high_word)
        ranges = carray(_address(job[12]), (2 * groups,), uint16)
        codes = np.zeros(length, np.uint8)
        codes_words, codes_high = codes.view(word), codes.view(high_word)
        starts = np.empty(block, np.uint64)
        lows, highs, low_halves, step_halves = np.empty((4, block), np.int32)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            first, count = uint64(taken * block), uint64(min((taken + 1) * block, groups) - taken * block)
            at = first * size
            start, inside = at // piece * stride + at % piece, at % piece
            for g in range(count):
                starts[g] = start
                if (first + g + uint64(1)) * size > uint64(n):
                    lows[g], highs[g] = _extremes(x, start, uint64(n) - (first + g) * size)
                else:
                    lows[g], highs[g] = _extremes(x, start, size)
                start, inside = start + size, inside + size
                if inside >= piece:
                    start, inside = start + stride - piece, uint64(0)
            _ranges(lows[:count], highs[:count], levels, at_random, low_halves, step_halves)
            for g in range(count):
                ranges[first + g] = uint16(low_halves[g])
                ranges[uint64(groups) + first + g] = uint16(max(step_halves[g], int32(0)))
            for g in range(count):
                at, start, group_at = (first + g) * size, starts[g], first + g
                low, inverse = _from_half(low_halves[g]), float32(1) / _from_half(step_halves[g])
                base = uint32(uint32(at) + seed)
                is_full = (step_halves[g] > 0) & (at + size <= uint64(n))
                if is_full and bits == 8:
                    encode(x, start, size, low, inverse, base, out, group_at * bytes_of_group)
                    continue
                if is_full:
                    encode(x, start, size, low, inverse, base, codes, uint64(0))
                else:
                    codes[:] = 0
                    if step_halves[g] > 0:
                        encode(x, start, uint64(n) - at, low, inverse, base, codes, uint64(0))
                low_plane(codes_words, out_words, group_at * words)
                if bits == 3:
                    high_plane(codes_high, out_high, group_at * high_words + high)

    return job_of


@functools.cache
def unpack(bits: int, group: int, is_half: bool) -> Any:
    """Compile the job that unpacks groups into bfloat16 values if `is_half` is True, or float32 values otherwise."""
    constant = _length(group)
    integer = int16 if is_half else int32
    word, _, low_plane = _plane(group, bits, 2 if bits == 3 else bits, 0)
    high_word, _, high_plane = _plane(group, bits, 1, 2)
    # Numbers of words per group, and the position of the word with the first high bits in a group with 3 bits.
    words, high_words = uint64(group * bits // word.bitwidth), uint64(group * bits // high_word.bitwidth)
    high = uint64(group * 2 // high_word.bitwidth)

    words_of_codes, high_words_of_codes = (uint64(group * 8 // each.bitwidth) for each in (word, high_word))
    # The codes of several groups are stored before they are loaded, because a load has to wait for narrower stores.
    at_a_time = uint64(max(1, 1024 // group))

    @_jit
    @variant_of(bits, group, is_half)
    def decode(codes, at, count, low, step, x, start):
        for i in range(uint64(count)):
            x[start + i] = to_bits(x, float32(int32(codes[at + i])) * step + low)

    @as_job(bits, group, is_half, error_model="numpy")
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, groups, length, n = job[1], job[2], job[3], job[4], job[5]
        packed = carray(_address(job[6]), (groups * length * bits // 8,), uint8)
        packed_words = carray(_address(job[6]), (groups * int64(words),), word)
        packed_high = carray(_address(job[6]), (groups * int64(high_words),), high_word)
        ranges = carray(_address(job[7]), (2 * groups,), float32)
        x = carray(_address(job[8]), (n,), integer)
        codes = np.empty(int64(at_a_time) * length, np.uint8)
        codes_words, codes_high = codes.view(word), codes.view(high_word)
        size = uint64(constant if constant else length)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            stop = uint64(min((taken + 1) * block, groups))
            for first in range(uint64(taken * block), stop, at_a_time):
                count = min(stop - first, at_a_time)
                if bits != 8:
                    for i in range(count):
                        low_plane(packed_words, (first + i) * words, codes_words, i * words_of_codes)
                        if bits == 3:
                            at = (first + i) * high_words + high
                            high_plane(packed_high, at, codes_high, i * high_words_of_codes)
                for i in range(count):
                    g = first + i
                    low, step, start = ranges[g], ranges[uint64(groups) + g], g * size
                    if start + size > uint64(n):
                        source, at = (packed, start) if bits == 8 else (codes, i * size)
                        decode(source, at, uint64(n) - start, low, step, x, start)
                    elif bits == 8:
                        decode(packed, start, size, low, step, x, start)
                    else:
                        decode(codes, i * size, size, low, step, x, start)

    return job_of
