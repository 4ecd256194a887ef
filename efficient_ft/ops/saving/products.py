"""Linear layers, convolutions, and products of two activations."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.saving.saving import as_kept, load, save
from efficient_ft.ops.saving.table import packs

aten = torch.ops.aten


class _Linear(torch.autograd.Function):
    """Linear layer with exact gradients g_x = g w and g_b. The gradient g_w = gᵀ x uses the unpacked x."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        used, kept_weight = mode.weight(weight)
        y = F.linear(x, used, bias)
        kept = mode.keep(x, mode.policy.product, y.dtype, -1) if ctx.needs_input_grad[2] else None
        save(ctx, kept, kept_weight if ctx.needs_input_grad[1] else None)
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = load(ctx)
        of_x, of_weight, of_bias = ctx.types
        g_w, g_b = parameter_gradients(g, x, ctx.needs_input_grad[3])
        del x  # free the unpacked input before its gradient is created
        g_x = None if weight is None else input_gradient(g, weight, of_x)
        return None, g_x, None if g_w is None else g_w.to(of_weight), None if g_b is None else g_b.to(of_bias)


def parameter_gradients(g: Tensor, x: Tensor | None, of_bias: bool) -> tuple[Tensor | None, Tensor | None]:
    """Return the gradients of the weight and the bias of a linear layer, given the gradient g of the output.

    The gradient of the weight is None if the input x is None, and that of the bias if `of_bias` is False.
    """
    rows = g.reshape(-1, g.shape[-1])
    g_w = None if x is None else torch.mm(rows.t(), x.reshape(-1, x.shape[-1]))
    return g_w, rows.sum(0) if of_bias else None


def input_gradient(g: Tensor, weight: Tensor, dtype: torch.dtype) -> Tensor:
    """Return the gradient of the input of a linear layer as a new tensor, given the gradient g of the output."""
    if weight.dtype != g.dtype:
        weight = weight.to(g.dtype)
    # `torch.mm` is called directly, because `matmul` calls several operations.
    g_x = torch.mm(g.reshape(-1, g.shape[-1]), weight).view(*g.shape[:-1], -1) if g.is_contiguous() else g @ weight
    return g_x if g_x.dtype == dtype else g_x.to(dtype)


@packs(F.linear)
def _linear(mode: PackedOperations, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    input = as_kept(mode, input, mode.policy.product, weight.requires_grad, -1)
    return _Linear.apply(mode, input, weight, bias)


class _Conv2d(torch.autograd.Function):
    """Convolution with gradients as in `_Linear`. If g_w is not required, only the shape of the input is saved."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]
    ) -> Tensor:
        used, kept_weight = mode.weight(weight)
        y = F.conv2d(x, used, bias, *geometry)
        kept = mode.keep(x, mode.policy.product, y.dtype) if ctx.needs_input_grad[2] else None
        save(ctx, kept, kept_weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = load(ctx)
        stride, padding, dilation, groups = ctx.geometry
        if x is None:
            x = g.new_empty(1).expand(ctx.shape)
        wanted = [ctx.needs_input_grad[i] for i in (1, 2, 3)]
        sizes = None if ctx.types[2] is None else [weight.shape[0]]
        found = aten.convolution_backward(
            g, x, weight.to(g.dtype), sizes, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return None, *(t.to(d) if w else None for t, d, w in zip(found, ctx.types, wanted, strict=True)), None


@packs(F.conv2d, torch.conv2d)
def _conv2d(
    mode: PackedOperations,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if input.dim() != 4 or not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    stride, dilation = pair(stride), pair(dilation)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        around = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in around):
            return NotImplemented
        padding = [total // 2 for total in around]
    input = as_kept(mode, input, mode.policy.product, weight.requires_grad)
    return _Conv2d.apply(mode, input, weight, bias, (stride, pair(padding), dilation, groups))


def pair(value: int | Sequence[int]) -> list[int]:
    """Expand a setting of a convolution or pooling layer to both dimensions."""
    return [value, value] if isinstance(value, int) else [*value] * (3 - len(value))


class _Matmul(torch.autograd.Function):
    """Product of two activations (..., n, k) and (..., k, m)."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        packer = mode.policy.attention
        kept_a = mode.keep(a, packer, y.dtype, 1, role="a") if ctx.needs_input_grad[2] else None
        kept_b = mode.keep(b, packer, y.dtype, 1, role="b") if ctx.needs_input_grad[1] else None
        save(ctx, kept_b, kept_a)  # a is unpacked last, because the softmax that returned a uses a next
        ctx.types = a.dtype, b.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        b, a = load(ctx)
        g_a = None if b is None else (g @ b.mT).to(ctx.types[0])
        g_b = None if a is None else (a.mT @ g).to(ctx.types[1])
        return None, g_a, g_b


@packs(torch.bmm, Tensor.bmm)
def _bmm(mode: PackedOperations, input: Tensor, mat2: Tensor) -> Any:
    return matmul(mode, input, mat2)


@packs(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(mode: PackedOperations, input: Tensor, other: Tensor) -> Any:
    """Multiply two activations with equal leading dimensions. Return NotImplemented for unsupported tensors."""
    batched = input.dim() == other.dim() >= 3 and input.shape[:-2] == other.shape[:-2]
    if not batched or not mode.supports(input, other):
        return NotImplemented
    return product(mode, input, other)


def product(mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
    """Multiply two activations (..., n, k) and (..., k, m). Both activations are packed with `Policy.attention`."""
    packer, of_a, of_b = mode.policy.attention, b.requires_grad, a.requires_grad
    return _Matmul.apply(mode, as_kept(mode, a, packer, of_a, 1), as_kept(mode, b, packer, of_b, 1))
