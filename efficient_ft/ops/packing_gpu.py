"""GPU kernels of `packing`, in Triton where it is installed; without it the plain torch forms serve.

A row's exact threshold is found by histograms of its magnitudes, each of which divides a range into 2048 parts: a
subsample gives the first range, and two or three of them the value. Nothing here waits for the device.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import torch
from torch import Tensor

_TILE = 4096
_BLOCK = 1024
_INTEGERS = {2: torch.int16, 4: torch.int32}
_PROGRAMS = 1024  # enough to fill a GPU


def serves(x: Tensor) -> bool:
    """Whether the kernels take this tensor."""
    return x.device.type == "cuda" and x.element_size() in _INTEGERS and x.numel() > 0 and _kernels() is not None


def sparse_pack(x: Tensor, kept: int, rank: int | None, subsample: int) -> tuple[Tensor, Tensor]:
    """As `packing.sparse_pack`, with the arguments of `packing_cpu.sparse_pack`."""
    kernels = _kernels()
    (rows, pieces, length), size = x.shape, x.element_size()
    n = pieces * length
    integer = _INTEGERS[size]
    unit = math.gcd(n, x.stride(0), 16)
    where = (n // unit, x.stride(0) // unit, x.stride(1), length)
    constants = {"UNIT": unit, "PIECES": pieces > 1, "LARGEST": torch.iinfo(integer).max}
    tiles = -(-n // _TILE)
    values = (x.new_empty if rank is None else x.new_zeros)(rows, kept)
    bitmap = torch.empty(rows, -(-n // 8), dtype=torch.uint8, device=x.device)
    bits, order = x.view(integer), n - kept

    sampled = n > subsample
    passes = 0 if rank is not None else math.ceil((8 * size - 1) / math.log2(kernels.BINS)) + sampled
    state = torch.empty(max(passes, 1), rows, 2, dtype=torch.int32, device=x.device)
    if rank is not None:
        kernels.bracket[(rows,)](bits, state, *where, rank, rank, True, M=subsample, BITS=8 * size - 1, **constants)
    elif sampled:
        middle, wide = order / n * subsample, 3 * math.sqrt(subsample * order / n * (1 - order / n)) + 2
        ends = max(int(middle - wide), -1), min(int(middle + wide), subsample)
        kernels.bracket[(rows,)](bits, state, *where, *ends, False, M=subsample, BITS=8 * size - 1, **constants)
    else:
        state[0, :, 0].zero_()
        state[0, :, 1].fill_(constants["LARGEST"])
    counts = torch.zeros(max(passes, 1), rows, kernels.BINS + 1, dtype=torch.int32, device=x.device)
    parts = min(tiles, max(1, _PROGRAMS // rows))
    share = -(-tiles // parts)
    for number in range(passes):
        kernels.histogram[(rows, -(-tiles // share))](
            bits, state, counts, rows, *where, order, number, share, TILE=_TILE, BINS=kernels.BINS, **constants
        )
    threshold = torch.empty(rows, dtype=torch.int32, device=x.device)
    found = torch.empty(rows, tiles, 2, dtype=torch.int32, device=x.device)
    grid = (rows, tiles)
    kernels.count[grid](
        bits, state, counts, threshold, found, rows, *where, order, passes, TILE=_TILE, BINS=kernels.BINS, **constants
    )
    kernels.write[grid](
        bits, threshold, found, values.view(integer), bitmap, *where, kept,
        TILE=_TILE, TILES=_power(tiles), EXACT=rank is None, **constants,
    )  # fmt: skip
    return values, bitmap


def sparse_unpack(values: Tensor, bitmap: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """As `packing.sparse_unpack`."""
    kernels = _kernels()
    values, bitmap = values.contiguous(), bitmap.contiguous()
    (rows, kept), tiles = values.shape, -(-n // _TILE)
    x = torch.empty(rows, n, dtype=dtype, device=values.device)
    found = torch.empty(rows, tiles, dtype=torch.int32, device=x.device)
    unit = math.gcd(n, 16)
    kernels.count_flags[(rows, tiles)](bitmap, found, n // unit, TILE=_TILE, UNIT=unit)
    kernels.spread[(rows, tiles)](
        values, bitmap, found, x, n // unit, kept,
        TILE=_TILE, TILES=_power(tiles), UNIT=unit,
    )  # fmt: skip
    return x


def halve(x: Tensor, overflow: Tensor) -> Tensor:
    """x in fp16; `overflow` (), boolean, becomes true where a finite value became infinite."""
    x, half = x.contiguous(), torch.empty(x.shape, dtype=torch.float16, device=x.device)
    grid = (-(-x.numel() // _BLOCK),)
    _kernels().halve[grid](x, half, overflow.view(torch.uint8), x.numel(), LARGEST=65504.0, BLOCK=_BLOCK)
    return half


def quantise(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """As `packing.quantise`."""
    x, q = x.contiguous(), torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    steps = 255 / (high - low).clamp_min(1e-30)
    grid = (-(-x.numel() // _BLOCK),)
    # A fused multiplication and addition would round once where the reference rounds twice.
    _kernels().quantise[grid](
        x, low, steps, seed.to(x.device), q, x.numel(), *x.shape[1:], BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return q


def dequantise(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """As `packing.dequantise`."""
    q, x = q.contiguous(), low.new_empty(q.shape)
    grid = (-(-x.numel() // _BLOCK),)
    _kernels().dequantise[grid](
        q, low, (high - low) / 255, x, x.numel(), *x.shape[1:], BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return x


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """As `packing.extremes`."""
    x = x.contiguous()
    rows, groups, inner = x.shape
    columns = min(_power(inner), _BLOCK)
    at_once = _BLOCK // columns
    wanted = -(-_PROGRAMS // groups)
    parts = min(-(-rows // at_once), wanted)
    share = at_once * -(-rows // (at_once * parts))
    cuts = min(-(-inner // columns), -(-wanted // parts))
    width = columns * -(-inner // (columns * cuts))
    grid = (-(-rows // share), groups, -(-inner // width))
    low, high = torch.empty(2, grid[0], grid[2], groups, device=x.device).unbind()
    _kernels().extremes[grid](x, low, high, rows, groups, inner, share, width, R=at_once, C=columns)
    return low.amin((0, 1)), high.amax((0, 1))


def _power(count: int) -> int:
    """The next power of two."""
    return 1 << max(count - 1, 0).bit_length()


@functools.cache
def _kernels() -> Any:
    try:
        from efficient_ft.ops import _packing_triton
    except ImportError:
        return None
    return _packing_triton
