"""Pointwise operations: products with a learned scale, and activation functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.saving.saving import as_kept, load, save
from efficient_ft.ops.saving.sharing import BothShared, apply_to
from efficient_ft.ops.saving.table import packs
from efficient_ft.ops.storage import Packed, pack_bits, unpack_bits

aten = torch.ops.aten


class _Scale(torch.autograd.Function):
    """Product x · s, where s has fewer values than x and is saved without packing.

    For example, s is the weight of a LayerScale, a logit scale, or a gate for each channel.
    """

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, s: Tensor) -> Tensor:
        y = x * s
        kept = mode.keep(x, mode.policy.norm) if ctx.needs_input_grad[2] else None
        save(ctx, kept, s if ctx.needs_input_grad[1] else None)
        ctx.types, ctx.shape = (x.dtype, s.dtype), s.shape
        if kept is not None and mode.policy.derived_all:
            mode.set_source(y, Packed((*kept.tensors, s), partial(_scaled, kept.unpack), kept.shared))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, s = load(ctx)
        g_x = None if s is None else (g * s).to(ctx.types[0])
        g_s = None if x is None else (g * x).sum_to_size(ctx.shape).to(ctx.types[1])
        return None, g_x, g_s


def _scaled(unpack: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    return unpack(*tensors[:-1]) * tensors[-1]


class _Product(_Scale):
    """Elementwise product of two activations, for example in SwiGLU. `b` may be broadcast.

    The backward pass is that of `_Scale`.
    """

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
        y = a * b
        kept_a = mode.keep(a, mode.policy.product, role="a") if ctx.needs_input_grad[2] else None
        kept_b = mode.keep(b, mode.policy.product, role="b") if ctx.needs_input_grad[1] else None
        save(ctx, kept_a, kept_b)
        ctx.types, ctx.shape = (a.dtype, b.dtype), b.shape
        if mode.policy.derived and kept_a is not None and kept_b is not None:
            both = Packed(
                (*kept_a.tensors, *kept_b.tensors),
                partial(_multiplied, kept_a.unpack, kept_b.unpack, len(kept_a.tensors)),
                BothShared(kept_a.shared, kept_b.shared),
            )
            mode.set_source(y, both)
        return y


def _multiplied(
    unpack_a: Callable[..., Tensor], unpack_b: Callable[..., Tensor], count: int, *tensors: Tensor
) -> Tensor:
    return unpack_a(*tensors[:count]) * unpack_b(*tensors[count:])


@packs(torch.mul, Tensor.mul, Tensor.__mul__, Tensor.__rmul__)
def _mul(mode: PackedOperations, input: Any, other: Any) -> Any:
    if not isinstance(input, Tensor) or not isinstance(other, Tensor):
        return NotImplemented
    x, s = (input, other) if input.numel() >= other.numel() else (other, input)
    if torch.broadcast_shapes(x.shape, s.shape) != x.shape:
        return NotImplemented
    if s.requires_grad and 4 * s.numel() <= x.numel() and mode.supports(x, trained=(s,)):
        return _Scale.apply(mode, as_kept(mode, x, mode.policy.norm, cast=False), s)
    if not x.requires_grad or not s.requires_grad or x.dim() != s.dim() or not mode.supports(x, s):
        return NotImplemented
    x, s = (as_kept(mode, t, mode.policy.product, cast=False) for t in (x, s))
    return _Product.apply(mode, x, s)


class _Smooth(torch.autograd.Function):
    """Smooth elementwise activation function with the gradient `gradient(g, x)`."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, function: Callable[..., Tensor], gradient: Callable[..., Tensor]
    ) -> Tensor:
        y = function(x)
        kept = mode.keep(x, mode.policy.activation, None, -1 if x.dim() == 3 else None)
        save(ctx, kept)
        ctx.gradient = gradient
        if mode.policy.derived:
            mode.set_source(y, Packed(kept.tensors, partial(apply_to, function, kept.unpack), kept.shared))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = load(ctx)
        return None, ctx.gradient(g, x), None, None


# The activation functions below ignore `inplace`, because they save their input.
@packs(F.silu)
def _silu(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Smooth.apply(mode, input, F.silu, aten.silu_backward) if mode.supports(input) else NotImplemented


@packs(F.hardswish)
def _hardswish(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Smooth.apply(mode, input, F.hardswish, aten.hardswish_backward) if mode.supports(input) else NotImplemented


@packs(F.gelu)
def _gelu(mode: PackedOperations, input: Tensor, *, approximate: str = "none") -> Any:
    if not mode.supports(input):
        return NotImplemented
    function, gradient = (partial(f, approximate=approximate) for f in (F.gelu, aten.gelu_backward))
    return _Smooth.apply(mode, input, function, gradient)


class _Sigmoid(torch.autograd.Function):
    """Logistic function, which saves its output."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor) -> Tensor:
        y = torch.sigmoid(x)
        save(ctx, mode.keep(y, mode.policy.activation, None, result=True, role="output"))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (y,) = load(ctx)
        return None, aten.sigmoid_backward(g, y)


@packs(torch.sigmoid, F.sigmoid, Tensor.sigmoid)
def _sigmoid(mode: PackedOperations, input: Tensor) -> Any:
    return _Sigmoid.apply(mode, input) if mode.supports(input) else NotImplemented


class _Clamp(torch.autograd.Function):
    """ReLU and its bounded variants, which save one bit per element, or no tensor if x can be recomputed exactly."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, low: float, high: float) -> Tensor:
        clamp = partial(torch.clamp, min=low, max=None if high == torch.inf else high)
        y = clamp(x)
        ctx.limits, ctx.shape = (low, high), x.shape
        source = mode.find_source(x) if mode.policy.derived_all else None
        if source is not None:
            source = Packed(source.tensors, partial(apply_to, clamp, source.unpack), source.shared)
        # y is recomputed only if packing is exact, because lossy packing could move a value across a limit.
        ctx.from_result = source is not None and mode.policy.exact
        if source is not None and ctx.from_result:
            source.shared.add_user()
            source = mode.share(source)
            source.shared.add_user()
            save(ctx, source)
        else:
            save(ctx, pack_bits((x > low) if high == torch.inf else (x > low) & (x < high)))
        if source is not None:
            mode.set_source(y, source)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (kept,) = load(ctx)
        low, high = ctx.limits
        if not ctx.from_result:
            g_x = g * unpack_bits(kept, ctx.shape)
        elif high == torch.inf:
            g_x = aten.threshold_backward(g, kept, low)
        else:
            g_x = aten.hardtanh_backward(g, kept, low, high)
        return None, g_x, None, None


@packs(F.relu, torch.relu, Tensor.relu)
def _relu(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Clamp.apply(mode, input, 0.0, torch.inf) if mode.supports(input) else NotImplemented


@packs(F.relu6)
def _relu6(mode: PackedOperations, input: Tensor, inplace: bool = False) -> Any:
    return _Clamp.apply(mode, input, 0.0, 6.0) if mode.supports(input) else NotImplemented


@packs(F.hardtanh)
def _hardtanh(
    mode: PackedOperations, input: Tensor, min_val: float = -1.0, max_val: float = 1.0, inplace: bool = False
) -> Any:
    return _Clamp.apply(mode, input, min_val, max_val) if mode.supports(input) else NotImplemented
