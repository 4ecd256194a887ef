"""Packers, which convert tensors to storage formats for the backward pass, and the state of packers.

A packer returns a `Packed` object, which contains the tensors to save and a function that restores a dense tensor of
the original shape and dtype. The state consists of running ranges, seeds for rounding, and a record of fp16 overflow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.core.distributed import rank
from efficient_ft.core.errors import UserError
from efficient_ft.core.seeding import seed_of
from efficient_ft.ops.storage.eight_bits import dequantize, extremes, quantize
from efficient_ft.ops.storage.groups import group_pack, group_unpack
from efficient_ft.ops.storage.kernels import gpu
from efficient_ft.ops.storage.sparse import sparse_pack, sparse_unpack, values_kept

_LARGEST_HALF = 65504

#: Fraction by which a range moves towards the current values in each step (Mesa).
_SHARE = 0.1


@dataclass
class Ranges:
    """Running ranges of quantized tensors (Mesa: running mean with factor 0.9).

    If a tensor is not finite in a step, all ranges are restored to their values before that step. If a range was not
    used for n steps, its next update is as large as n updates, because the weights of earlier layers have changed.

    Attributes:
        by_name: Ranges (low, high), each (G,) float32. The keys are names of tensors (`PackContext.name`).
        step: Number of completed optimizer steps.
        updated: Step in which each range was last updated, with the same keys.
    """

    by_name: dict[str, tuple[Tensor, Tensor]] = field(default_factory=dict)
    step: int = 0
    updated: dict[str, int] = field(default_factory=dict)
    #: Mapping from each name to its range before the current step and to the step in which the range was last updated.
    _before: dict[str, tuple[tuple[Tensor, Tensor] | None, int]] = field(default_factory=dict)
    #: True if all tensors of the current step are finite: a bool, or () bool on a GPU.
    _finite: Tensor | bool | None = None

    def update(self, name: str, x_OGI: Tensor) -> tuple[Tensor, Tensor]:
        """Move the range `name` towards the range of x (outer, G, inner).

        Return the new minimum and maximum, each (G,) float32. If x is not finite, the stored range does not change, and
        the returned range is not finite, so that x is unpacked to non-finite values.
        """
        old, step = self.by_name.get(name), self.updated.get(name, self.step)
        if old is not None and (x_OGI.device.type != "cpu" or old[0].device.type != "cpu"):
            old = (old[0].to(x_OGI.device), old[1].to(x_OGI.device))
        share = _SHARE if self.step - step <= 1 else 1 - (1 - _SHARE) ** (self.step - step)
        low, high = extremes(x_OGI, old, share)
        if isinstance(low, FakeTensor):
            self.by_name[name] = (low, high)
            return low, high
        if low.device.type == "cpu":
            return self._update_on_cpu(name, low, high, step)
        finite = in_step = (low * 0 + high * 0 == 0).all()
        self._before.setdefault(name, (self.by_name.get(name), step))
        if isinstance(self._finite, Tensor):
            in_step = finite & self._finite.to(finite.device)
        self._finite = in_step if self._finite is not False else False
        if old is not None:  # torch.where does not synchronize with the device
            self.by_name[name] = (torch.where(finite, low, old[0]), torch.where(finite, high, old[1]))
        elif finite:
            self.by_name[name] = (low, high)
        self.updated[name] = self.step
        return low, high

    def _update_on_cpu(self, name: str, low: Tensor, high: Tensor, step: int) -> tuple[Tensor, Tensor]:
        """Store a new range on a CPU, where Python numbers are checked faster than tensors."""
        finite = all(map(math.isfinite, low.tolist())) and all(map(math.isfinite, high.tolist()))
        self._before.setdefault(name, (self.by_name.get(name), step))
        self._finite = finite if self._finite is None else self._finite & finite
        if finite:
            self.by_name[name] = (low, high)
        self.updated[name] = self.step
        return low, high

    def end_step(self) -> None:
        """Finish an optimizer step. If a tensor in the step was not finite, restore the ranges from before the step."""
        if self._finite is not None and not self._finite:
            for name, (old, step) in self._before.items():
                self.by_name.pop(name, None)
                self.updated.pop(name, None)
                if old is not None:
                    self.by_name[name], self.updated[name] = old, step
        self._before, self._finite = {}, None
        self.step += 1

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values."""
        ranges = {name: [low.tolist(), high.tolist(), self.updated[name]] for name, (low, high) in self.by_name.items()}
        return {"step": self.step, "by_name": ranges}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.step, self._before, self._finite = state_dict["step"], {}, None
        self.by_name, self.updated = {}, {}
        for name, (low, high, step) in state_dict["by_name"].items():
            self.by_name[name] = (torch.tensor(low, dtype=torch.float32), torch.tensor(high, dtype=torch.float32))
            self.updated[name] = step


@dataclass
class Noise:
    """Seeds for stochastic rounding.

    A seed is a hash of torch's initial seed, the rank, the optimizer step, and the number of earlier seeds in the step.
    torch's random number generators are not used, so that dropout and stochastic depth are the same as without packing.

    Attributes:
        seed: Initial seed of torch when the object is created.
        step: Number of completed optimizer steps.
        count: Number of seeds returned in this step.
        used: True if a seed has been returned.
    """

    seed: int = field(default_factory=torch.initial_seed)
    step: int = 0
    count: int = 0
    used: bool = False

    def next_seed(self, device: torch.device) -> Tensor:
        """Return the next seed, () int64 on `device`."""
        number = seed_of(self.seed, rank(), self.step, self.count) & 0x7FFFFFFF
        self.count, self.used = self.count + 1, True
        return torch.full((), number, dtype=torch.int64, device=device)

    def end_step(self) -> None:
        """Finish an optimizer step."""
        self.step, self.count = self.step + 1, 0

    def state_dict(self) -> dict[str, Any]:
        """Return the state as a dict of plain values."""
        return {"seed": self.seed, "step": self.step, "count": self.count}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        self.seed, self.step, self.count = (state_dict[key] for key in ("seed", "step", "count"))
        self.used = True


@dataclass
class Overflow:
    """Record of values that are too large for fp16. Only `check` synchronizes with the device.

    Attributes:
        flag: True if a finite value became infinite, () bool on the device of the tensors. The flag is None if no value
            has been converted since the last check.
    """

    flag: Tensor | None = None

    def to_half(self, x: Tensor) -> Tensor:
        """Convert x to fp16, and set the flag if a finite value becomes infinite."""
        if isinstance(x, FakeTensor) or not x.numel():
            return x.to(torch.float16)
        flag = self._flag(x.device)
        if gpu.supports(x) and flag.device == x.device:
            return gpu.convert(x, torch.float16, flag)
        low, high = x.aminmax()
        if x.device.type == "cpu" and low.item() >= -_LARGEST_HALF and high.item() <= _LARGEST_HALF:
            return x.to(torch.float16)
        overflows = (low < -_LARGEST_HALF) | (high > _LARGEST_HALF)
        if x.device.type != "cpu" or not (low.isfinite() & high.isfinite()):  # x may contain infinite values or NaN
            overflows = ((x.abs() > _LARGEST_HALF) & x.isfinite()).any()
        flag |= overflows.to(flag.device)
        return x.to(torch.float16)

    def watch(self, half: Tensor) -> None:
        """Set the flag if `half`, which was converted from finite values, contains an infinite value."""
        if isinstance(half, FakeTensor):
            return
        if half.device.type == "cpu" and math.isfinite(half.sum(dtype=torch.float32).item()):
            return  # infinite values would make the sum infinite or NaN
        flag = self._flag(half.device)
        flag |= half.isinf().any().to(flag.device)

    def _flag(self, device: torch.device) -> Tensor:
        if self.flag is None:
            self.flag = torch.zeros((), dtype=torch.bool, device=device)
        return self.flag

    def check(self) -> None:
        """Clear the flag.

        Raises:
            UserError: If a finite value became infinite since the last check.
        """
        flag, self.flag = self.flag, None
        if flag is not None and bool(flag):
            raise UserError(
                "A packed activation exceeds the range of fp16 (65504). Instead of value_dtype=fp16, use"
                " value_dtype=bf16, which needs the same memory but has a wider range. Instead of method=low_bit, use"
                " method=mesa."
            )


@dataclass(frozen=True)
class PackContext:
    """Context in which a tensor is packed, including the state of packers.

    Attributes:
        name: Name of the tensor, which must be the same in every step.
        samples: Number of samples, B. The size of the first dimension is a multiple of B, and the elements of a sample
            are adjacent along this dimension.
        ranges: Running ranges of all tensors.
        overflow: Record of fp16 overflow.
        heads: Dimension of x that is divided into heads, and the number of heads. Each head then has a separate range.
            If None, the tensor has one range.
        noise: Seeds for stochastic rounding.
    """

    name: str
    samples: int
    ranges: Ranges
    overflow: Overflow
    heads: tuple[int, int] | None = None
    noise: Noise = field(default_factory=Noise)


@dataclass(frozen=True)
class Packed:
    """A packed tensor.

    Attributes:
        tensors: Tensors to save for the backward pass.
        unpack: Function that restores the dense tensor from the saved `tensors`. The function must not reference a
            tensor.
        shared: Object that counts the operations that save the packed tensor (see `efficient_ft.ops.saving`).
    """

    tensors: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]
    shared: Any = None


class Packer(Protocol):
    """Protocol of packers. If the attribute `named` is True, the packer keeps state for each tensor name."""

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack a non-empty tensor of any shape, whose dimensions are in memory order."""
        ...


@dataclass(frozen=True)
class Dense:
    """Packer that stores the tensor unchanged.

    Args:
        alone: If True, a view of less than half of a tensor is copied, so that the memory of that tensor can be freed.
    """

    alone: bool = False

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack x itself or a copy of x."""
        part = self.alone and 2 * x.numel() * x.element_size() < x.untyped_storage().nbytes()
        return Packed((x.clone() if part else x,), _identity)


@dataclass(frozen=True)
class Half:
    """Packer that stores the tensor in a 2-byte `dtype`. Values of at most two bytes are stored unchanged."""

    dtype: torch.dtype

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Convert x to `dtype`."""
        return Packed((_to_half(x, self.dtype, context),), partial(_convert_back, x.dtype))


@dataclass(frozen=True)
class Sparse:
    """Packer that stores the values with the largest magnitudes, and a bitmap of their positions (Back Razor).

    `values_kept(n, sparsity)` of the n values of each sample are stored.

    Args:
        sparsity: Fraction of the values that is dropped.
        dtype: 2-byte dtype of the stored values. Values of at most two bytes are stored unchanged. Default: the dtype
            of the input.
        eight_bits: If True, store the values in 8 bits with one running range per tensor (Back Razor with Mesa), and
            ignore `dtype`.
        exact: See `sparse_pack`.
    """

    sparsity: float
    dtype: torch.dtype | None = None
    eight_bits: bool = False
    exact: bool = True

    @property
    def named(self) -> bool:
        """Return True if the packer keeps running ranges for each tensor name."""
        return self.eight_bits

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack each sample of x separately."""
        rows = x if x.shape[0] == context.samples else x.unflatten(0, (context.samples, -1))
        n = rows.shape[1:].numel()
        values, bitmap = sparse_pack(rows, values_kept(n, self.sparsity), self.exact)
        unpack = partial(_sparse_back, x.shape, x.dtype, n)
        if self.eight_bits:
            packed = _quantized(values[:, None], context, values.dtype)
            return Packed((*packed.tensors, bitmap), partial(_sparse_eight_bits_back, packed.unpack, unpack))
        if self.dtype is not None:
            values = _to_half(values, self.dtype, context)
        return Packed((values, bitmap), unpack)


@dataclass(frozen=True)
class EightBits:
    """Packer with 8 bits per value (Mesa), and with one running range per tensor, or per head (`PackContext.heads`)."""

    named: ClassVar[bool] = True

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Quantize x."""
        dim, groups = context.heads or (1, 1)
        packed = _quantized(x.reshape(math.prod(x.shape[:dim]), groups, -1), context, x.dtype)
        return Packed(packed.tensors, partial(_reshape_back, packed.unpack, x.shape))


@dataclass(frozen=True)
class GroupBits:
    """Packer that stores few bits per value, and a minimum and a step for each group of values (ActNN, GACT).

    Args:
        bits: Number of bits per value, 8, 4, 3 or 2.
        group: Number of consecutive values in memory that share a minimum and a step. The number must be a multiple of
            8.
        stochastic: If True, use unbiased stochastic rounding instead of rounding to nearest.
    """

    bits: int
    group: int = 64
    stochastic: bool = False

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Quantize x in groups."""
        seed = context.noise.next_seed(x.device) if self.stochastic else None
        codes, ranges = group_pack(x, self.bits, self.group, seed)
        context.overflow.watch(ranges)
        return Packed((codes, ranges), partial(_groups_back, x.shape, x.dtype, self.bits))


# The functions for `Packed.unpack` are defined at module level, so that they do not reference tensors.
def _identity(x: Tensor) -> Tensor:
    return x


def _convert_back(dtype: torch.dtype, x: Tensor) -> Tensor:
    if x.dtype != dtype and not isinstance(x, FakeTensor) and gpu.supports(x):
        return gpu.convert(x, dtype)
    return x.to(dtype)


def _dequantize_back(dtype: torch.dtype, q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return dequantize(q, low, high, dtype)


def _sparse_back(shape: torch.Size, dtype: torch.dtype, n: int, values: Tensor, bitmap: Tensor) -> Tensor:
    return sparse_unpack(values, bitmap, n, dtype).view(shape)


def _sparse_eight_bits_back(
    unpack_values: Callable[..., Tensor], unpack: Callable[..., Tensor], *tensors: Tensor
) -> Tensor:
    return unpack(unpack_values(*tensors[:-1]).flatten(1), tensors[-1])


def _groups_back(shape: torch.Size, dtype: torch.dtype, bits: int, codes: Tensor, ranges: Tensor) -> Tensor:
    return group_unpack(codes, ranges, shape.numel(), bits, dtype).view(shape)


def _reshape_back(unpack: Callable[..., Tensor], shape: torch.Size, *tensors: Tensor) -> Tensor:
    return unpack(*tensors).view(shape)


def _to_half(x: Tensor, dtype: torch.dtype, context: PackContext) -> Tensor:
    if x.element_size() <= 2:
        return x
    return context.overflow.to_half(x) if dtype is torch.float16 else x.to(dtype)


def _quantized(x_OGI: Tensor, context: PackContext, dtype: torch.dtype) -> Packed:
    low, high = context.ranges.update(context.name, x_OGI)
    seed = context.noise.next_seed(x_OGI.device)
    return Packed((quantize(x_OGI, low, high, seed), low, high), partial(_dequantize_back, dtype))
