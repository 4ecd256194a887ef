"""Convolution with a frozen weight that saves nothing of its input.

torch's convolution saves its input even if the weight needs no gradient. Its linear layers do not.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function
from torch.autograd.function import once_differentiable
from torch.nn.grad import conv2d_input

from efficient_ft.ops.autocast import autocast_disabled, to_autocast_dtype


def frozen_conv2d(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
) -> Tensor:
    """Compute `F.conv2d`, with gradients for x and `bias` but not for `weight`.

    Args:
        x: (B, C_in, H, W).
        weight: (C_out, C_in / groups, kernel height, kernel width). It must not need a gradient.
        bias: (C_out,) or None.
        stride, padding, dilation, groups: settings of the convolution.
    """
    return _FrozenConv2d.apply(*to_autocast_dtype(x, weight, bias), (stride, padding, dilation, groups))


class _FrozenConv2d(Function):
    """g_x is the transposed convolution of g, g_b = Σ g."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]) -> Tensor:
        assert not ctx.needs_input_grad[1]
        ctx.save_for_backward(weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        with autocast_disabled(x):
            return F.conv2d(x, weight, bias, *geometry)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (weight,) = ctx.saved_tensors
        g_x = conv2d_input(ctx.shape, weight, g, *ctx.geometry) if ctx.needs_input_grad[0] else None
        g_b = g.sum((0, 2, 3)) if ctx.needs_input_grad[2] else None
        return g_x, None, g_b, None
