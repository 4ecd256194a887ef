"""Feed-forward network with a low-rank backward pass as one autograd function.

The function computes, with f₁ = x w₁ᵀ, y = GELU(f₁ · a₁ + b₁) and f₂ = y w₂ᵀ::

    output = f₂ · a₂ + b₂          or          output = residual + f₂ · a₂ + b₂

The vectors a and b contain one value for each channel. They represent biases, BatchNorm layers with frozen statistics
and LayerScale, which therefore require no passes of their own. The gradients are the same as with separate layers (see
`low_rank`). Between the two layers, only the coefficients of the gradients are written to memory: the gradient of y is
synthesized, multiplied by the derivative of GELU and projected again in one pass over f₁.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.autocast import autocast_disabled, compute_dtype
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.projection import kernels
from efficient_ft.ops.projection.low_rank import weight_gradient
from efficient_ft.ops.projection.projection import Projection


@torch.compiler.disable
def low_rank_feed_forward(
    x: Tensor,
    first: tuple[Tensor, Tensor, Tensor],
    second: tuple[Tensor, Tensor, Tensor],
    projection: Projection,
    residual: Tensor | None = None,
    grid: Sequence[int] | None = None,
) -> Tensor:
    """Compute a feed-forward network with a low-rank backward pass.

    Args:
        x: Tokens, (B, N, C).
        first, second: Weight (C_out, C_in), a (C_out,) and b (C_out,) of each layer.
        projection: Projection over the N tokens.
        residual: Tensor that is added to the output, or None. x itself requires only one gradient.
        grid: (H, W) if the layers are 1×1 convolutions of maps, for which torch computes products with `F.conv2d`.

    Returns:
        Tokens (B, N, C). The dtype is the autocast dtype. With a residual tensor, the dtype is the common dtype of the
        residual tensor and of a₂.
    """
    dtype = compute_dtype(x)
    to = dtype if residual is None else torch.promote_types(residual.dtype, second[1].dtype)
    adds_x = residual is x
    w_1, a_1, b_1 = first[0], *map(_vector, first[1:])
    w_2, a_2, b_2 = second[0], *map(_vector, second[1:])
    with autocast_disabled(x):
        return _FeedForward.apply(
            x, None if adds_x else residual, w_1, a_1, b_1, w_2, a_2, b_2, projection, dtype, to, adds_x, grid
        )


def _vector(x: Tensor) -> Tensor:
    """Return values per channel in at least float32, as the kernels require."""
    return x.to(torch.promote_types(x.dtype, torch.float32)).contiguous()


class _FeedForward(torch.autograd.Function):
    """Autograd function of `low_rank_feed_forward`. Autograd differentiates only tensors that are arguments."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        residual: Tensor | None,
        w_1: Tensor,
        a_1: Tensor,
        b_1: Tensor,
        w_2: Tensor,
        a_2: Tensor,
        b_2: Tensor,
        projection: Projection,
        dtype: torch.dtype,
        to: torch.dtype,
        adds_x: bool,
        grid: Sequence[int] | None,
    ) -> Tensor:
        of_x, _, of_w_1, of_a_1, of_b_1, of_w_2, of_a_2, _ = ctx.needs_input_grad[:8]
        ctx.projection, ctx.adds_x, ctx.dtypes = projection, adds_x, (x.dtype, w_1.dtype, w_2.dtype)
        ctx.residual = None if residual is None else residual.dtype
        w_1, w_2 = w_1.to(dtype), w_2.to(dtype)
        x_hat = None
        if of_w_1:
            x_hat, _, _, read = kernels.project(x, projection, dtype, copies=True)
        else:
            read = x.to(dtype)
        assert read is not None
        f_1 = _product(read, w_1, grid)
        y, y_hat = kernels.activate(f_1, a_1, b_1, projection, of_w_2)
        f_2 = _product(y, w_2, grid)
        passes = of_x or of_w_1 or of_a_1 or of_b_1  # True if the gradient of f₁ is required
        ctx.passes = passes
        ctx.save_for_backward(
            x_hat,
            f_1 if passes else None,
            y_hat,
            f_2 if of_a_2 else None,
            w_1 if of_x else None,
            w_2 if passes else None,
            a_1,
            b_1,
            a_2,
            *projection.constants(x.device, dtype).matrices,
        )
        return kernels.add_affine(x if adds_x else residual, f_2, a_2, b_2, to)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, f_1, y_hat, f_2, w_1, w_2, a_1, b_1, a_2, *matrices = ctx.saved_tensors
        of_x, of_residual, of_w_1, _, _, of_w_2, _, of_b_2 = ctx.needs_input_grad[:8]
        projection, (type_x, type_w_1, type_w_2) = ctx.projection, ctx.dtypes
        g_x = g_w_1 = g_a_1 = g_b_1 = g_w_2 = None
        g_hat, g_b_2, g_a_2, _ = kernels.project(g, projection, matrices[0].dtype, scale=a_2, sums=of_b_2, factor=f_2)
        if of_w_2:
            g_w_2 = weight_gradient(g_hat.flatten(0, 1), y_hat.flatten(0, 1)).to(type_w_2)
        if ctx.passes:
            gy_hat = torch.mm(g_hat.flatten(0, 1), w_2).view(*g_hat.shape[:2], -1)
            g_hat, g_a_1, g_b_1 = kernels.activate_backward(gy_hat, f_1, a_1, b_1, projection)
        if of_w_1:
            g_w_1 = weight_gradient(g_hat.flatten(0, 1), x_hat.flatten(0, 1)).to(type_w_1)
        if of_x:
            gx_hat = torch.mm(g_hat.flatten(0, 1), w_1).view(*g_hat.shape[:2], -1)
            g_x = kernels.back(gx_hat, projection, type_x, g if ctx.adds_x else None)
        g_residual = g.to(ctx.residual) if of_residual else None
        return g_x, g_residual, g_w_1, g_a_1, g_b_1, g_w_2, g_a_2, g_b_2, None, None, None, None, None


def _product(x_BNC: Tensor, weight: Tensor, grid: Sequence[int] | None) -> Tensor:
    """Compute x wᵀ. For maps in fp32, the convolution takes 10 % less time than the product."""
    if grid is None or x_BNC.dtype == torch.bfloat16:
        return F.linear(x_BNC, weight)
    x_BCHW = x_BNC.transpose(1, 2).unflatten(2, grid)
    weight = weight[:, None, None].permute(0, 3, 1, 2)  # channels-last
    return F.conv2d(x_BCHW, weight).flatten(2).transpose(1, 2).contiguous()


@torch.compiler.disable
def pool_mixer(x: Tensor, scale: Tensor) -> Tensor:
    """Compute x + scale · (pool(x) - x) for a channels-last map (B, C, H, W), as in the blocks of PoolFormer.

    The pooling computes the mean over the 3 × 3 neighborhood inside the map. `scale` (C,) is the weight of LayerScale.
    """
    return _PoolMixer.apply(x, _vector(scale), torch.promote_types(x.dtype, scale.dtype))


class _PoolMixer(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
        ctx.save_for_backward(x, scale)
        with autocast_disabled(x):
            y = kernels.mix(x.permute(0, 2, 3, 1), scale, dtype)
        return y.permute(0, 3, 1, 2)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, scale = ctx.saved_tensors
        g_x, g_scale = kernels.mix_backward(g.permute(0, 2, 3, 1), x.permute(0, 2, 3, 1), scale)
        return g_x.permute(0, 3, 1, 2), g_scale, None
