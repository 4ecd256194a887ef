"""Sparse format, which stores the values with the largest magnitudes of each sample, and a bitmap of their positions.

The values are stored in their original order. Source: Back Razor (Jiang et al., NeurIPS 2022), Section 3. The number of
stored values depends only on the shape. The size of a packed tensor is therefore known in advance, and never exceeds
the budget.
"""

from __future__ import annotations

import functools
import math

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.storage.kernels import kernels_for

#: Number of values in the subsample of a row, from which the threshold of the row is estimated.
SUBSAMPLE = 4096
#: Number of standard deviations by which the rank of a sampled threshold is raised, so that few rows exceed the budget.
_CAUTION = 1.0


def values_kept(n: int, sparsity: float) -> int:
    """Return how many of n values are stored.

    All but the k − 1 values of smallest magnitude are stored, where k = clip(⌊n·sparsity⌋, 1, n).
    """
    return n - min(max(math.floor(n * sparsity), 1), n) + 1 if n else 0


def bitmap_bytes(n: int) -> int:
    """Return the number of bytes of a bitmap with n bits."""
    return -(-n // 8)


def magnitude_bits(x: Tensor) -> Tensor:
    """Return the magnitudes of x as integers of the same width.

    The integers have the same order as the magnitudes, so that one kernel supports all dtypes of a width.
    """
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def uses_sampling(kept: int, n: int) -> bool:
    """Return True if a threshold can be sampled: n exceeds the subsample, and at least one value is dropped."""
    return n > SUBSAMPLE and kept < n


@functools.lru_cache(4096)
def subsample_stride(n: int) -> int:
    """Return the distance between consecutive sampled values in a row with n values.

    The subsample wraps around at the end of the row. The distance is close to the golden section of n, which spreads
    the values evenly. The distance is coprime to n, so that the sampled values cover all channels.
    """
    golden = max(round(n * (math.sqrt(5) - 1) / 2), 1)
    return next(step for d in range(n) for step in (golden + d, golden - d) if math.gcd(step, n) == 1)


def threshold_rank(kept: int, n: int, m: int) -> int:
    """Return the rank (ascending, from 0) in a subsample of m magnitudes that estimates the threshold of n values."""
    dropped = 1 - kept / n
    caution = _CAUTION * math.sqrt(m * dropped * (1 - dropped))
    return min(max(math.ceil(dropped * m + caution), 0), m - 1)


def sparse_pack(x: Tensor, kept: int, exact: bool) -> tuple[Tensor, Tensor]:
    """Select the `kept` values with the largest magnitudes of each row.

    Args:
        x: Rows, (S, ...) of any floating dtype and strides, with n ≥ 1 values per row.
        kept: Number of selected values per row, K, from 1 to n.
        exact: If True, the threshold is the (n − K + 1)-th smallest magnitude. Of the values whose magnitude equals the
            threshold, the first values are kept, so that exactly K values are kept. If False, the threshold is
            estimated from a strided subsample of each row (if `uses_sampling` returns True), and only the first K
            values that reach the threshold are kept. Zeros never reach an estimated threshold.

    Returns:
        values: Kept values, (S, K) in the dtype of x. Rows with fewer kept values are padded with zeros.
        bitmap: Positions of the kept values, (S, ⌈n/8⌉) uint8. Element i of a row is bit i mod 8 of byte i // 8.
    """
    if isinstance(x, FakeTensor):
        return x.new_empty(len(x), kept), x.new_empty(len(x), bitmap_bytes(x[0].numel()), dtype=torch.uint8)
    if kernels := kernels_for(x):
        n = x[0].numel()
        rank = None if exact or not uses_sampling(kept, n) else threshold_rank(kept, n, SUBSAMPLE)
        return kernels.sparse_pack(as_pieces(x), kept, rank, SUBSAMPLE, subsample_stride(n))
    return sparse_pack_reference(x, kept, exact)


def as_pieces(x: Tensor, multiple: int = 8) -> Tensor:
    """View x (S, ...) as rows of M equally spaced pieces with L elements each: (S, M, L).

    L is a multiple of `multiple` unless M is 1. By default, no byte of a bitmap spans two pieces.
    For example, such a view exists for q inside a fused qkv tensor. If no such view exists, x is copied.
    """
    if x.is_contiguous():
        return x.view(x.shape[0], 1, -1)
    shape, strides = [1], [0]
    for size, stride in zip(x.shape[1:], x.stride()[1:], strict=True):
        if size == 1:
            continue
        if strides[-1] == size * stride or shape[-1] == 1:
            shape[-1], strides[-1] = shape[-1] * size, stride
        else:
            shape.append(size)
            strides.append(stride)
    if len(shape) == 1:
        shape, strides = [1, *shape], [0, *strides]
    if len(shape) != 2 or strides[1] != 1 or shape[1] % multiple or not x.stride(0):
        return x.contiguous().view(x.shape[0], 1, -1)
    return x.as_strided((x.shape[0], *shape), (x.stride(0), *strides))


def sparse_pack_reference(x: Tensor, kept: int, exact: bool) -> tuple[Tensor, Tensor]:
    """Compute `sparse_pack` in plain PyTorch (reference implementation)."""
    x = x.flatten(1)
    (rows, n), bits = x.shape, magnitude_bits(x)
    if exact or not uses_sampling(kept, n):
        threshold = bits.kthvalue(n - kept + 1, dim=1, keepdim=True).values
        above, equal = bits > threshold, bits == threshold
        keep = above | (equal & (equal.cumsum(1) <= kept - above.sum(1, keepdim=True)))
    else:
        sample = bits[:, (torch.arange(SUBSAMPLE) * subsample_stride(n) % n).to(x.device)]
        rank = threshold_rank(kept, n, SUBSAMPLE)
        keep = bits >= sample.kthvalue(rank + 1, dim=1, keepdim=True).values.clamp_min(1)
    position = keep.cumsum(1)
    keep &= position <= kept
    # Column K collects the dropped values.
    position = torch.where(keep, position - 1, kept)
    values = x.new_zeros(rows, kept + 1).scatter_(1, position, x)[:, :kept].contiguous()
    return values, _rows_to_bits(keep)


def sparse_unpack(values: Tensor, bitmap: Tensor, n: int, dtype: torch.dtype | None = None) -> Tensor:
    """Restore the rows (S, n), with zeros for dropped values.

    Args:
        values: Values from `sparse_pack`, (S, K) of any floating dtype.
        bitmap: Bitmap from `sparse_pack`, (S, ⌈n/8⌉).
        n: Number of elements per row.
        dtype: Dtype of the result. Default: the dtype of `values`.
    """
    dtype = dtype or values.dtype
    if isinstance(values, FakeTensor):
        return values.new_empty(len(values), n, dtype=dtype)
    if kernels := kernels_for(values):
        return kernels.sparse_unpack(values, bitmap, n, dtype)
    return sparse_unpack_reference(values.to(dtype), bitmap, n)


def sparse_unpack_reference(values: Tensor, bitmap: Tensor, n: int) -> Tensor:
    """Compute `sparse_unpack` in plain PyTorch (reference implementation)."""
    keep = _bits_to_rows(bitmap, n)
    position = (keep.cumsum(1) - 1).clamp_(0)
    return torch.where(keep, values.gather(1, position), 0)


def pack_bits(mask: Tensor) -> Tensor:
    """Pack a boolean tensor into a flat uint8 tensor. Element i is bit i mod 8 of byte i // 8."""
    return _rows_to_bits(mask.reshape(1, -1))[0]


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """Unpack the result of `pack_bits` to a boolean tensor with the given shape."""
    return _bits_to_rows(bits[None], shape.numel()).view(shape)


def _rows_to_bits(mask: Tensor) -> Tensor:
    """Pack boolean rows (S, n) into a uint8 tensor (S, ⌈n/8⌉)."""
    eight = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)).to(torch.uint8)
    return (eight << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(2, dtype=torch.uint8)


def _bits_to_rows(bits: Tensor, n: int) -> Tensor:
    """Unpack a uint8 tensor (S, ⌈n/8⌉) into boolean rows (S, n)."""
    eight = bits.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (eight & 1).flatten(1)[:, :n].bool()
