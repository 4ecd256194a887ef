"""BatchNorm with frozen statistics: a per-channel affine map with a backward pass of its own.

torch's backward of an evaluating BatchNorm keeps its input even where only the input's gradient is needed, and takes
several times as long on a CPU as the three passes below. The forward is torch's own.
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
    """`F.batch_norm` with running statistics for x (B, C, H, W); keeps x only where `weight` needs a gradient."""
    return _FrozenBatchNorm.apply(x, mean, variance, weight, bias, eps)


class _FrozenBatchNorm(Function):
    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        ctx.eps = eps
        ctx.save_for_backward(x if ctx.needs_input_grad[3] else None, mean, variance, weight)
        return F.batch_norm(x, mean, variance, weight, bias, False, 0.0, eps)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, variance, weight = ctx.saved_tensors
        rstd = (variance + ctx.eps).rsqrt()
        g_x = g_w = g_b = None
        if ctx.needs_input_grad[0]:
            scale = rstd if weight is None else rstd * weight
            g_x = g * scale.to(g.dtype)[:, None, None]
        if x is not None:
            # centred before it is multiplied: Σ g·x − mean·Σ g would cancel where the mean is large
            g_w = (x - mean[:, None, None]).mul_(g).sum(0).sum((1, 2)) * rstd
        if ctx.needs_input_grad[4]:
            g_b = g.sum(0, dtype=mean.dtype).sum((1, 2))
        return g_x, None, None, g_w, g_b, None
