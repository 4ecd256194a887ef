"""Normalizations: LayerNorm, RMSNorm, GroupNorm and BatchNorm."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.autocast import to_single_precision
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.saving.saving import as_kept, load, save
from efficient_ft.ops.saving.table import packs
from efficient_ft.ops.storage import Packed, Sparse

aten = torch.ops.aten


class _LayerNorm(torch.autograd.Function):
    """LayerNorm that saves exact statistics, and either its input or x̂ (see `Policy.normalized`)."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        shape: list[int],
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        normalized = mode.policy.normalized
        y, kept_x, rstd, mean = layer_norm(x, shape, weight, bias, eps, normalized)
        kept = mode.keep(kept_x, mode.policy.norm, None, -1, role="normalized" if normalized else "input")
        save(ctx, kept, weight, bias, rstd, mean)
        ctx.shape = shape
        return _from_normalized(mode, y, kept, weight, bias) if normalized else y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, rstd, mean = load(ctx)
        wanted = [ctx.needs_input_grad[i] for i in (1, 3, 4)]
        g_x, g_w, g_b = layer_norm_backward(g, x, ctx.shape, weight, bias, rstd, mean, wanted)
        return None, g_x, None, g_w, g_b, None


def layer_norm(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float, normalized: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    """Return the output of LayerNorm, the tensor to pack, 1 / √(variance + ε), and the mean.

    The tensor to pack is x̂ if `normalized` is True, and x otherwise. If `normalized` is True, no mean is
    needed, and None is returned.
    """
    if normalized:
        return *_normalized(x, shape, weight, bias, eps), None
    y, mean, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
    return y, x, rstd, mean


def layer_norm_backward(
    g: Tensor,
    x: Tensor,
    shape: Sequence[int],
    weight: Tensor | None,
    bias: Tensor | None,
    rstd: Tensor,
    mean: Tensor | None,
    wanted: Sequence[bool],
) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
    """Return the gradients of the input, γ and β of LayerNorm that are `wanted`, given x̂ or x (see `layer_norm`)."""
    statistics = (torch.zeros_like(rstd), torch.ones_like(rstd)) if mean is None else (mean, rstd)
    found = aten.native_layer_norm_backward.default(g, x, shape, *statistics, weight, bias, wanted)
    g_x, g_w, g_b = found
    if mean is None and wanted[0]:
        g_x.mul_(rstd)
    return g_x, g_w, g_b


def _normalized(
    x: Tensor, shape: Sequence[int], weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the output of LayerNorm, x̂, and 1 / √(variance + ε)."""
    if x.device.type != "cpu" or x.dtype not in (torch.float32, torch.float64) or weight is None or bias is None:
        y, _, rstd = torch.native_layer_norm(x, shape, weight, bias, eps)
        return y, torch.native_layer_norm(x, shape, None, None, eps)[0], rstd
    # γ = 1 and β = 0 are passed, because torch's CPU kernel takes twice as long without γ and β.
    x_hat, _, rstd = torch.native_layer_norm(x, shape, torch.ones_like(weight), torch.zeros_like(bias), eps)
    return torch.addcmul(bias, x_hat, weight), x_hat, rstd


class _RMSNorm(torch.autograd.Function):
    """RMSNorm over the last dimensions, x̂ · γ with x̂ = x / √(mean(x²) + ε), that saves x or x̂ like `_LayerNorm`."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, dims: list[int], weight: Tensor | None, eps: float
    ) -> Tensor:
        # The square of an fp16 value above 255 is infinite. F.rms_norm also computes in fp32.
        wide = x.to(torch.promote_types(x.dtype, torch.float32))
        rstd = wide.square().mean(dims, keepdim=True).add_(eps).rsqrt_()
        wide = wide * rstd
        x_hat = wide.to(x.dtype)
        y = x_hat if weight is None else (wide * weight).to(torch.promote_types(x.dtype, weight.dtype))
        ctx.dims, ctx.normalized, ctx.affine_dims = dims, mode.policy.normalized, list(range(x.dim() - len(dims)))
        ctx.dtype = x.dtype
        if mode.policy.normalized:
            kept = mode.keep(x_hat, mode.policy.norm, None, -1, result=weight is None, role="normalized")
            save(ctx, kept, weight, rstd)
            y = _from_normalized(mode, y, kept, weight, None)
        else:
            save(ctx, mode.keep(x, mode.policy.norm, None, -1), weight, rstd)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x_hat, weight, rstd = load(ctx)
        if not ctx.normalized:
            x_hat = x_hat * rstd
        g_w = (g * x_hat).sum(ctx.affine_dims) if ctx.needs_input_grad[3] else None
        g_x = None
        if ctx.needs_input_grad[1]:
            h = g if weight is None else g * weight
            g_x = (h - x_hat * (h * x_hat).mean(ctx.dims, keepdim=True)) * rstd
            g_x = g_x.to(ctx.dtype)
        return None, g_x, None, g_w, None


@packs(F.rms_norm)
def _rms_norm(
    mode: PackedOperations,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    eps: float | None = None,
) -> Any:
    if not mode.supports(input, trained=(weight,)) or len(normalized_shape) >= input.dim():
        return NotImplemented
    eps = torch.finfo(torch.promote_types(input.dtype, torch.float32)).eps if eps is None else eps  # torch's default
    input = _exact_or_packed(mode, input, -1)
    return _RMSNorm.apply(mode, input, [-1 - i for i in range(len(normalized_shape))], weight, eps)


class _GroupNorm(torch.autograd.Function):
    """GroupNorm that saves exact statistics, and either its input or x̂, like `_LayerNorm`."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        samples, channels, positions = x.shape[0], x.shape[1], x.shape[2:].numel()
        ctx.sizes = (samples, channels, positions, groups)
        y, mean, rstd = torch.native_group_norm(x, weight, bias, samples, channels, positions, groups, eps)
        ctx.normalized = mode.policy.normalized
        if mode.policy.normalized:
            x_hat = torch.native_group_norm(x, None, None, samples, channels, positions, groups, eps)[0]
            kept = mode.keep(x_hat, mode.policy.norm, None, role="normalized")
            save(ctx, kept, weight, rstd)
            affine = (None if p is None else _per_channel(p, x) for p in (weight, bias))
            y = _from_normalized(mode, y, kept, *affine)
        else:
            save(ctx, mode.keep(x, mode.policy.norm, None), weight, rstd, mean)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, rstd, *mean = load(ctx)
        wanted = [ctx.needs_input_grad[i] for i in (1, 3, 4)]
        statistics = (torch.zeros_like(rstd), torch.ones_like(rstd)) if ctx.normalized else (mean[0], rstd)
        # Both tensors are made contiguous, because the kernel reads both in the memory format of the first tensor.
        g, x = g.contiguous(), x.contiguous()
        found = aten.native_group_norm_backward(g, x, *statistics, weight, *ctx.sizes, wanted)
        g_x = found[0] if wanted[0] else None
        if g_x is not None and ctx.normalized:
            per_channel = rstd.repeat_interleave(ctx.sizes[1] // ctx.sizes[3], 1)
            g_x = g_x * per_channel.view(*per_channel.shape, *[1] * (g.dim() - 2))
        return None, g_x, None, found[1] if wanted[1] else None, found[2] if wanted[2] else None, None


@packs(F.group_norm)
def _group_norm(
    mode: PackedOperations,
    input: Tensor,
    num_groups: int,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    input = _exact_or_packed(mode, input)
    return _GroupNorm.apply(mode, input, num_groups, weight, bias, eps)


def _from_normalized(
    mode: PackedOperations, y: Tensor, kept: Packed, weight: Tensor | None, bias: Tensor | None
) -> Tensor:
    """Register the packed x̂ as the source of y = x̂ · γ + β. If `Policy.forward` is True, recompute y from x̂."""
    affine = [p for p in (weight, bias) if p is not None]
    unpack = partial(_affine, kept.unpack, weight is not None, bias is not None)
    if mode.policy.forward:
        y = kept.shared.in_forward(unpack, *kept.tensors, *affine).to(y.dtype)
    if mode.policy.derived:
        mode.set_source(y, Packed((*kept.tensors, *affine), unpack, kept.shared))
    return y


def _affine(unpack: Callable[..., Tensor], has_weight: bool, has_bias: bool, *tensors: Tensor) -> Tensor:
    count = has_weight + has_bias
    x_hat = unpack(*(tensors[:-count] if count else tensors))
    return affine(x_hat, tensors[-count] if has_weight else None, tensors[-1] if has_bias else None)


def affine(x_hat: Tensor, weight: Tensor | None, bias: Tensor | None) -> Tensor:
    """Compute x̂ · γ + β."""
    y = x_hat if weight is None else x_hat * weight
    return y if bias is None else y + bias


def _exact_or_packed(mode: PackedOperations, input: Tensor, heads: int | None = None) -> Tensor:
    """Convert the input of a normalization to single precision under autocast, and apply `as_kept`."""
    input = to_single_precision(input)
    return as_kept(mode, input, mode.policy.norm, not mode.policy.normalized, heads, cast=False)


@packs(F.layer_norm)
def _layer_norm(
    mode: PackedOperations,
    input: Tensor,
    normalized_shape: Sequence[int],
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    eps: float = 1e-5,
) -> Any:
    if not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    input = _exact_or_packed(mode, input, -1)
    return _LayerNorm.apply(mode, input, list(normalized_shape), weight, bias, eps)


class _BatchNorm(torch.autograd.Function):
    """BatchNorm with running statistics (an affine map of each channel), which saves its input only to train γ."""

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        mean: Tensor,
        var: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        eps: float,
    ) -> Tensor:
        y = F.batch_norm(x, mean, var, weight, bias, False, 0.0, eps)
        # Pruning drops values near 0. Centering the input first makes values near 0 the least important values.
        policy = mode.policy
        ctx.centered = policy.normalized and isinstance(policy.norm, Sparse) and not policy.forward
        kept = None
        if ctx.needs_input_grad[4]:
            x_kept = x - _per_channel(mean, x) if ctx.centered else x
            kept = mode.keep(x_kept, policy.norm, y.dtype)
        save(ctx, kept, weight, mean, var)
        if kept is not None and policy.derived_all and not ctx.centered:
            _set_map_source(mode, y, kept, mean, (var + eps).rsqrt(), weight, bias)
        ctx.eps, ctx.type = eps, x.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, var = load(ctx)
        others = [d for d in range(g.dim()) if d != 1]
        rstd = (var + ctx.eps).rsqrt()
        scale = rstd if weight is None else weight * rstd
        g_x = (g * _per_channel(scale, g)).to(ctx.type) if ctx.needs_input_grad[1] else None
        g_b = g_w = None
        if ctx.needs_input_grad[5]:
            g_b = g.sum(others, dtype=mean.dtype)
        if x is not None:
            # The kernel centers the input before summing, because the mean may far exceed the standard deviation.
            center = torch.zeros_like(mean) if ctx.centered else mean
            wanted = [False, True, False]
            g_w = aten.native_batch_norm_backward(g, x, weight, center, var, None, None, False, ctx.eps, wanted)[1]
        return None, g_x, None, None, g_w, g_b, None


def _per_channel(values: Tensor, like: Tensor) -> Tensor:
    """View values (C,) in a shape that broadcasts with (B, C, ...)."""
    return values.view([1, -1] + [1] * (like.dim() - 2))


class _TrainingBatchNorm(torch.autograd.Function):
    """BatchNorm with exact statistics of the batch.

    `forward` has the parameters of `F.batch_norm`, because an autograd function receives each tensor separately.
    """

    @staticmethod
    def forward(
        ctx: Any,
        mode: PackedOperations,
        x: Tensor,
        mean: Tensor | None,
        var: Tensor | None,
        weight: Tensor | None,
        bias: Tensor | None,
        momentum: float,
        eps: float,
    ) -> Tensor:
        y, of_batch, rstd = torch.native_batch_norm(x, weight, bias, mean, var, True, momentum, eps)
        kept = mode.keep(x, mode.policy.norm)
        save(ctx, kept, weight, of_batch, rstd)
        ctx.eps = eps
        if mode.policy.derived_all:
            _set_map_source(mode, y, kept, of_batch, rstd, weight, bias)
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, mean, rstd = load(ctx)
        wanted = [ctx.needs_input_grad[i] for i in (1, 4, 5)]
        found = aten.native_batch_norm_backward(g, x, weight, None, None, mean, rstd, True, ctx.eps, wanted)
        return None, found[0], None, None, found[1], found[2], None, None


def _set_map_source(
    mode: PackedOperations, y: Tensor, x: Packed, mean: Tensor, rstd: Tensor, weight: Tensor | None, bias: Tensor | None
) -> None:
    """Register the packed input x of a BatchNorm as the source of its output y."""
    scale = rstd if weight is None else weight * rstd
    shift = -mean * scale if bias is None else bias - mean * scale
    source = Packed((*x.tensors, scale, shift), partial(_mapped, x.unpack), x.shared)
    # Operations that save y share one recomputed y if x is stored unchanged, or the unpacked x otherwise.
    mode.set_source(y, mode.share(source) if mode.policy.exact else source)


def _mapped(unpack: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Compute x · scale + shift for each channel in one pass."""
    *packed, scale, shift = tensors
    mean, var = torch.zeros_like(scale), torch.ones_like(scale)
    y: Tensor = torch.native_batch_norm(unpack(*packed), scale, shift, mean, var, False, 0.0, 0.0)[0]
    return y


@packs(F.batch_norm)
def _batch_norm(
    mode: PackedOperations,
    input: Tensor,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    weight: Tensor | None = None,
    bias: Tensor | None = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Replacement for `F.batch_norm` with the same parameters."""
    if not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    if training and input.numel() == input.shape[1]:  # torch reports that one value per channel has no variance
        return NotImplemented
    trains = weight is not None and weight.requires_grad
    input = as_kept(mode, input, mode.policy.norm, training or trains, cast=False)
    if training:
        return _TrainingBatchNorm.apply(mode, input, running_mean, running_var, weight, bias, momentum, eps)
    return _BatchNorm.apply(mode, input, running_mean, running_var, weight, bias, eps)
