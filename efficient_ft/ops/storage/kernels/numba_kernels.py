"""Numba kernels of the storage formats. The module `numba_job` describes a job, whose argument is a pointer.

The functions that a job calls have many parameters, because numba functions receive arrays and numbers separately.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, float32, int16, int32, int64, intp, njit, uint8, uint32, uint64
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from efficient_ft.ops.storage.kernels.numba_job import (
    _address,
    _bits_of,
    _float_of,
    _fused,
    _noise,
    _ordered,
    _take,
    as_job,
    to_bits,
    to_float,
)

_jit: Any = njit(nogil=True, boundscheck=False)
_jit_divide: Any = njit(nogil=True, boundscheck=False, error_model="numpy")  # without a check for division by zero
_INTEGERS = {2: int16, 4: int32, 8: int64}
_CHUNK = 2048  # number of elements per chunk, a multiple of 8; the flags of a chunk fit in the L1 cache
_GATHER = np.uint64(0x0102040810204080)  # factor that moves the lowest bits of eight bytes into the highest byte


def _vector(context: Any, builder: Any, array_type: Any, array: Any, at: Any, kind: Any) -> Any:
    """Return a pointer of type `kind` to the element `at` of an array."""
    made = context.make_array(array_type)(context, builder, array)
    return builder.bitcast(cgutils.get_item_pointer(context, builder, array_type, made, [at]), kind.as_pointer())


def _vector_types(number: Any) -> tuple[Any, Any, Any, str]:
    """Return the LLVM types of a vector of 64 bytes, of a vector mask, and of the mask as an integer, and a suffix."""
    lanes = 512 // number.bitwidth
    vector = ir.VectorType(ir.IntType(number.bitwidth), lanes)
    return vector, ir.VectorType(ir.IntType(1), lanes), ir.IntType(lanes), f"v{lanes}i{number.bitwidth}"


@intrinsic
def _compress(typing: Any, x: Any, i: Any, largest: Any, threshold: Any, out: Any, j: Any, bitmap: Any, at: Any) -> Any:
    """Write the elements x[i], x[i + 1], … whose magnitude is at least `threshold` to `out` from position j.

    64 bytes of x are read, and 64 bytes of `out` are written. The bits of the elements are written to `bitmap` from
    position `at`. Return the number of selected elements.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types_, number = signature.args, signature.args[0].dtype
        vector, mask_type, integer, suffix = _vector_types(number)
        values = builder.load(
            _vector(context, builder, types_[0], args[0], args[1], vector), align=number.bitwidth // 8
        )
        zeros = ir.Constant(ir.VectorType(ir.IntType(32), vector.count), [0] * vector.count)

        def splat(scalar: Any) -> Any:
            one = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(ir.IntType(32), 0))
            return builder.shuffle_vector(one, ir.Constant(vector, ir.Undefined), zeros)

        mask = builder.icmp_signed(">=", builder.and_(values, splat(args[2])), splat(args[3]))
        name = f"llvm.x86.avx512.mask.compress.{suffix}"
        compress = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector, vector, mask_type]), name
        )
        selected = builder.call(compress, [values, ir.Constant(vector, None), mask])
        builder.store(
            selected, _vector(context, builder, types_[4], args[4], args[5], vector), align=number.bitwidth // 8
        )
        bits = builder.bitcast(mask, integer)
        builder.store(bits, _vector(context, builder, types_[6], args[6], args[7], integer), align=1)
        return builder.zext(builder.ctpop(bits), ir.IntType(64))

    return uint64(x, intp, x.dtype, x.dtype, out, intp, bitmap, intp), generate


@intrinsic
def _expand(typing: Any, values: Any, j: Any, bitmap: Any, at: Any, x: Any, i: Any) -> Any:
    """Write 64 bytes to x from position i: the next elements of `values` where a bit is 1, and 0 elsewhere.

    The elements are read from position j of `values`, and the bits from position `at` of `bitmap`. 64 bytes of `values`
    are read. Return the number of bits that are 1.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        types_, number = signature.args, signature.args[0].dtype
        vector, mask_type, integer, suffix = _vector_types(number)
        source = builder.load(
            _vector(context, builder, types_[0], args[0], args[1], vector), align=number.bitwidth // 8
        )
        bits = builder.load(_vector(context, builder, types_[2], args[2], args[3], integer), align=1)
        name = f"llvm.x86.avx512.mask.expand.{suffix}"
        expand = cgutils.get_or_insert_function(
            builder.module, ir.FunctionType(vector, [vector, vector, mask_type]), name
        )
        row = builder.call(expand, [source, ir.Constant(vector, None), builder.bitcast(bits, mask_type)])
        builder.store(row, _vector(context, builder, types_[4], args[4], args[5], vector), align=number.bitwidth // 8)
        return builder.zext(builder.ctpop(bits), ir.IntType(64))

    return uint64(values, intp, bitmap, intp, x, intp), generate


def _lanes(size: int) -> int:
    """Return the number of values that one instruction of the processor compresses, or 0 if there is no instruction."""
    _, _, features = cpu_target.target_context.codegen().magic_tuple()
    return 64 // size if "+avx512vbmi2" in features and size <= 4 else 0


@_jit
def _flags(row, largest, threshold, flags):
    for i in range(len(row)):
        flags[i] = (row[i] & largest) >= threshold


@_jit
def _pack_row(x, where, largest, threshold, extra, values, byte_of, out, flags, lanes):
    """Keep the values whose magnitude is at least `threshold`, until `values` is full.

    The last `extra` values whose magnitude equals `threshold` are dropped. `out` must have space for the full row.
    Every element is written to `out`, but the position advances only after an element that is kept. The function has
    many parameters, because a compiled function receives every array and number separately. `lanes` is the result of
    `_lanes`.
    """
    kept = len(values)
    start, step, pieces, length = where
    j, at = uint64(0), 0
    for piece in range(pieces):
        row = x[start + piece * step : start + piece * step + length]
        whole = length // lanes * lanes if lanes else 0
        if lanes:
            for first in range(0, whole, lanes):
                j += _compress(row, first, largest, threshold, out, int64(j), byte_of, at)
                at += lanes // 8
        for first in range(whole, length, _CHUNK):
            part = row[first : first + _CHUNK]
            count = len(part)
            padded = (count + 7) // 8
            flags[8 * padded - 8 : 8 * padded] = 0
            _flags(part, largest, threshold, flags)
            for i in range(uint64(count)):
                out[j] = part[i]
                j += uint64(flags[i])
            eight = flags[: 8 * padded].view(np.uint64)
            for m in range(padded):
                byte_of[at + m] = (eight[m] * _GATHER) >> uint64(56)
            at += padded
    # The last values are dropped if a sampled threshold is too low, or if too many values equal an exact one.
    surplus, end = int64(j) - kept, int64(j)
    stop = end
    while surplus > 0:
        at -= 1
        for bit in range(7, -1, -1):
            if surplus > 0 and byte_of[at] >> bit & 1:
                stop -= 1
                if extra == 0 or out[stop] & largest == threshold:
                    byte_of[at] ^= np.uint8(1 << bit)
                    surplus -= 1
    if extra != 0:
        for i in range(stop, end):
            if out[i] & largest != threshold:
                out[stop] = out[i]
                stop += 1
    values[:stop] = out[:stop]
    values[stop:] = 0


@_jit
def _subsample(x, where, hop, largest, sample):
    start, step, pieces, length = where
    n, at = pieces * length, 0
    for i in range(len(sample)):
        sample[i] = x[start + at // length * step + at % length] & largest
        at += hop
        if at >= n:
            at -= n


@_jit
def _in_rank(sample, rank, largest):
    """Return the value at `rank` (from 0, in ascending order) of a sample that contains integers from 0 to `largest`.

    The value is found by bisection, because counting loops are vectorized.
    """
    low, high = int64(0), int64(largest)
    while low < high:
        middle = low + (high - low) // 2
        count, bound = 0, sample.dtype.type(middle)
        for i in range(len(sample)):
            count += sample[i] <= bound
        if count > rank:
            high = middle
        else:
            low = middle + 1
    return sample.dtype.type(low)


@_jit
def _exact_threshold(x, where, hop, largest, kept, sample, out):
    """Return the threshold, and the number of values whose magnitude is at least the threshold.

    A bracket around the threshold is estimated from a subsample. The threshold is then selected from the few values in
    the bracket (Floyd, Rivest, CACM 1975).
    """
    start, step, pieces, length = where
    n, m = pieces * length, len(sample)
    k = n - kept  # rank of the threshold, starting at 0 and in ascending order
    low, high = largest - largest, largest
    if n > m:
        _subsample(x, where, hop, largest, sample)
        share = k / n
        wide = int(3 * math.sqrt(m * share * (1 - share))) + 2
        middle = int(share * m)
        if middle - wide > 0:
            low = _in_rank(sample, middle - wide, largest)
        if middle + wide < m - 1:
            high = _in_rank(sample, middle + wide, largest)
    below, j = 0, uint64(0)
    for piece in range(pieces):
        row = x[start + piece * step : start + piece * step + length]
        for i in range(len(row)):  # numba vectorizes loops over indices, but not loops over values
            below += (row[i] & largest) < low
        for i in range(len(row)):
            a = row[i] & largest
            out[j] = a
            j += uint64((a >= low) & (a <= high))
    if below > k or below + int64(j) <= k:  # the threshold is outside the bracket
        below, j = 0, uint64(0)
        for piece in range(pieces):
            for v in x[start + piece * step : start + piece * step + length]:
                out[j] = v & largest
                j += uint64(1)
    between = out[: int64(j)]
    threshold = _in_rank(between, k - below, largest)
    at_least = n - below
    for i in range(len(between)):
        at_least -= between[i] < threshold
    return threshold, at_least


# Each row of a quantized tensor consists of groups. If groups are short, one loop processes all groups of a row and
# reads a range for each element. If groups are long, a separate loop processes each group and keeps its range in
# registers.
@_jit_divide
def _steps_of(low, high, steps):
    """Write the number of codes per unit for each range."""
    for i in range(len(low)):
        width = high[i] - low[i]
        width = float32(1e-30) if width < float32(1e-30) else width  # this comparison preserves NaN
        steps[i] = float32(1) / width * float32(255)


@_jit_divide
def _widths_of(low, high, widths):
    """Write the distance between two codes for each range."""
    for i in range(len(low)):
        widths[i] = (high[i] - low[i]) / float32(255)


@_jit
def _moved(old, new, share):
    """Return old + share · (new - old), rounded as by ``torch.lerp``."""
    if share < float32(0.5):
        return _fused(share, new - old, old)
    return _fused(-(new - old), float32(1) - share, new)


@_jit
def _quantize_short(x, low, step, base, q):
    for i in range(len(x)):
        # The clamped values are not negative, so truncation rounds down.
        scaled = (to_float(x[i]) - low[i]) * step[i]
        q[i] = uint8(int32(min(max(scaled + _noise(i, base), float32(0)), float32(255))))


@_jit
def _quantize_long(x, low, step, base, q):
    for i in range(len(x)):
        q[i] = uint8(int32(min(max((to_float(x[i]) - low) * step + _noise(i, base), float32(0)), float32(255))))


@_jit
def _dequantize_short(q, low, step, x):
    for i in range(len(q)):
        x[i] = to_bits(x, low[i] + float32(q[i]) * step[i])


@_jit
def _dequantize_long(q, low, step, x):
    for i in range(len(q)):
        x[i] = to_bits(x, low + float32(q[i]) * step)


@_jit
def _extremes_short(x, low, high):
    for i in range(len(x)):
        value = _ordered(_bits_of(to_float(x[i])))
        low[i], high[i] = min(low[i], value), max(high[i], value)


@_jit
def _extremes_long(x, low, high):
    for i in range(len(x)):
        value = _ordered(_bits_of(to_float(x[i])))
        low, high = min(low, value), max(high, value)
    return low, high


@functools.cache
def pack(size: int) -> Any:
    """Compile the job that packs rows of values with `size` bytes per value."""
    integer, lanes = _INTEGERS[size], _lanes(size)

    @as_job(size, lanes)
    def job_of(pointer):
        job = carray(pointer, 16)
        rows, pieces, length, kept = job[1], job[2], job[3], job[4]
        exact, rank, m, hop, n = job[8], job[9], job[10], job[14], pieces * length
        x = carray(_address(job[5]), ((rows - 1) * job[12] + (pieces - 1) * job[13] + length,), integer)
        values = carray(_address(job[6]), (rows, kept), integer)
        bitmap = carray(_address(job[7]), (rows, (n + 7) // 8), uint8)
        largest = x.dtype.type(job[11])
        out, flags, sample = np.empty(n + 64, x.dtype), np.empty(_CHUNK, np.uint8), np.empty(min(m, n), x.dtype)
        while True:
            s = _take(job)
            if s >= rows:
                return
            where = (s * job[12], job[13], pieces, length)
            if exact:
                threshold, at_least = _exact_threshold(x, where, hop, largest, kept, sample, out)
                extra = at_least - kept
            else:
                _subsample(x, where, hop, largest, sample)
                threshold, extra = max(_in_rank(sample, rank, largest), x.dtype.type(1)), 0  # drops zeros
            _pack_row(x, where, largest, threshold, extra, values[s], bitmap[s], out, flags, lanes)

    return job_of


@functools.cache
def unpack(size: int) -> Any:
    """Compile the job that unpacks rows of values with `size` bytes per value."""
    integer, lanes = _INTEGERS[size], _lanes(size)

    @as_job(size, lanes)
    def job_of(pointer):
        job = carray(pointer, 16)
        rows, n, kept = job[1], job[2], job[3]
        x = carray(_address(job[4]), (rows, n), integer)
        values = carray(_address(job[5]), (rows, kept), integer)
        bitmap = carray(_address(job[6]), (rows, (n + 7) // 8), uint8)
        padded = np.zeros(kept + 64, values.dtype)
        whole = n // lanes * lanes if lanes else 0
        while True:
            s = _take(job)
            if s >= rows:
                return
            padded[:kept] = values[s]
            row, j = x[s], uint64(0)
            if lanes:
                for first in range(0, whole, lanes):
                    j += _expand(padded, int64(j), bitmap[s], first // 8, row, first)
            for m in range(uint64(whole // 8), uint64(n // 8)):
                byte = uint64(bitmap[s, m])
                for i in range(uint64(8)):
                    bit = (byte >> i) & uint64(1)
                    row[uint64(8) * m + i] = padded[j] & -int64(bit)
                    j += bit
            for i in range(n - n % 8, n):
                bit = (uint64(bitmap[s, n // 8]) >> uint64(i % 8)) & uint64(1)
                row[i] = padded[j] & -int64(bit)
                j += bit

    return job_of


@functools.cache
def quantize(size: int) -> Any:
    """Compile the job that quantizes values of `size` bytes (bfloat16 or float32)."""
    integer = _INTEGERS[size]

    @as_job(size)
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, rows, groups, inner, ranges, short = job[1], job[2], job[3], job[4], job[5], job[6], job[7]
        seed = job[8]
        x = carray(_address(job[9]), (rows, groups, inner), integer)
        low, high = carray(_address(job[10]), (ranges,), float32), carray(_address(job[11]), (ranges,), float32)
        q = carray(_address(job[12]), (rows, groups, inner), uint8)
        step = np.empty(ranges, np.float32)
        _steps_of(low, high, step)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            for s in range(taken * block, min((taken + 1) * block, rows)):
                for g in range(groups):
                    base = uint32((s * groups + g) * inner + seed)
                    if short:
                        _quantize_short(x[s, g], low, step, base, q[s, g])
                    else:
                        _quantize_long(x[s, g], low[g], step[g], base, q[s, g])

    return job_of


@functools.cache
def dequantize(size: int) -> Any:
    """Compile the job that dequantizes to values of `size` bytes (bfloat16 or float32)."""
    integer = _INTEGERS[size]

    @as_job(size)
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, rows, groups, inner, ranges, short = job[1], job[2], job[3], job[4], job[5], job[6], job[7]
        q = carray(_address(job[8]), (rows, groups, inner), uint8)
        low, high = carray(_address(job[9]), (ranges,), float32), carray(_address(job[10]), (ranges,), float32)
        x = carray(_address(job[11]), (rows, groups, inner), integer)
        step = np.empty(ranges, np.float32)
        _widths_of(low, high, step)
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            for s in range(taken * block, min((taken + 1) * block, rows)):
                for g in range(groups):
                    if short:
                        _dequantize_short(q[s, g], low, step, x[s, g])
                    else:
                        _dequantize_long(q[s, g], low[g], step[g], x[s, g])

    return job_of


@functools.cache
def extremes(size: int) -> Any:
    """Compile the job that computes the minimum and maximum of each group of values of `size` bytes.

    The extremes of each block of rows are computed first: for each group, or for each element of a row if groups are
    short. The thread that completes the last block combines the blocks, and moves the given ranges, if any, towards the
    extremes.
    """
    integer = _INTEGERS[size]

    @as_job(size)
    def job_of(pointer):
        job = carray(pointer, 16)
        blocks, block, rows, groups, inner, ranges, short = job[1], job[2], job[3], job[4], job[5], job[6], job[7]
        x = carray(_address(job[8]), (rows, groups, inner), integer)
        low, high = (
            carray(_address(job[9]), (blocks, ranges), int32),
            carray(_address(job[10]), (blocks, ranges), int32),
        )
        count = short if short else groups
        out = carray(_address(job[11]), (2, count), float32)
        has_old = job[12] != 0
        old_low = carray(_address(job[12]), (count if has_old else 0,), float32)
        old_high = carray(_address(job[13]), (count if has_old else 0,), float32)
        share = float32(job[14:15].view(np.float64)[0])
        while True:
            taken = _take(job)
            if taken >= blocks:
                return
            low[taken], high[taken] = 0x7FFFFFFF, -0x80000000
            for s in range(taken * block, min((taken + 1) * block, rows)):
                for g in range(groups):
                    if short:
                        _extremes_short(x[s, g], low[taken], high[taken])
                    else:
                        low[taken, g], high[taken, g] = _extremes_long(x[s, g], low[taken, g], high[taken, g])
            if _take(job[15:]) < blocks - 1:
                continue
            width = ranges // count
            for g in range(count):
                lowest, highest = int32(0x7FFFFFFF), int32(-0x80000000)
                for b in range(blocks):
                    for i in range(g * width, (g + 1) * width):
                        lowest, highest = min(lowest, low[b, i]), max(highest, high[b, i])
                new_low, new_high = _float_of(_ordered(lowest)), _float_of(_ordered(highest))
                out[0, g] = _moved(old_low[g], new_low, share) if has_old else new_low
                out[1, g] = _moved(old_high[g], new_high, share) if has_old else new_high

    return job_of
