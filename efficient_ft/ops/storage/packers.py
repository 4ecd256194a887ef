"""Packers convert a tensor to a storage format for the backward pass.

A packer returns a `Packed`: the tensors to save, and the function that restores a dense tensor of the original shape
and dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.storage.eight_bits import dequantize, quantize
from efficient_ft.ops.storage.groups import group_pack, group_unpack
from efficient_ft.ops.storage.kernels import gpu
from efficient_ft.ops.storage.sparse import sparse_pack, sparse_unpack, values_kept
from efficient_ft.ops.storage.state import PackContext


@dataclass(frozen=True)
class Packed:
    """A packed tensor.

    Attributes:
        tensors: Tensors to save for the backward pass.
        unpack: Function that restores the dense tensor from `tensors`, as returned by autograd. It references no
            tensor.
        shared: User count of a packed tensor that several operations save (`efficient_ft.ops.saving`).
    """

    tensors: tuple[Tensor, ...]
    unpack: Callable[..., Tensor]
    shared: Any = None


class Packer(Protocol):
    """Protocol of the packers. A packer with a true attribute `named` keeps state by tensor name."""

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack a non-empty tensor of any shape, with dimensions in the order of its memory."""
        ...


@dataclass(frozen=True)
class Dense:
    """Store the tensor unchanged.

    Args:
        alone: Copy a view of less than half of a tensor, so that the rest of that tensor can be freed.
    """

    alone: bool = False

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Return x itself or a copy of it."""
        part = self.alone and 2 * x.numel() * x.element_size() < x.untyped_storage().nbytes()
        return Packed((x.clone() if part else x,), _identity)


@dataclass(frozen=True)
class Half:
    """Store the tensor in a 2-byte `dtype`. Tensors with at most two bytes per value are stored unchanged."""

    dtype: torch.dtype

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Convert x."""
        return Packed((_to_half(x, self.dtype, context),), partial(_convert_back, x.dtype))


@dataclass(frozen=True)
class Sparse:
    """Store the `values_kept(n, sparsity)` largest-magnitude values of each sample and a bitmap (Back Razor).

    Args:
        sparsity: Share of the values that are dropped.
        dtype: 2-byte dtype of the stored values. Values of two bytes are stored unchanged. Default: the dtype of the
            input.
        eight_bits: Store the values in 8 bits with one running range per tensor (Back Razor with Mesa), and ignore
            `dtype`.
        exact: See `sparse_pack`.
    """

    sparsity: float
    dtype: torch.dtype | None = None
    eight_bits: bool = False
    exact: bool = True

    @property
    def named(self) -> bool:
        """True if the packer keeps running ranges by name."""
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
    """Store the tensor in 8 bits, with one running range per head if the context has heads (Mesa)."""

    named: ClassVar[bool] = True

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Quantize x."""
        dim, groups = context.heads or (1, 1)
        packed = _quantized(x.reshape(math.prod(x.shape[:dim]), groups, -1), context, x.dtype)
        return Packed(packed.tensors, partial(_reshape_back, packed.unpack, x.shape))


@dataclass(frozen=True)
class GroupBits:
    """Store the tensor in few bits per value, with a minimum and a step per group of values (ActNN, GACT).

    Args:
        bits: Number of bits per value, 8, 4, 3 or 2.
        group: Number of values, consecutive in memory, that share a minimum and a step. It must be a multiple of 8.
        stochastic: Round stochastically with mean x instead of to the nearest step.
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


# Functions for `Packed.unpack`. Module-level functions and their partials do not reference tensors.
def _identity(x: Tensor) -> Tensor:
    return x


def _convert_back(dtype: torch.dtype, x: Tensor) -> Tensor:
    if x.dtype != dtype and not isinstance(x, FakeTensor) and gpu.supports(x):
        return gpu.convert(x, dtype)
    return x.to(dtype)


def _dequantize_back(dtype: torch.dtype, q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    return dequantize(q, low, high).to(dtype)


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
