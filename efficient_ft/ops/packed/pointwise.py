"""Pointwise operations: products with a learned scale, and activation functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.packed.mode import PackedOperations
from efficient_ft.ops.packed.saving import load, save
from efficient_ft.ops.packed.straight_through import as_kept
from efficient_ft.ops.packed.table import packs
from efficient_ft.ops.packing import Packed, pack_bits, unpack_bits

aten = torch.ops.aten


class _Scale(torch.autograd.Function):
    """x · s with a learned s, or one computed from parameters, of fewer values than x (LayerScale, a logit scale)."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, s: Tensor) -> Tensor:
        y = x * s
        kept = mode.keep(x, mode.policy.norm) if ctx.needs_input_grad[2] else None
        save(ctx, kept, s if ctx.needs_input_grad[1] else None)
        ctx.types, ctx.shape = (x.dtype, s.dtype), s.shape
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, s = load(ctx)
        g_x = None if s is None else (g * s).to(ctx.types[0])
        g_s = None if x is None else (g * x).sum_to_size(ctx.shape).to(ctx.types[1])
        return None, g_x, g_s


@packs(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
def _mul(mode: PackedOperations, input: Any, other: Any) -> Any:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    x, s = (input, other) if input.numel() >= other.numel() else (other, input)
    broadcast = torch.broadcast_shapes(x.shape, s.shape)
    if not s.requires_grad or broadcast != x.shape or 4 * s.numel() > x.numel() or not mode.supports(x, trained=(s,)):
        return NotImplemented
    return _Scale.apply(mode, as_kept(mode, x, mode.policy.norm, autocast=False), s)


class _Smooth(torch.autograd.Function):
    """A smooth activation function of each element, with the gradient `gradient(g, x)`."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        function: Callable[[Tensor], Tensor],
        gradient: Callable[[Tensor, Tensor], Tensor],
    ) -> Tensor:
        y = function(x)
        kept = mode.keep(x, mode.policy.activation, None, -1 if x.dim() == 3 else None)
        save(ctx, kept)
        ctx.gradient = gradient
        if mode.policy.derived:
            mode.set_source(y, Packed(kept.tensors, partial(_through, kept.unpack, function), kept.shared))
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = load(ctx)
        return None, ctx.gradient(g, x), None, None


def _through(unpack: Callable[..., Tensor], function: Callable[[Tensor], Tensor], *tensors: Tensor) -> Tensor:
    return function(unpack(*tensors))


@packs(F.silu)
def _silu(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    # `inplace` is not needed: the input is packed already.
    return _Smooth.apply(mode, input, F.silu, _silu_gradient) if mode.supports(input) else NotImplemented


def _silu_gradient(g: Tensor, x: Tensor) -> Tensor:
    return aten.silu_backward(g, x)


@packs(F.hardswish)
def _hardswish(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Smooth.apply(mode, input, F.hardswish, _hardswish_gradient) if mode.supports(input) else NotImplemented


def _hardswish_gradient(g: Tensor, x: Tensor) -> Tensor:
    return aten.hardswish_backward(g, x)


@packs(F.gelu)
def _gelu(mode: PackedOperations, input: Tensor, *, approximate: str = "none") -> Any:
    if not mode.supports(input):
        return NotImplemented
    return _Smooth.apply(
        mode,
        input,
        partial(F.gelu, approximate=approximate),
        lambda g, x: aten.gelu_backward(g, x, approximate=approximate),
    )


class _Clamp(torch.autograd.Function):
    """ReLU and its bounded forms, which keep one bit per element."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, low: float, high: float) -> Tensor:
        inside = (x > low) if high == torch.inf else (x > low) & (x < high)
        ctx.save_for_backward(pack_bits(inside))
        ctx.shape = x.shape
        return x.clamp(low, None if high == torch.inf else high)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (bits,) = ctx.saved_tensors
        return g * unpack_bits(bits, ctx.shape), None, None


@packs(F.relu, torch.relu, Tensor.relu)
def _relu(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Clamp.apply(input, 0.0, torch.inf) if mode.supports(input) else NotImplemented


@packs(F.relu6)
def _relu6(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Clamp.apply(input, 0.0, 6.0) if mode.supports(input) else NotImplemented


@packs(F.hardtanh)
def _hardtanh(
    mode: PackedOperations, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    return _Clamp.apply(input, min_val, max_val) if mode.supports(input) else NotImplemented
