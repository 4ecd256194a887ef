"""GELU, alone or after a BatchNorm with frozen statistics, in one pass over the tensor in each direction.

Only the input is saved for the backward pass: one tensor instead of two for BatchNorm and GELU. Results equal those of
torch's operations up to rounding. On a CPU in float32, kernels compiled by numba compute them.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable

from efficient_ft.ops.gelu import kernels

__all__ = ["batch_norm_gelu", "gelu"]


def gelu(x: Tensor) -> Tensor:
    """Compute the exact `F.gelu` (by erf) of a dense tensor of any shape, with a gradient for x."""
    return _Gelu.apply(x)


def batch_norm_gelu(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute `F.gelu` of `F.batch_norm` with running statistics, with gradients for x, `weight` and `bias`.

    Args:
        x: (B, C, H, W), contiguous in channels-last memory.
        mean, variance: (C,) running statistics.
        weight, bias: (C,) or None.
        eps: constant added to the variance.
    """
    return _BatchNormGelu.apply(x, mean, variance, weight, bias, eps)


class _Gelu(Function):
    """y = x · Φ(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        if not kernels.supports(x):
            return F.gelu(x)
        y = torch.empty_like(x)
        kernels.forward(x, None, None, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        if not kernels.supports(x):
            return torch.ops.aten.gelu_backward(g, x)
        g, g_x = _in_the_layout_of(x, g), torch.empty_like(x)
        kernels.backward(g, x, None, None, None, g_x)
        return g_x


class _BatchNormGelu(Function):
    """y = u · Φ(u) with u = x · scale + shift; scale = γ / √(σ² + ε), shift = β - μ · scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        rstd = (variance + eps).rsqrt()
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.save_for_backward(x, mean, rstd, scale, shift)
        if not kernels.supports(x):
            return F.gelu(torch.addcmul(_per_channel(shift), x, _per_channel(scale)))
        y = torch.empty_like(x)
        kernels.forward(x, scale, shift, y)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, scale, shift = ctx.saved_tensors
        of_weight, of_bias = ctx.needs_input_grad[3:5]
        sums = of_weight or of_bias
        if kernels.supports(x):
            g, g_x = _in_the_layout_of(x, g), torch.empty_like(x)
            found = kernels.backward(g, x, scale, shift, mean if sums else None, g_x)
        else:
            h = torch.ops.aten.gelu_backward(g, torch.addcmul(_per_channel(shift), x, _per_channel(scale)))
            g_x = h * _per_channel(scale)
            found = (h.sum((0, 2, 3)), (h * (x - _per_channel(mean))).sum((0, 2, 3))) if sums else None
        g_w = g_b = None
        if found is not None:
            g_b = found[0] if of_bias else None
            g_w = found[1] * rstd if of_weight else None
        return g_x if ctx.needs_input_grad[0] else None, None, None, g_w, g_b, None


def _per_channel(t: Tensor) -> Tensor:
    return t[:, None, None]


def _in_the_layout_of(x: Tensor, g: Tensor) -> Tensor:
    """Return g with the strides of x, a dense tensor."""
    return g if g.stride() == x.stride() else torch.empty_like(x).copy_(g)
