"""Autograd functions for the low-rank backward pass of a linear layer or 1×1 convolution.

With the analysis matrix A and the synthesis matrix S of a projection (R × L, see `ops.projection.transforms`)::

    x̂ = A x        (forward pass; x̂ is saved instead of x)
    ĝ = A g_y
    g_w = ĝᵀ x̂,    g_x = Sᵀ (ĝ w),    g_b = Σ g_y  (exact)

Source: LBP-WHT, Algorithm 1. All gradients are exact if SᵀA is the identity. Layers that read the same tensor (q, k and
v, or the two branches of a gated network) share x̂.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.autocast import autocast_disabled, to_autocast_dtype
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.projection import kernels
from efficient_ft.ops.projection.projection import Constants, Projection, SubsetProjection
from efficient_ft.ops.saving import current_packing, load, save
from efficient_ft.ops.storage import Packed


@torch.compiler.disable  # whether two layers share x̂ is known only at run time
def low_rank_linear(
    x: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection | SubsetProjection, fused: bool = False
) -> Tensor:
    """Compute `F.linear` with a low-rank backward pass.

    Args:
        x: Tokens (B, N, C_in), or a map (B, H, W, C_in).
        weight, bias: Weight (C_out, C_in), and bias (C_out,) or None.
        projection: Projection over the N tokens (prefix tokens and grid), over the H·W positions of a map, or over the
            remaining tokens of each image.
        fused: If True, use the kernels in `kernels` for bfloat16 tensors that they support.
    """
    autocast = torch.is_autocast_enabled(x.device.type)
    parts = to_autocast_dtype(x, weight, bias) if autocast else (x, weight, bias)
    return _LowRankLinear.apply(*parts, projection, weakref.ref(x), fused, autocast)


@torch.compiler.disable  # whether two layers share x̂ is known only at run time
def low_rank_conv1x1(
    x: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection, fused: bool = False
) -> Tensor:
    """Compute an ungrouped 1×1 `F.conv2d` of stride 1 with a low-rank backward pass.

    Args:
        x: Map (B, C_in, H, W), channels-first or channels-last in memory.
        weight, bias: Weight (C_out, C_in, 1, 1), and bias (C_out,) or None.
        projection: Projection over the H·W positions.
        fused: If True, use the kernels in `kernels` for bfloat16 tensors that they support.
    """
    return _LowRankConv1x1.apply(*to_autocast_dtype(x, weight, bias), projection, weakref.ref(x), fused)


class _LowRankLinear(torch.autograd.Function):
    """Linear layer on tokens (B, N, C) or maps (B, H, W, C)."""

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor,
        bias: Tensor | None,
        projection: Projection | SubsetProjection,
        read: Any,
        fused: bool,
        autocast: bool,
    ) -> Tensor:
        _save(ctx, x if x.dim() == 3 else x.flatten(1, 2), weight, projection, read, fused)
        if not autocast:
            return F.linear(x, weight, bias)
        with autocast_disabled(x):
            return F.linear(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        constants, g_w, g_b, gx_hat = _backward(ctx, g if g.dim() == 3 else g.flatten(1, 2))
        g_x = None
        if gx_hat is not None and ctx.fused:
            g_x = kernels.back(gx_hat, ctx.projection, gx_hat.dtype)
        elif gx_hat is not None:
            g_x = ctx.projection.back(gx_hat, constants)
        if g_x is not None and g.dim() == 4:
            g_x = g_x.unflatten(1, g.shape[1:3])
        return g_x, g_w, g_b, None, None, None, None


class _LowRankConv1x1(torch.autograd.Function):
    """1×1 convolution on feature maps of shape (B, C, H, W)."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, projection: Projection, read: Any, fused: bool
    ) -> Tensor:
        _save(ctx, x.flatten(2).transpose(1, 2), weight, projection, read, fused)
        with autocast_disabled(x):
            return F.conv2d(x, weight, bias)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        constants, g_w, g_b, gx_hat = _backward(ctx, g.flatten(2).transpose(1, 2))
        g_x = None
        if gx_hat is not None:
            # g_x has the memory format of g, so that earlier layers do not have to copy g_x.
            first = g.is_contiguous()
            if ctx.fused and not first:
                g_x = kernels.back(gx_hat, ctx.projection, gx_hat.dtype)
            else:
                g_x = ctx.projection.back(gx_hat, constants, channels_first=first)
            g_x = (g_x if first else g_x.transpose(1, 2)).unflatten(2, g.shape[2:])
        return g_x, None if g_w is None else g_w[:, :, None, None], g_b, None, None, None


_FEW = 16  # with fewer coefficients, the plain product is faster than the transposed product
_WIDE = 512  # minimum number of input channels for which the product of `weight_gradient` is computed in pieces

#: The attribute `held` stores the last x̂. The next layer reuses x̂ if its input is the same tensor. The backward pass
#: frees x̂ and may run in several threads, so the state is one attribute that is replaced atomically.
_last = SimpleNamespace(held=None)


def _save(
    ctx: Any,
    x_BNC: Tensor,
    weight: Tensor,
    projection: Projection | SubsetProjection,
    read: weakref.ref[Tensor],
    fused: bool,
) -> None:
    """Save the constants, x̂ if the weight requires a gradient, and the weight if x requires a gradient.

    If packing is active, x̂ is packed. `read` is a weak reference to the input of the layer.
    """
    ctx.projection = projection
    ctx.fused = fused and isinstance(projection, Projection) and x_BNC.dtype == torch.bfloat16
    constants = projection.constants(x_BNC.device, x_BNC.dtype)
    of_x, of_weight, *_ = ctx.needs_input_grad
    x_hat = _x_hat(x_BNC, projection, constants, read, ctx.fused) if of_weight else None
    ctx.packed = isinstance(x_hat, Packed)
    if ctx.packed:
        save(ctx, x_hat, weight if of_x else None, *constants.matrices)
    else:
        ctx.save_for_backward(x_hat, weight if of_x else None, *constants.matrices)


def _x_hat(
    x_BNC: Tensor,
    projection: Projection | SubsetProjection,
    constants: Constants,
    read: weakref.ref[Tensor],
    fused: bool,
) -> Tensor | Packed:
    """Return x̂, or a packed tensor that unpacks to x̂. If the previous layer read the same tensor, return its x̂."""
    packing = current_packing()  # the packing mode does not intercept tensors that an autograd function saves
    if packing is not None:
        packing.begin("low_rank")
    kept = None if packing is None else packing.find_source(x_BNC)
    if kept is not None:
        kept.shared.add_user()
        return Packed(kept.tensors, partial(_projected, kept.unpack, projection))
    # Under autocast, x_BNC is a new copy of the tensor that the layer read, so its own version does not count changes.
    source = read()
    how = None if source is None else source._version, x_BNC.dtype, x_BNC.shape, projection, packing
    held = _last.held
    if held is not None and held[0]() is source and held[1] == how:
        if isinstance(held[2], Packed):
            held[2].shared.add_user()
        return held[2]
    dense, _ = _project(x_BNC, projection, constants, fused)
    x_hat = dense if packing is None else packing.keep(dense, packing.policy.product, heads=-1, role="projected")
    _last.held = read, how, x_hat
    return x_hat


def _projected(unpack: Callable[..., Tensor], projection: Projection | SubsetProjection, *tensors: Tensor) -> Tensor:
    """Unpack x and return its projection x̂."""
    x_BNC = unpack(*tensors)
    return projection.project(x_BNC, projection.constants(x_BNC.device, x_BNC.dtype))


def _backward(ctx: Any, g_BNC: Tensor) -> tuple[Constants, Tensor | None, Tensor | None, Tensor | None]:
    """Return the constants, g_w (C_out, C_in), g_b (C_out,) and ĝw (B, R, C_in). Gradients are None if not required."""
    _last.held = None
    x_hat, weight, *_ = load(ctx) if ctx.packed else ctx.saved_tensors
    constants = ctx.projection.constants(g_BNC.device, g_BNC.dtype)
    of_x, _, of_bias, *_ = ctx.needs_input_grad
    g_hat, g_b = _project(g_BNC, ctx.projection, constants, ctx.fused, sums=of_bias)
    # Creating a view of a small tensor takes as long as a product. Views are therefore reused.
    g_rows = g_hat.flatten(0, 1)
    batch, rank, _ = g_hat.shape
    g_w = None if x_hat is None else weight_gradient(g_rows, x_hat.flatten(0, 1))
    if of_bias and g_b is None:
        if constants.ones is not None and g_BNC.dtype in (torch.float32, torch.float64):
            # The sum over positions is computed from the coefficients to avoid a second pass over g.
            g_b = torch.mv((g_rows if batch == 1 else g_hat.sum(0)).t(), constants.ones)
        else:
            g_b = g_BNC.sum((0, 1))
    gx_hat = None
    if of_x:
        weight = weight if weight.dim() == 2 else weight.flatten(1)
        if ctx.fused or batch * rank < _FEW:
            gx_hat = torch.mm(g_rows, weight).view(batch, rank, weight.shape[1])
        else:
            # On CPUs, computing (ĝw)ᵀ as wᵀĝᵀ takes up to 25 % less time.
            gx_CR = torch.mm(weight.t(), g_rows.t())
            gx_hat = gx_CR.as_strided((batch, rank, gx_CR.shape[0]), (rank, 1, batch * rank))
    return constants, g_w, g_b, gx_hat


def _project(
    x_BNC: Tensor, projection: Projection | SubsetProjection, constants: Constants, fused: bool, sums: bool = False
) -> tuple[Tensor, Tensor | None]:
    """Return the coefficients of x, and Σ x over images and tokens if `sums` is True and a kernel computes it."""
    if fused and x_BNC.is_contiguous() and kernels.supported(x_BNC):
        assert isinstance(projection, Projection)
        x_hat, total, *_ = kernels.project(x_BNC, projection, x_BNC.dtype, sums=sums)
        return x_hat, None if total is None else total.to(x_BNC.dtype)
    return projection.project(x_BNC, constants), None


def weight_gradient(g_hat: Tensor, x_hat: Tensor) -> Tensor:
    """Compute ĝᵀx̂ (C_out, C_in) from ĝ (B·R, C_out) and x̂ (B·R, C_in)."""
    c_out, c_in = g_hat.shape[1], x_hat.shape[1]
    if c_in < 2 * c_out or c_in < _WIDE or g_hat.device.type != "cpu" or g_hat.dtype != torch.float32:
        return torch.mm(g_hat.t(), x_hat)
    # In fp32, CPU libraries parallelize products with a wide result poorly. Square pieces take 20 % less time.
    g_w = g_hat.new_empty(c_out, c_in)
    pieces = c_in // c_out
    for columns, out in zip(x_hat.chunk(pieces, 1), g_w.chunk(pieces, 1), strict=True):
        torch.mm(g_hat.T, columns, out=out)
    return g_w
