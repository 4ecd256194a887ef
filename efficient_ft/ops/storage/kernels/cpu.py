"""CPU kernels of the storage formats, compiled by numba.

Magnitudes are compared as integers: without the sign bit, floats of one dtype are ordered like integers of the same
width. One kernel therefore supports all dtypes of a width.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
import struct
from array import array
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_ft.ops.optional import optional_module

_BLOCK = 1 << 14  # number of elements that a thread processes at a time
_SHORT = 1 << 10  # groups with fewer elements are processed together
_SMALL = 1 << 12  # in tensors with at most this number of elements, groups are processed one by one
_UNUSED = (0,) * 15  # a job has at most 15 values, or 14 if it uses the last value as a second counter
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}

#: Functions that return the compiled kernels, or None if numba is not installed.
_kernels = partial(optional_module, "efficient_ft.ops.storage.kernels.numba_kernels")
_groups = partial(optional_module, "efficient_ft.ops.storage.kernels.numba_groups")


def supports(x: Tensor) -> bool:
    """Return True if the kernels support `x`."""
    return x.device.type == "cpu" and x.element_size() in _INTEGERS and x.numel() > 0 and _kernels() is not None


def load() -> None:
    """Load numba and a kernel, as the first call of a kernel would (20 MiB, or 60 MiB if the kernel is compiled)."""
    if _kernels() is not None:
        group_pack(torch.zeros(1, 64), 4, 64, None)


def compiler_used() -> bool:
    """Return True if this process has compiled a kernel."""
    compiler = optional_module("efficient_ft.ops.storage.kernels.compiler")
    return compiler is not None and compiler.Kernel.compiler_used


def sparse_pack(x: Tensor, kept: int, rank: int | None, subsample: int, hop: int) -> tuple[Tensor, Tensor]:
    """Compute `ops.storage.sparse_pack`.

    Args:
        x: Rows, each of which consists of M pieces, (S, M, L). The last dimension must be contiguous.
        kept: Number of values kept per row, K.
        rank: Rank of the threshold in a subsample (ascending, starting at 0). If None, the threshold is exact.
        subsample: Number of values in the subsample of a row.
        hop: Distance between consecutive values of the subsample. The subsample wraps around at the end of the row.
    """
    rows, n = x.shape[0], x[0].numel()
    values, bitmap = x.new_empty(rows, kept), torch.empty(rows, -(-n // 8), dtype=torch.uint8)
    size = x.element_size()
    largest = torch.iinfo(_INTEGERS[size]).max
    addresses = [t.data_ptr() for t in (x, values, bitmap)]
    run_in_threads(
        _kernels().pack(size),
        [*x.shape, kept, *addresses, rank is None, rank or 0, subsample, largest, x.stride(0), x.stride(1), hop],
    )
    return values, bitmap


def sparse_unpack(values: Tensor, bitmap: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Compute `ops.storage.sparse_unpack`."""
    values, bitmap = values.to(dtype).contiguous(), bitmap.contiguous()
    rows, kept = values.shape
    x = values.new_empty(rows, n)
    addresses = [t.data_ptr() for t in (x, values, bitmap)]
    run_in_threads(_kernels().unpack(x.element_size()), [rows, n, kept, *addresses])
    return x


def quantize(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """Compute `ops.storage.quantize`."""
    q = torch.empty(x.shape, dtype=torch.uint8)
    x = _loadable(x).contiguous()
    shape, ranges = _rows(x, low, high)
    run_in_threads(_kernels().quantize(x.element_size()), [*shape, int(seed), *(t.data_ptr() for t in (x, *ranges, q))])
    return q


def dequantize(q: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute `ops.storage.dequantize`."""
    q, x = q.contiguous(), torch.empty(q.shape, dtype=dtype if dtype == torch.bfloat16 else torch.float32)
    shape, ranges = _rows(q, low, high)
    run_in_threads(_kernels().dequantize(x.element_size()), [*shape, *(t.data_ptr() for t in (q, *ranges, x))])
    return x.to(dtype)


def extremes(x: Tensor, old: tuple[Tensor, Tensor] | None = None, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Compute `ops.storage.extremes`."""
    x, groups = _loadable(x).contiguous(), x.shape[1]
    shape, _ = _rows(x)
    of_blocks = torch.empty(2, shape[0], shape[5], dtype=torch.int32)
    found = torch.empty(2, groups, dtype=torch.float32)
    addresses = [x.data_ptr(), of_blocks.data_ptr(), of_blocks.data_ptr() + of_blocks.nbytes // 2, found.data_ptr()]
    ranges = [] if old is None else [t.expand(groups).contiguous() for t in old]  # kept until the kernel ends
    of_old = [t.data_ptr() for t in ranges] or [0, 0]
    number = int.from_bytes(struct.pack("<d", share), "little", signed=True)
    run_in_threads(_kernels().extremes(x.element_size()), [*shape, *addresses, *of_old, number])
    low, high = found.unbind()
    return low, high


def group_pack(x: Tensor, bits: int, length: int, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `ops.storage.group_pack` for groups of `length` values.

    x (M, L) consists of M pieces. The last dimension of x must be contiguous, and L must be a multiple of `length`
    unless M is 1. `seed` is an int64 scalar tensor. If `seed` is None, values are rounded to nearest.
    """
    x, n = _loadable(x), x.numel()
    groups = -(-n // length)
    codes = torch.empty(groups, length * bits // 8, dtype=torch.uint8)
    ranges = torch.empty(2, groups, dtype=torch.float16)
    addresses = [t.data_ptr() for t in (x, codes, ranges)]
    kernel = _groups().pack(bits, length, seed is not None, x.dtype == torch.bfloat16)
    number = 0 if seed is None else int(seed)
    run_in_threads(kernel, [*_in_blocks(groups, length), groups, length, n, *x.shape, x.stride(0), number, *addresses])
    return codes, ranges


def group_unpack(codes: Tensor, ranges: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Compute `ops.storage.group_unpack`."""
    codes, ranges = codes.contiguous(), ranges.float()
    groups, length = codes.shape[0], codes.shape[1] * 8 // bits
    half = dtype == torch.bfloat16
    x = torch.empty(n, dtype=dtype if half else torch.float32)
    addresses = [t.data_ptr() for t in (codes, ranges, x)]
    run_in_threads(_groups().unpack(bits, length, half), [*_in_blocks(groups, length), groups, length, n, *addresses])
    return x.to(dtype)


def _loadable(x: Tensor) -> Tensor:
    """Return x in a dtype that the kernels can load: x itself if x is bfloat16, or x in float32 otherwise."""
    return x if x.dtype == torch.bfloat16 else x.float()


def _in_blocks(groups: int, length: int) -> tuple[int, int]:
    block = -(-_BLOCK // length)
    return -(-groups // block), block


def _rows(x: Tensor, *of_groups: Tensor) -> tuple[list[int], list[Tensor]]:
    """Divide a tensor (outer, G, inner) into blocks of rows.

    Return two lists. The first list contains the numbers of blocks, rows per block, rows, groups, elements per group,
    and ranges, and the original number of groups if groups are short, or 0. The second list contains the tensors
    `of_groups`. Each tensor has one value per group, or one value per element of a row if groups are short.
    """
    rows, groups, inner = x.shape
    block = -(-_BLOCK // (groups * inner))
    blocks = -(-rows // block)
    if inner < _SHORT and x.numel() > _SMALL:
        expanded = [t.repeat_interleave(inner) for t in of_groups]
        return [blocks, block, rows, 1, groups * inner, groups * inner, groups], expanded
    return [blocks, block, rows, groups, inner, groups, 0], [t.contiguous() for t in of_groups]


def run_in_threads(kernel: Any, job: list[int]) -> None:
    """Run a kernel in the threads of torch.

    The kernel receives a pointer to an array of integers: a shared counter, followed by the values of `job`.
    """
    # An array of the standard library is created faster than a tensor or a numpy array.
    numbers = array("q", (0, *job, *_UNUSED[len(job) :]))
    pointer, _ = numbers.buffer_info()
    threads = max(1, min(torch.get_num_threads(), job[0]))
    if threads == 1:
        _function(kernel)(pointer)
        return
    parallel = _team()
    if parallel is not None:
        parallel(kernel.address, pointer, threads, 0)
        return
    function = _function(kernel)
    others = [_threads(os.getpid()).submit(function, pointer) for _ in range(threads - 1)]
    function(pointer)
    for other in others:
        other.result()


@functools.cache
def _function(kernel: Any) -> Callable[[int], None]:
    """Return a function that runs a kernel with the address of its job, without conversions."""
    function: Any = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(kernel.address)
    return function  # type: ignore[no-any-return]


@functools.cache
def _team() -> Callable[..., None] | None:
    """Return ``GOMP_parallel`` of torch's OpenMP library, or None if the library is not found.

    ``GOMP_parallel`` runs a function in all threads. The threads of a separate pool would share the cores with torch's
    threads, which spin for a while after each operation. Packing the activations of a step would then take 1.5 times as
    long.
    """
    try:
        with open("/proc/self/maps", encoding="utf-8") as maps:
            loaded = {line.split()[-1] for line in maps if re.search(r"/torch/lib/lib(gomp|iomp5|omp)[^/]*$", line)}
        parallel: Any = ctypes.CDLL(min(loaded)).GOMP_parallel
    except (OSError, ValueError, AttributeError):
        return None
    parallel.restype = None
    parallel.argtypes = [ctypes.c_void_p, ctypes.c_void_p, ctypes.c_uint, ctypes.c_uint]
    return parallel  # type: ignore[no-any-return]


@functools.cache
def _threads(process: int) -> ThreadPoolExecutor:
    """Return the thread pool of a process. A forked process creates a new pool, because threads are not inherited."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="packing")
