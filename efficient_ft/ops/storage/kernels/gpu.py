"""GPU kernels of the storage formats, in Triton.

The exact threshold of a row is selected in two steps. A subsample of the row determines a bracket around the threshold.
The threshold is then selected from the few values in the bracket (Floyd, Rivest, CACM 1975). None of the functions in
this module synchronizes with the device.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_ft.ops.optional import optional_module

_TILE = 2048
_BLOCK = 1024
_LONGEST = 65536  # maximum number of candidates per program
_INTEGERS = {2: torch.int16, 4: torch.int32}
_PROGRAMS = 1024  # number of programs that fully occupy a GPU

#: Function that returns the compiled kernels, or None if Triton is not installed.
_kernels = partial(optional_module, "efficient_ft.ops.storage.kernels.triton_kernels")


def _on_its_device(function: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a function so that Triton launches kernels on the device of the first argument."""

    @functools.wraps(function)
    def on_device(x: Tensor, *arguments: Any) -> Any:
        with torch.cuda.device_of(x):
            return function(x, *arguments)

    return on_device


def supports(x: Tensor) -> bool:
    """Return True if the kernels support `x`."""
    return x.device.type == "cuda" and x.element_size() in _INTEGERS and x.numel() > 0 and _kernels() is not None


@_on_its_device
def sparse_pack(x: Tensor, kept: int, rank: int | None, subsample: int, hop: int) -> tuple[Tensor, Tensor]:
    """Compute `ops.storage.sparse_pack`. See `cpu.sparse_pack` for the arguments."""
    kernels = _kernels()
    (rows, pieces, length), size, device = x.shape, x.element_size(), x.device
    n, integer = pieces * length, _INTEGERS[size]
    unit = math.gcd(n, x.stride(0), 16)
    where = (n // unit, x.stride(0) // unit, x.stride(1), length)
    layout = {"UNIT": unit, "PIECES": pieces > 1, "LARGEST": torch.iinfo(integer).max}
    tiles = -(-n // _TILE)
    grid = (rows, tiles)
    values = (x.new_empty if rank is None else x.new_zeros)(rows, kept)
    bitmap = torch.empty(rows, -(-n // 8), dtype=torch.uint8, device=device)
    bits, order = x.view(integer), n - kept

    def integers(*shape: int) -> Tensor:
        return torch.empty(shape, dtype=torch.int32, device=device)

    state, found = integers(rows, 2), integers(rows, tiles, 2)
    gathered = rank is None and n > subsample
    if gathered:
        share = order / n
        # The bracket is wide, because a miss costs about 100 times the time that a narrower bracket would save.
        middle, wide = share * subsample, 4.5 * math.sqrt(subsample * share * (1 - share)) + 2
        ends = max(int(middle - wide), -1), min(int(middle + wide), subsample)
    else:
        # The subsample of a short row is the whole row.
        first = order + subsample - n if rank is None else rank
        ends = first, first
    bits_wanted = min(8 * size - 1, 20) if gathered else 8 * size - 1
    kernels.bracket[(rows,)](
        bits, state, *where, hop, *ends, EQUAL=not gathered, M=subsample, BITS=bits_wanted, num_warps=8, **layout
    )
    room = n // 8 if gathered else 0
    threshold, number, offset, candidates = state[:, 0], None, None, None
    if gathered:
        number = torch.zeros(rows, dtype=torch.int32, device=device)
        threshold, offset, candidates = integers(rows), integers(rows, tiles), integers(rows, room)
        kernels.gather[grid](bits, state, number, found, offset, candidates, *where, room, TILE=_TILE, **layout)
        short = min(_power(math.ceil(2.5 * wide * n / subsample)), _LONGEST)
        kernels.select[(rows,)](
            bits, state, number, found, candidates, threshold, *where, order, tiles, room,
            SHORT=short, TILES=_power(tiles), TILE=_TILE, num_warps=min(max(short // 1024, 4), 32), **layout,
        )  # fmt: skip
    elif rank is None:
        threshold = threshold.contiguous()
    else:  # values that equal a sampled threshold are also kept, except zeros
        threshold = (threshold - 1).clamp_min(0)
    kernels.count[grid](
        bits, state, threshold, number, found, offset, candidates, *where, room,
        GATHERED=gathered, TILE=_TILE, **layout,
    )  # fmt: skip
    kernels.write[grid](
        bits, threshold, found, values.view(integer), bitmap, *where, kept,
        TILE=_TILE, TILES=_power(tiles), EXACT=rank is None, **layout,
    )  # fmt: skip
    return values, bitmap


@_on_its_device
def sparse_unpack(values: Tensor, bitmap: Tensor, n: int, dtype: torch.dtype) -> Tensor:
    """Compute `ops.storage.sparse_unpack`."""
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


@_on_its_device
def convert(x: Tensor, dtype: torch.dtype, overflow: Tensor | None = None) -> Tensor:
    """Convert x to `dtype`, and set the bool scalar `overflow` if a finite value becomes infinite."""
    x, y = x.contiguous(), torch.empty(x.shape, dtype=dtype, device=x.device)
    grid = (-(-x.numel() // _BLOCK),)
    watched = overflow is not None
    _kernels().convert[grid](
        x, y, None if overflow is None else overflow.view(torch.uint8), x.numel(),
        WATCHED=watched, LARGEST=torch.finfo(dtype).max, BLOCK=_BLOCK,
    )  # fmt: skip
    return y


@_on_its_device
def quantize(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """Compute `ops.storage.quantize`."""
    x, q = x.contiguous(), torch.empty(x.shape, dtype=torch.uint8, device=x.device)
    steps = 255 / (high - low).clamp_min(1e-30)
    grid = (-(-x.numel() // _BLOCK),)
    # Fused multiply-add is disabled, because it rounds only once, whereas the reference implementation rounds twice.
    _kernels().quantize[grid](
        x, low, steps, seed.to(x.device), q, x.numel(), *x.shape[1:], BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return q


@_on_its_device
def dequantize(q: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Compute `ops.storage.dequantize`."""
    q, x = q.contiguous(), low.new_empty(q.shape)
    grid = (-(-x.numel() // _BLOCK),)
    _kernels().dequantize[grid](
        q, low, (high - low) / 255, x, x.numel(), *x.shape[1:], BLOCK=_BLOCK, enable_fp_fusion=False
    )
    return x.to(dtype)


@_on_its_device
def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `ops.storage.extremes`."""
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
    low, high = torch.empty(2, grid[0], grid[2], groups, dtype=torch.float32, device=x.device).unbind()
    _kernels().extremes[grid](x, low, high, rows, groups, inner, share, width, R=at_once, C=columns)
    return low.amin((0, 1)), high.amax((0, 1))


@_on_its_device
def group_pack(x: Tensor, bits: int, length: int, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `ops.storage.group_pack`. See `cpu.group_pack` for the arguments."""
    n, device = x.numel(), x.device
    groups = -(-n // length)
    codes = torch.empty(groups, length * bits // 8, dtype=torch.uint8, device=device)
    ranges = torch.empty(2, groups, dtype=torch.float16, device=device)
    grid, layout = _group_layout(groups, length, bits)
    # Fused multiply-add is disabled, because it rounds only once, whereas the reference implementation rounds twice.
    _kernels().group_pack[grid](
        x, None if seed is None else seed.to(device), codes, ranges, groups, length, length // layout["PARTS"], n,
        *x.shape, x.stride(0), RANDOM=seed is not None, enable_fp_fusion=False, **layout,
    )  # fmt: skip
    return codes, ranges


@_on_its_device
def group_unpack(codes: Tensor, ranges: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Compute `ops.storage.group_unpack`."""
    codes, ranges = codes.contiguous(), ranges.contiguous()
    groups, length = len(codes), codes.shape[1] * 8 // bits
    x = torch.empty(n, dtype=dtype, device=codes.device)
    grid, layout = _group_layout(groups, length, bits)
    _kernels().group_unpack[grid](
        codes, ranges, x, groups, length, length // layout["PARTS"], n, enable_fp_fusion=False, **layout
    )
    return x


def _group_layout(groups: int, length: int, bits: int) -> tuple[tuple[int], dict[str, int]]:
    """Return the program grid and the constants with which a group kernel is launched."""
    parts = 8 // bits if bits != 3 else 8
    width = _power(length // parts)
    at_once = max(1, _TILE // (width * parts))
    return (-(-groups // at_once),), {"BITS": bits, "PARTS": parts, "T": at_once, "W": width}


def _power(count: int) -> int:
    """Return the smallest power of two that is at least `count`."""
    return 1 << max(count - 1, 0).bit_length()
