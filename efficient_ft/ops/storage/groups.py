"""Group format, which stores groups of consecutive values with 8, 4, 3 or 2 bits per value.

For each group of G consecutive values, the format stores the minimum and the step in fp16, and a code of b bits for
each value. The format requires b + 32/G bits per value. Sources: ActNN (Chen et al., ICML 2021) for groups with
stochastic rounding; GACT (Liu et al., ICML 2022). Compared with stochastic rounding, rounding to nearest is biased, but
more accurate.

The codes of a group are arranged so that they can be packed with vectorized operations. With 4 bits, the low half of
byte j of a group contains value j, and the high half contains value j + G/2. With 2 bits, byte j contains the values j,
j + G/4, j + G/2 and j + 3G/4. With 3 bits, the low two bits of all values are stored first, in the 2-bit layout. The
high bits of all values follow: byte j of this part contains the high bits of the values j, j + G/8, …
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.storage.eight_bits import uniform
from efficient_ft.ops.storage.kernels import kernels_for
from efficient_ft.ops.storage.sparse import as_pieces

#: Supported numbers of bits per value.
BITS = (8, 4, 3, 2)


def group_length(n: int, group: int) -> int:
    """Return the group length for n values: n rounded up to a multiple of 8, but at most `group`."""
    return min(group, -(-n // 8) * 8)


def group_pack(x: Tensor, bits: int, group: int, seed: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Pack the values of x in row-major order, as in `x.flatten()`.

    If a group contains a non-finite value, all values of the group become NaN. A minimum or step that exceeds the range
    of fp16 becomes infinite.

    Args:
        x: Tensor of any shape, floating dtype and strides, with n >= 1 values.
        bits: Number of bits per value, 8, 4, 3 or 2.
        group: Number of values per group, a multiple of 8. See `group_length`.
        seed: Seed for unbiased stochastic rounding, () int64. Equal seeds and inputs give equal results on every
            device. If a seed is given, the minimum is rounded down and the step is rounded up, so that no value is
            clamped. If None, values are rounded to nearest.

    Returns:
        codes: Codes, (groups, G·bits/8) uint8. The codes after the last value are 0.
        ranges: Minimum and step of each group, (2, groups) fp16.
    """
    n = x.numel()
    length = group_length(n, group)
    groups = -(-n // length)
    if isinstance(x, FakeTensor):
        ranges = x.new_empty(2, groups, dtype=torch.float16)
        return x.new_empty(groups, length * bits // 8, dtype=torch.uint8), ranges
    if kernels := kernels_for(x):
        pieces = x.view(1, -1) if x.is_contiguous() else as_pieces(x[None], length)[0]
        return kernels.group_pack(pieces, bits, length, seed)
    return group_pack_reference(x, bits, length, seed)


def group_pack_reference(x: Tensor, bits: int, length: int, seed: Tensor | None) -> tuple[Tensor, Tensor]:
    """Compute `group_pack` in plain PyTorch for groups of `length` values (reference implementation)."""
    x = x.reshape(-1).float()
    (n,), levels = x.shape, 2**bits - 1
    x_GL = torch.cat([x, x[-1:].expand(-n % length)]).view(-1, length)
    finite = x_GL.isfinite().all(1)
    x_GL = torch.where(finite[:, None], x_GL, 0)
    low = x_GL.amin(1) + 0.0  # adding 0 converts -0 to 0
    low = low.half() if seed is None else _half_below(low)
    step = ((x_GL.amax(1) - low.float()) / levels).clamp_min(0) + 0.0
    step = step.half() if seed is None else -_half_below(-step)
    fits = low.isfinite() & step.isfinite()
    low = torch.where(fits, low, torch.where(low.isfinite(), torch.inf, low))
    step = torch.where(fits, step, 0)
    inverse = torch.where(step > 0, 1 / step.float(), 0.0)
    steps = (x_GL - torch.where(fits, low, 0).float()[:, None]) * inverse[:, None]
    steps = steps + (0.5 if seed is None else uniform(steps.numel(), seed, x.device).view(steps.shape))
    codes = steps.floor_().clamp_(0, levels).to(torch.uint8)
    codes.view(-1)[n:] = 0
    return _to_planes(codes, bits), torch.stack([torch.where(finite, low, torch.nan), step])


def _half_below(x: Tensor) -> Tensor:
    """Round float32 values down to fp16, so that the range of a group contains all values of the group."""
    half = x.half()
    bits = half.view(torch.int16)
    below = torch.where(bits > 0, bits - 1, bits + 1).view(torch.float16)
    return torch.where((half.float() > x) & half.isfinite(), below, half)


def group_unpack(codes: Tensor, ranges: Tensor, n: int, bits: int, dtype: torch.dtype) -> Tensor:
    """Return a flat tensor of `dtype` that contains the n values packed by `group_pack`."""
    if isinstance(codes, FakeTensor):
        return codes.new_empty(n, dtype=dtype)
    if kernels := kernels_for(ranges):
        return kernels.group_unpack(codes, ranges, n, bits, dtype)
    return group_unpack_reference(codes, ranges, n, bits).to(dtype)


def group_unpack_reference(codes: Tensor, ranges: Tensor, n: int, bits: int) -> Tensor:
    """Compute `group_unpack` in plain PyTorch and in float32 (reference implementation)."""
    low, step = ranges.float()
    values = _from_planes(codes, bits).float() * step[:, None] + low[:, None]
    return values.flatten()[:n]


def _to_planes(codes_GL: Tensor, bits: int) -> Tensor:
    """Pack codes (groups, G), with one code per byte, into bytes (groups, G·bits/8)."""
    if bits == 3:
        return torch.cat([_plane(codes_GL & 3, 2), _plane(codes_GL >> 2, 1)], 1)
    return _plane(codes_GL, bits)


def _from_planes(packed: Tensor, bits: int) -> Tensor:
    """Unpack bytes (groups, G·bits/8) into codes (groups, G), with one code per byte."""
    if bits == 3:
        cut = packed.shape[1] * 2 // 3
        return _spread(packed[:, :cut], 2) | _spread(packed[:, cut:], 1) << 2
    return _spread(packed, bits)


def _plane(codes_GL: Tensor, bits: int) -> Tensor:
    parts = codes_GL.unflatten(1, (8 // bits, -1))
    return (parts << _shifts(bits, parts)).sum(1, dtype=torch.uint8)


def _spread(plane: Tensor, bits: int) -> Tensor:
    return ((plane[:, None] >> _shifts(bits, plane)) & (2**bits - 1)).flatten(1)


def _shifts(bits: int, like: Tensor) -> Tensor:
    return torch.arange(0, 8, bits, dtype=torch.uint8, device=like.device)[:, None]
