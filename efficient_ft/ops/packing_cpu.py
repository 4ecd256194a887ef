"""CPU kernels of `packing`, compiled by numba where it is installed; without it the plain torch forms serve.

Magnitudes are compared as integers: without the sign bit, floats of one type are ordered as integers of their width
are. So one kernel serves every type.
"""

from __future__ import annotations

import ctypes
import functools
import os
import re
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

_BLOCK = 1 << 14  # elements that a thread takes at a time
_SHORT = 1 << 10  # groups shorter than this are gone through together
_INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}


def serves(x: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return x.device.type == "cpu" and x.element_size() in _INTEGERS and x.numel() > 0 and _kernels() is not None


def sparse_pack(x: Tensor, kept: int, rank: int | None, subsample: int, hop: int) -> tuple[Tensor, Tensor]:
    """As `packing.sparse_pack`.

    Args:
        x: (S, M, L), a row in M pieces, the last dimension contiguous.
        rank: of the threshold in ascending order (from 0) in a subsample; None: exact.
        subsample: values of a row in it.
        hop: from each of them to the next, around the row.
    """
    rows, n = x.shape[0], x[0].numel()
    values, bitmap = x.new_empty(rows, kept), torch.empty(rows, -(-n // 8), dtype=torch.uint8)
    size = x.element_size()
    largest = torch.iinfo(_INTEGERS[size]).max
    addresses = [t.data_ptr() for t in (x, values, bitmap)]
    _run(
        _kernels().pack(size),
        [*x.shape, kept, *addresses, rank is None, rank or 0, subsample, largest, x.stride(0), x.stride(1), hop],
    )
    return values, bitmap


def sparse_unpack(values: Tensor, bitmap: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """As `packing.sparse_unpack`."""
    values, bitmap = values.to(dtype).contiguous(), bitmap.contiguous()
    rows, kept = values.shape
    x = values.new_empty(rows, n)
    _run(_kernels().unpack(x.element_size()), [rows, n, kept, *(t.data_ptr() for t in (x, values, bitmap))])
    return x


def quantise(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """As `packing.quantise`."""
    q = torch.empty(x.shape, dtype=torch.uint8)
    x = x.contiguous().float()
    steps = 255 / (high - low).clamp_min(1e-30)
    shape, ranges = _rows(x, low, steps)
    _run(_kernels().quantise(), [*shape, int(seed), *(t.data_ptr() for t in (x, *ranges, q))])
    return q


def dequantise(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """As `packing.dequantise`."""
    q, x = q.contiguous(), torch.empty(q.shape, dtype=torch.float32)  # as the kernel writes it
    shape, ranges = _rows(q, low, (high - low) / 255)
    _run(_kernels().dequantise(), [*shape, *(t.data_ptr() for t in (q, *ranges, x))])
    return x


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `packing.extremes`."""
    x, groups = x.contiguous().float(), x.shape[1]
    shape, _ = _rows(x)
    low, high = torch.empty(2, shape[0], shape[5], dtype=torch.float32).unbind()
    _run(_kernels().extremes(), [*shape, *(t.data_ptr() for t in (x, low, high))])
    return low.amin(0).view(groups, -1).amin(1), high.amax(0).view(groups, -1).amax(1)


def _rows(x: Tensor, *of_groups: Tensor) -> tuple[list[int], list[Tensor]]:
    """How a tensor (outer, G, inner) is gone through: blocks, rows in a block, rows, groups, inner, ranges, whether
    groups are short; and what there is for each group, where they are short for each element of a row instead."""
    rows, groups, inner = x.shape
    block = -(-_BLOCK // (groups * inner))
    blocks = -(-rows // block)
    if inner < _SHORT:
        expanded = [t.repeat_interleave(inner) for t in of_groups]
        return [blocks, block, rows, 1, groups * inner, groups * inner, True], expanded
    return [blocks, block, rows, groups, inner, groups, False], [t.contiguous() for t in of_groups]


# ------------------------------------------------------------------------------------------------ threads
def _run(kernel: Any, job: list[int]) -> None:
    """Call a kernel in torch's threads; ``job[0]`` of what it gets is the counter of rows."""
    numbers = np.zeros(16, np.int64)
    numbers[1 : 1 + len(job)] = job
    threads = max(1, min(torch.get_num_threads(), job[0]))
    parallel = _team()
    if threads > 1 and parallel is not None:
        parallel(kernel.address, numbers.ctypes.data, threads, 0)
        return
    pointer = numbers.ctypes.data_as(ctypes.POINTER(ctypes.c_int64))
    others = [_threads(os.getpid()).submit(kernel.ctypes, pointer) for _ in range(threads - 1)]
    kernel.ctypes(pointer)
    for other in others:
        other.result()


@functools.cache
def _team() -> Callable[..., None] | None:
    """OpenMP's "run this function in all threads", from the library that torch itself has loaded (GCC's ABI).

    Threads of another pool would have to share the cores with torch's, which spin for a while after each operation:
    packing a step's activations then takes half as long again. None where torch's OpenMP is not to be found.
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
    """One pool for each process: a fork inherits the object, but not its threads."""
    return ThreadPoolExecutor(max(1, (os.cpu_count() or 1) - 1), thread_name_prefix="packing")


@functools.cache
def _kernels() -> Any:
    try:
        from efficient_ft.ops import _packing_numba
    except ImportError:
        return None
    return _packing_numba
