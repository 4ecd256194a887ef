"""Jobs, which are the entry points of numba kernels, and functions of numbers that several kernels use.

Importing this module requires numba and a working compiler.

Each job is a C function with one argument: a pointer to an array of 64-bit integers, which contains sizes and data
addresses. A job takes rows from the shared counter ``job[0]`` until no rows remain. Any number of threads can therefore
run a job at the same time. A job is compiled at its first use, which takes seconds, and is then cached on disk.

Only jobs are cached. The code of a job includes the functions that it calls. Each variant of a job, and of a function
that it calls, therefore has a unique name (see `as_job` and `variant_of`). Within a process, numba distinguishes
variants of functions that share a name. However, code cached by different processes may use the same symbols for these
variants. A call could then reach the wrong variant and return wrong results without an error.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from llvmlite import ir
from numba import float32, int16, int32, int64, intp, njit, types, uint32
from numba.core import cgutils
from numba.core.registry import cpu_target
from numba.extending import intrinsic

from efficient_ft.core.process_memory import release_library_pages
from efficient_ft.ops.storage.kernels.compiler import Kernel, compiler_works

if not compiler_works():  # `optional_module` then selects the plain implementation
    raise ImportError("numba cannot compile kernels")

_jit: Any = njit(nogil=True, boundscheck=False)
_INT = ir.IntType(32)


@intrinsic
def _take(typing: Any, counter: Any) -> Any:
    """Increment counter[0] atomically and return the old value."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        array = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, signature.args[0], array, [context.get_constant(intp, 0)])
        return builder.atomic_rmw("add", pointer, context.get_constant(int64, 1), "acq_rel")

    return int64(counter), generate


@intrinsic
def _address(typing: Any, integer: Any) -> Any:
    """Cast an integer to a pointer."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(integer), generate


@intrinsic
def _bits_of(typing: Any, number: Any) -> Any:
    """Reinterpret a float32 as an int32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(int32))

    return int32(float32), generate


@intrinsic
def _float_of(typing: Any, bits: Any) -> Any:
    """Reinterpret an int32 as a float32."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.bitcast(args[0], context.get_value_type(float32))

    return float32(int32), generate


@intrinsic
def _fused(typing: Any, a: Any, b: Any, c: Any) -> Any:
    """Compute a · b + c for float32 numbers with one rounding, as torch does in ``lerp``."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        return builder.fma(*args)

    return float32(float32, float32, float32), generate


@intrinsic
def prefetch(typing: Any, array: Any, index: Any) -> Any:
    """Request the cache line of array[index] without waiting for it. The index may be outside the array."""

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        value = context.make_array(signature.args[0])(context, builder, args[0])
        pointer = cgutils.get_item_pointer(context, builder, signature.args[0], value, [args[1]])
        pointer = builder.bitcast(pointer, cgutils.voidptr_t)
        number = partial(context.get_constant, int32)
        request = builder.module.declare_intrinsic(
            "llvm.prefetch", [cgutils.voidptr_t], ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, *3 * [_INT]])
        )
        builder.call(request, [pointer, number(0), number(3), number(1)])  # to read data into all caches
        return context.get_dummy_value()

    return types.void(array, index), generate


@intrinsic
def to_float(typing: Any, bits: Any) -> Any:
    """Convert the bits of a bfloat16 number (an int16) or of a float32 number (an int32) to float32.

    A float32 number is returned unchanged.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = args[0]
        if signature.args[0] == float32:
            return wide
        if signature.args[0] == int16:
            zeros = context.get_constant(int32, 16)
            wide = builder.shl(builder.zext(wide, context.get_value_type(int32)), zeros)
        return builder.bitcast(wide, context.get_value_type(float32))

    return (float32(bits), generate) if bits in (int16, int32, float32) else None


@intrinsic
def to_bits(typing: Any, x: Any, number: Any) -> Any:
    """Return the bits of a float32 number as an element of the array x.

    If the elements are int16, the number is rounded to bfloat16 (to nearest, ties to even), and NaN becomes 0x7FC0. If
    the elements are float32, the number is returned unchanged.
    """

    def generate(context: Any, builder: Any, signature: Any, args: Any) -> Any:
        if signature.return_type == float32:
            return args[1]
        bits = builder.bitcast(args[1], context.get_value_type(int32))
        if signature.return_type == int32:
            return bits
        constant = partial(context.get_constant, int32)
        odd = builder.and_(builder.lshr(bits, constant(16)), constant(1))
        rounded = builder.lshr(builder.add(builder.add(bits, constant(0x7FFF)), odd), constant(16))
        is_nan = builder.fcmp_unordered("uno", args[1], args[1])
        return builder.trunc(builder.select(is_nan, constant(0x7FC0), rounded), context.get_value_type(int16))

    return (x.dtype(x, float32), generate) if x.dtype in (int16, int32, float32) else None


def variant_of(*variant: object) -> Callable[[Any], Any]:
    """Return a decorator that adds `variant`, the values on which a function depends, to the function's name.

    The decorator is required if a job calls a function that is defined in another function. `variant` must contain all
    values on which the function depends, except constants of its module.
    """

    def named(function: Any) -> Any:
        function.__qualname__ = "_".join([function.__qualname__, *map(str, variant)])
        return function

    return named


def as_job(*variant: object, **options: Any) -> Callable[[Any], Any]:
    """Return a decorator that compiles a function with one pointer argument to a C function, or loads cached code.

    The name of the C function includes the variant and the processor.

    Args:
        variant: Values on which the function depends, except constants of its module.
        options: Options of ``numba.cfunc``.
    """

    def compiled(function: Any) -> Any:
        function.__qualname__ = function.__qualname__.partition(".")[0]
        _, processor, _ = cpu_target.target_context.codegen().magic_tuple()
        job = Kernel(variant_of(*variant, processor)(function), **options)
        release_library_pages()  # the compiler is not used until the next job
        return job

    return compiled


@_jit
def _hash(i, base):
    h = uint32(base + uint32(i))
    h = uint32((h ^ (h >> uint32(16))) * uint32(0x7FEB352D))
    h = uint32((h ^ (h >> uint32(15))) * uint32(0x846CA68B))
    return uint32(h ^ (h >> uint32(16)))


@_jit
def _noise(i, base):
    return float32(int32(_hash(i, base) >> uint32(8))) * float32(2.0**-24)


@_jit
def _ordered(bits):
    """Map the bits of a float to an integer, or vice versa. The integers have the same order as the floats.

    Integers are compared instead of floats, because integer comparisons are vectorized.
    """
    return int32(bits ^ ((bits >> int32(31)) & int32(0x7FFFFFFF)))


@njit(nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract"})
def _exp(x):
    """Compute e^x for x ≤ 0 as 2^k e^r with an integer k and |r| ≤ ln 2 / 2. The relative error is below 2e-7.

    A polynomial of degree 6 approximates e^r.
    """
    x = float32(-87) if x < float32(-87) else x  # this comparison preserves NaN
    k = np.floor(x * float32(1.44269504088896341) + float32(0.5))
    r = x - k * float32(0.693359375)
    r = r + k * float32(2.12194440e-4)
    y = r * float32(1 / 720) + float32(1 / 120)
    y = r * y + float32(1 / 24)
    y = r * y + float32(1 / 6)
    y = r * y + float32(0.5)
    y = r * y + float32(1)
    y = r * y + float32(1)
    return y * _float_of((int32(k) + int32(127)) << int32(23))
