"""GELU, alone or after a BatchNorm with frozen statistics.

The forward pass and the backward pass each read the input tensor only once. Only the input is saved for the backward
pass. For BatchNorm followed by GELU, one tensor is saved instead of two. The results equal the results of torch's
operations up to rounding errors. For float32 tensors on a CPU, kernels compiled by numba are used if numba is
installed. Otherwise, torch's operations are used.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd import Function

from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

__all__ = ["batch_norm_gelu", "gelu"]

_AT_A_TIME = 1 << 14  # number of values that a thread processes at a time
_PIECES = 64  # number of separately summed pieces (constant, so that sums do not depend on the number of threads)

#: Function that returns the compiled kernels, or None if numba is not installed.
_kernels = partial(optional_module, "efficient_ft.ops.gelu.numba_kernels")


def gelu(x: Tensor) -> Tensor:
    """Compute the exact GELU (with erf), like `F.gelu`, of a dense tensor of any shape."""
    return _Gelu.apply(x)


def batch_norm_gelu(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """Apply `F.batch_norm` with running statistics, and then `F.gelu`. x, `weight` and `bias` receive gradients.

    x has the shape (B, C, H, W) and is contiguous in channels-last memory format. `frozen.frozen_batch_norm` describes
    the other arguments.
    """
    return _BatchNormGelu.apply(x, mean, variance, weight, bias, eps)


class _Gelu(Function):
    """GELU, y = x · Φ(x)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return _forward(x, None, None) if _supports(x) else F.gelu(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return _backward(g, x, None, None, None)[0] if _supports(x) else torch.ops.aten.gelu_backward(g, x)


class _BatchNormGelu(Function):
    """BatchNorm and GELU, y = u · Φ(u) with u = x · scale + shift, scale = γ / √(σ² + ε) and shift = β - μ · scale."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
    ) -> Tensor:
        rstd = (variance + eps).rsqrt()
        scale = rstd if weight is None else rstd * weight
        shift = -mean * scale if bias is None else bias - mean * scale
        ctx.save_for_backward(x, mean, rstd, scale, shift)
        if _supports(x):
            return _forward(x, scale, shift)
        return F.gelu(torch.addcmul(_per_channel(shift), x, _per_channel(scale)))

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, mean, rstd, scale, shift = ctx.saved_tensors
        of_x, _, _, of_weight, of_bias, _ = ctx.needs_input_grad
        sums = of_weight or of_bias
        if _supports(x):
            g_x, g_shift, g_scale = _backward(g, x, scale, shift, mean if sums else None)
        else:
            h = torch.ops.aten.gelu_backward(g, torch.addcmul(_per_channel(shift), x, _per_channel(scale)))
            g_x = h * _per_channel(scale)
            g_shift = h.sum((0, 2, 3)) if sums else None
            g_scale = (h * (x - _per_channel(mean))).sum((0, 2, 3)) if sums else None
        g_w = g_scale * rstd if of_weight and g_scale is not None else None
        return g_x if of_x else None, None, None, g_w, g_shift if of_bias else None, None


def _per_channel(t: Tensor) -> Tensor:
    return t[:, None, None]


def _supports(x: Tensor) -> bool:
    """Return True if the kernels support `x`."""
    real = type(x) in (Tensor, torch.nn.Parameter)  # a fake tensor has no data
    return real and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0 and _kernels() is not None


def _forward(x: Tensor, scale: Tensor | None, shift: Tensor | None) -> Tensor:
    """Return GELU(x · scale + shift) in the memory format of x, which must be channels-last if `scale` is given."""
    y = torch.empty_like(x)
    if scale is None or shift is None:
        _run(_kernels().forward(False), x, _AT_A_TIME, [x, y])
    else:
        _run(_kernels().forward(True), x, _AT_A_TIME // len(scale), [x, y, scale, shift], len(scale))
    return y


def _backward(
    g: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None, mean: Tensor | None
) -> tuple[Tensor, Tensor | None, Tensor | None]:
    """Return the gradient with respect to x.

    If `mean` (C,) is given, also return the sums Σ h and Σ h · (x - mean), each (C,). h is the gradient of x · scale +
    shift. If `scale` and `shift` (C,) are given, x must have the channels-last format.
    """
    g_x = torch.empty_like(x)
    g = g if g.stride() == x.stride() else torch.empty_like(x).copy_(g)
    if scale is None or shift is None:
        _run(_kernels().backward(False, False), x, _AT_A_TIME, [g, x, g_x])
        return g_x, None, None
    n = len(scale)
    if mean is None:
        _run(_kernels().backward(True, False), x, _AT_A_TIME // n, [g, x, g_x, scale, shift], n)
        return g_x, None, None
    rows = x.numel() // n
    at_a_time = -(-rows // _PIECES)
    sums = x.new_empty(2, -(-rows // at_a_time), n)
    _run(_kernels().backward(True, True), x, at_a_time, [g, x, g_x, scale, shift, mean, *sums], n)
    g_shift, g_scale = sums.sum(1)
    return g_x, g_shift, g_scale


def _run(kernel: Any, x: Tensor, at_a_time: int, tensors: list[Tensor], n: int = 1) -> None:
    rows, at_a_time = x.numel() // n, max(1, at_a_time)
    run_in_threads(kernel, [-(-rows // at_a_time), at_a_time, rows, n, *(t.data_ptr() for t in tensors)])
