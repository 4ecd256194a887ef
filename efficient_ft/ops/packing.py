"""Packed tensors: the small forms in which activations wait for the backward pass.

Two forms:

* **sparse** (Back Razor: Jiang et al., NeurIPS 2022, section 3): of every sample the values of largest magnitude, in
  the order in which they lie, and one bit per element that says where. The number kept is a function of the shape
  alone, so that a packed tensor's size is known before its values are, and never exceeds the budget.
* **8 bits** (Mesa: Pan et al., 2021): asymmetric steps between a low and a high value per group, rounded at random so
  that the mean is the value.

Here is the plain torch form of each, the reference, which works everywhere (fake tensors get shapes alone);
`packing_cpu` and `packing_gpu` hold kernels with the same results. A `Packer` puts them to use: what it packs is a
`Packed`, tensors to be saved for the backward pass and the way back to a dense tensor of the old shape and type.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.errors import UserError
from efficient_ft.ops import packing_cpu, packing_gpu

#: Values looked at to estimate a sample's threshold.
SUBSAMPLE = 4096
#: An estimated threshold aims this many standard deviations above, so that few samples exceed their budget.
_CAUTION = 1.0
_LARGEST_HALF = 65504


def _kernels(x: Tensor) -> Any:
    """The module with kernels for this tensor; None: plain torch serves."""
    return next((module for module in (packing_cpu, packing_gpu) if module.serves(x)), None)


# ------------------------------------------------------------------------------------------------ sparse
def values_kept(n: int, sparsity: float) -> int:
    """How many of a sample's n values are kept: all from the k-th smallest up, k = clip(⌊n·sparsity⌋, 1, n)."""
    return n - min(max(math.floor(n * sparsity), 1), n) + 1 if n else 0


def bitmap_bytes(n: int) -> int:
    """Bytes of a bitmap of n bits."""
    return -(-n // 8)


def magnitude_bits(x: Tensor) -> Tensor:
    """|x| as integers of the same width and order: how the kernels compare, whatever the type."""
    integer = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}[x.element_size()]
    return x.contiguous().view(integer) & torch.iinfo(integer).max


def is_estimated(kept: int, n: int) -> bool:
    """Whether there is a threshold to estimate: rows are long, and something is dropped."""
    return n > SUBSAMPLE and kept < n


def hop(n: int) -> int:
    """How far apart in a row of n, counted around its end, the values of a subsample lie: near the golden section,
    which spreads them evenly, and without a common divisor with n, so that they lie in all channels alike."""
    golden = max(round(n * (math.sqrt(5) - 1) / 2), 1)
    return next(step for d in range(n) for step in (golden + d, golden - d) if math.gcd(step, n) == 1)


def estimate_rank(kept: int, n: int, m: int) -> int:
    """Which of m magnitudes in ascending order (from 0), a strided subsample of n, serves as the threshold."""
    dropped = 1 - kept / n
    caution = _CAUTION * math.sqrt(m * dropped * (1 - dropped))
    return min(max(math.ceil(dropped * m + caution), 0), m - 1)


def sparse_pack(x: Tensor, kept: int, exact: bool) -> tuple[Tensor, Tensor]:
    """The `kept` values of largest magnitude in each row, and where they are.

    Args:
        x: (S, ...) of any floating type and strides; n ≥ 1 values to a row.
        kept: K, from 1 to n.
        exact: the threshold is the (n − K + 1)-th smallest magnitude, and of values equal to it the first are taken,
            so that exactly K are kept. Else it is estimated from a strided subsample of each row (if `is_estimated`),
            and from where K are kept on, the rest of a row is dropped.

    Returns:
        values: (S, K) in x's type, zeros behind the last one kept.
        bitmap: (S, ⌈n/8⌉) uint8; element i of a row is bit i mod 8 of byte i // 8.
    """
    if isinstance(x, FakeTensor):
        return x.new_empty(len(x), kept), x.new_empty(len(x), bitmap_bytes(x[0].numel()), dtype=torch.uint8)
    if kernels := _kernels(x):
        n = x[0].numel()
        rank = None if exact or not is_estimated(kept, n) else estimate_rank(kept, n, SUBSAMPLE)
        return kernels.sparse_pack(_pieces(x), kept, rank, SUBSAMPLE, hop(n))
    return sparse_pack_reference(x, kept, exact)


def _pieces(x: Tensor) -> Tensor:
    """x (S, ...) as (S, M, L), without a copy where rows are M equally distant pieces (q inside a fused qkv)."""
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
    # Bytes of the bitmap must not lie across pieces.
    if len(shape) != 2 or strides[1] != 1 or shape[1] % 8 or not x.stride(0):
        return x.contiguous().view(x.shape[0], 1, -1)
    return x.as_strided((x.shape[0], *shape), (x.stride(0), *strides))


def sparse_pack_reference(x: Tensor, kept: int, exact: bool) -> tuple[Tensor, Tensor]:
    """`sparse_pack` in plain torch."""
    x = x.flatten(1)
    (rows, n), bits = x.shape, magnitude_bits(x)
    if exact or not is_estimated(kept, n):
        threshold = bits.kthvalue(n - kept + 1, dim=1, keepdim=True).values
        above, equal = bits > threshold, bits == threshold
        keep = above | (equal & (equal.cumsum(1) <= kept - above.sum(1, keepdim=True)))
    else:
        sample = bits[:, (torch.arange(SUBSAMPLE) * hop(n) % n).to(x.device)]
        rank = estimate_rank(kept, n, SUBSAMPLE)
        keep = bits >= sample.kthvalue(rank + 1, dim=1, keepdim=True).values
    place = keep.cumsum(1)
    keep &= place <= kept
    # Column K takes what is dropped.
    place = torch.where(keep, place - 1, kept)
    values = x.new_zeros(rows, kept + 1).scatter_(1, place, x)[:, :kept].contiguous()
    return values, _bits_of_rows(keep)


def sparse_unpack(values: Tensor, bitmap: Tensor, n: int, dtype: torch.dtype | None = None) -> Tensor:
    """The rows (S, n) that `sparse_pack` made `values` (S, K) and `bitmap` (S, ⌈n/8⌉) of, zeros where dropped.

    Args:
        dtype: of the rows; None: the values'.
    """
    dtype = dtype or values.dtype
    if isinstance(values, FakeTensor):
        return values.new_empty(len(values), n, dtype=dtype)
    if kernels := _kernels(values):
        return kernels.sparse_unpack(values, bitmap, n, dtype)
    return sparse_unpack_reference(values.to(dtype), bitmap, n)


def sparse_unpack_reference(values: Tensor, bitmap: Tensor, n: int) -> Tensor:
    """`sparse_unpack` in plain torch."""
    keep = _rows_of_bits(bitmap, n)
    place = (keep.cumsum(1) - 1).clamp_(0)
    return torch.where(keep, values.gather(1, place), 0)


def pack_bits(mask: Tensor) -> Tensor:
    """A boolean tensor as a flat uint8 tensor, a bit each: element i is bit i mod 8 of byte i // 8."""
    return _bits_of_rows(mask.reshape(1, -1))[0]


def unpack_bits(bits: Tensor, shape: torch.Size) -> Tensor:
    """The boolean tensor of `shape` that `pack_bits` made `bits` of."""
    return _rows_of_bits(bits[None], shape.numel()).view(shape)


def _bits_of_rows(mask: Tensor) -> Tensor:
    """Boolean rows (S, n) as (S, ⌈n/8⌉) uint8."""
    eight = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 8)).unflatten(1, (-1, 8)).to(torch.uint8)
    return (eight << torch.arange(8, dtype=torch.uint8, device=mask.device)).sum(2, dtype=torch.uint8)


def _rows_of_bits(bits: Tensor, n: int) -> Tensor:
    """Back to boolean rows (S, n)."""
    eight = bits.unsqueeze(2) >> torch.arange(8, dtype=torch.uint8, device=bits.device)
    return (eight & 1).flatten(1)[:, :n].bool()


# ------------------------------------------------------------------------------------------------ 8 bits
def quantise(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """x between `low` and `high` in steps of a 255th, rounded up or down at random so that the mean is x.

    Args:
        x: (outer, G, inner) of any floating type.
        low, high: (G,) float32; what lies outside is brought to the nearer of them.
        seed: () int64; the same seed and x give the same result on every device.

    Returns:
        (outer, G, inner) uint8.
    """
    if isinstance(x, FakeTensor):
        return x.new_empty(x.shape, dtype=torch.uint8)
    if kernels := _kernels(x):
        return kernels.quantise(x, low, high, seed)
    return quantise_reference(x, low, high, seed)


def quantise_reference(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """`quantise` in plain torch."""
    steps = 255 / (high - low).clamp_min(1e-30)
    scaled = (x.float() - low[:, None]) * steps[:, None]
    return (scaled + uniform(x.numel(), seed, x.device).view(x.shape)).floor_().clamp_(0, 255).to(torch.uint8)


def uniform(count: int, seed: Tensor, device: torch.device) -> Tensor:
    """`count` numbers in [0, 1) in steps of 2⁻²⁴: a hash of the position and the seed (Wellons' lowbias32)."""
    mask = 0xFFFFFFFF
    h = (torch.arange(count, device=device, dtype=torch.int64) + seed.to(device)) & mask
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    return ((h ^ (h >> 16)) >> 8).float() * 2.0**-24


def dequantise(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """The values (outer, G, inner), float32, that `quantise` took for the steps `q`."""
    if isinstance(q, FakeTensor):
        return low.new_empty(q.shape)
    if q.numel() and (kernels := _kernels(low)):
        return kernels.dequantise(q, low, high)
    return dequantise_reference(q, low, high)


def dequantise_reference(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """`dequantise` in plain torch."""
    return low[:, None] + q.float() * ((high - low) / 255)[:, None]


def extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Smallest and largest value of each group of x (outer, G, inner), (G,) float32 each."""
    if isinstance(x, FakeTensor):
        return x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)
    if kernels := _kernels(x):
        return kernels.extremes(x)
    return extremes_reference(x)


def extremes_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """`extremes` in plain torch."""
    return x.amin((0, 2)).float(), x.amax((0, 2)).float()


# ------------------------------------------------------------------------------------------------ packers
@dataclass(frozen=True)
class Packed:
    """What is kept of one tensor.

    Attributes:
        tensors: to be saved for the backward pass.
        unpack: from these tensors (as autograd gives them back) to a dense one. It keeps no tensor itself.
        shared: with whom it is shared, where several operations save it (`packed`).
    """

    tensors: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]
    shared: Any = None


@dataclass
class Ranges:
    """Running ranges of what is quantised, by place: (low, high), each (G,) float32 (Mesa: mean with factor 0.9)."""

    of: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def update(self, place: str, x_OGI: Tensor) -> tuple[Tensor, Tensor]:
        """Move the range of `place` towards that of x (outer, G, inner), and return it."""
        low, high = extremes(x_OGI)
        if place in self.of:
            old_low, old_high = (old.to(low.device) for old in self.of[place])
            low, high = old_low.lerp(low, 0.1), old_high.lerp(high, 0.1)
        self.of[place] = (low, high)
        return low, high


@dataclass
class Overflow:
    """Whether a value was too large for fp16, found out without waiting for the device."""

    flag: Tensor | None = None

    def halve(self, x: Tensor) -> Tensor:
        """x in fp16, looked at."""
        if isinstance(x, FakeTensor) or not x.numel():
            return x.to(torch.float16)
        if self.flag is None:
            self.flag = torch.zeros((), dtype=torch.bool, device=x.device)
        if packing_gpu.serves(x) and self.flag.device == x.device:
            return packing_gpu.convert(x, torch.float16, self.flag)
        low, high = x.aminmax()
        seen = (low < -_LARGEST_HALF) | (high > _LARGEST_HALF)
        if x.device.type != "cpu" or not (low.isfinite() & high.isfinite()):  # not only finite values perhaps
            seen = ((x.abs() > _LARGEST_HALF) & x.isfinite()).any()
        self.flag |= seen.to(self.flag.device)
        return x.to(torch.float16)

    def check(self) -> None:
        """Raises:
        UserError: a finite value became infinite since the last check.
        """
        flag, self.flag = self.flag, None
        if flag is not None and bool(flag):
            raise UserError(
                "values=fp16: a packed activation is larger than fp16 holds (65504). Use values=bf16 (the same size,"
                " a wider range), or values=input."
            )


@dataclass(frozen=True)
class Place:
    """Where a tensor is packed: what the packers that keep state need to know.

    Attributes:
        name: the same in every step.
        samples: B. A sample's elements lie together along the first dimension, of which B is a divisor.
        heads: (dimension of x, groups it is cut into) for ranges per head; None: one range.
    """

    name: str
    samples: int
    ranges: Ranges
    overflow: Overflow
    heads: tuple[int, int] | None = None


class Packer(Protocol):
    """A way to keep a tensor."""

    def pack(self, x: Tensor, place: Place) -> Packed:
        """x of any shape, not empty, its dimensions in the order in which they lie in memory."""
        ...


@dataclass(frozen=True)
class Dense:
    """As it is."""

    def pack(self, x: Tensor, place: Place) -> Packed:
        return Packed((x,), _same)


@dataclass(frozen=True)
class Half:
    """In `dtype`; what has two bytes already stays as it is."""

    dtype: torch.dtype

    def pack(self, x: Tensor, place: Place) -> Packed:
        return Packed((_to_half(x, self.dtype, place),), partial(_converted, x.dtype))


@dataclass(frozen=True)
class Sparse:
    """Of each sample the `values_kept(n, sparsity)` largest values and a bitmap.

    Args:
        dtype: of the values; what has two bytes already stays as it is. None: the input's.
        eight_bits: the values in 8 bits, one running range per tensor (Back Razor with Mesa); `dtype` is ignored.
        exact: see `sparse_pack`.
    """

    sparsity: float
    dtype: torch.dtype | None = None
    eight_bits: bool = False
    exact: bool = True

    def pack(self, x: Tensor, place: Place) -> Packed:
        rows = x if x.shape[0] == place.samples else x.unflatten(0, (place.samples, -1))
        n = rows.shape[1:].numel()
        values, bitmap = sparse_pack(rows, values_kept(n, self.sparsity), self.exact)
        back = partial(_sparse_back, x.shape, x.dtype, n)
        if self.eight_bits:
            packed = _quantised(values[:, None], place, values.dtype)
            return Packed((*packed.tensors, bitmap), partial(_sparse_eight_bits_back, packed.unpack, back))
        if self.dtype is not None:
            values = _to_half(values, self.dtype, place)
        return Packed((values, bitmap), back)


@dataclass(frozen=True)
class EightBits:
    """In 8 bits, a running range for each head where the place has heads (Mesa)."""

    def pack(self, x: Tensor, place: Place) -> Packed:
        dim, groups = place.heads or (1, 1)
        packed = _quantised(x.reshape(math.prod(x.shape[:dim]), groups, -1), place, x.dtype)
        return Packed(packed.tensors, partial(_reshaped_back, packed.unpack, x.shape))


def _same(x: Tensor) -> Tensor:
    return x


def _converted(dtype: torch.dtype, x: Tensor) -> Tensor:
    if x.dtype != dtype and not isinstance(x, FakeTensor) and packing_gpu.serves(x):
        return packing_gpu.convert(x, dtype)
    return x.to(dtype)


def _to_half(x: Tensor, dtype: torch.dtype, place: Place) -> Tensor:
    if x.element_size() <= 2:
        return x
    return place.overflow.halve(x) if dtype is torch.float16 else x.to(dtype)


def _quantised(x_OGI: Tensor, place: Place, dtype: torch.dtype) -> Packed:
    low, high = place.ranges.update(place.name, x_OGI)
    seed = torch.randint(2**31, (), device=x_OGI.device)
    return Packed((quantise(x_OGI, low, high, seed), low, high), partial(_dequantised, dtype))


def _dequantised(dtype: torch.dtype, q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return dequantise(q, low, high).to(dtype)


def _sparse_back(shape: torch.Size, dtype: torch.dtype, n: int, values: Tensor, bitmap: Tensor) -> Tensor:
    return sparse_unpack(values, bitmap, n, dtype).view(shape)


def _sparse_eight_bits_back(values_of: Callable[..., Tensor], back: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return back(values_of(*tensors[:-1]).flatten(1), tensors[-1])


def _reshaped_back(unpack: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor) -> Tensor:
    return unpack(*tensors).view(shape)
