"""BatchNorm with frozen statistics and a frozen scale: an affine map per channel that saves nothing of its input.

torch's BatchNorm in evaluation mode saves its input even if only the gradient of the input is needed. If the scale is
trained, torch's fused backward pass is faster and is used instead.
"""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable


def frozen_batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Compute `F.batch_norm` with running statistics, with gradients for x and `bias` but not for `weight`.

    Args:
        x: (B, C, H, W).
        mean, variance: (C,) running statistics.
        weight, bias: (C,) or None. `weight` must not need a gradient.
        eps: constant added to the variance.
    """
    return _FrozenBatchNorm.apply(x, mean, variance, weight, bias, eps)


class _FrozenBatchNorm(Function):
    """g_x = g · γ / √(σ² + ε), g_b = Σ g."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        assert not ctx.needs_input_grad[3]
        ctx.eps = eps
        ctx.save_for_backward(variance, weight)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        variance, weight = ctx.saved_tensors
        g_x = g_b = None
        if ctx.needs_input_grad[0]:
            scale = (variance + ctx.eps).rsqrt()
            g_x = g * (scale if weight is None else scale * weight).to(g.dtype)[:, None, None]
        if ctx.needs_input_grad[4]:
            g_b = g.sum((0, 2, 3), dtype=variance.dtype)
        return g_x, None, None, None, g_b, None
