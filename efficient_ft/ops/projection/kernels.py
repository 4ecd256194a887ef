"""Passes over the tensors of the low-rank backward pass, which numba kernels or torch operations compute.

Each pass reads and writes every tensor once. In bfloat16, sums are computed in float32. All maps are (B, N, C) tensors.
The kernels are used for contiguous float32 and bfloat16 tensors on a CPU if numba is installed.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._C import _len_torch_dispatch_stack

from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.projection.projection import Projection
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

_ROWS = 16  # number of rows that a thread processes at a time

#: Functions that return the compiled kernels, or None if numba is not installed or cannot compile.
_kernels = partial(optional_module, "efficient_ft.ops.projection.numba_kernels")
_pooling = partial(optional_module, "efficient_ft.ops.projection.numba_pooling")


def supported(*tensors: Tensor) -> bool:
    """Return True if the kernels support the tensors. Modes that observe operations do not observe kernels."""
    return (
        all(
            type(t) in (Tensor, torch.nn.Parameter)  # a fake tensor has no data
            and t.device.type == "cpu"
            and t.dtype in (torch.float32, torch.bfloat16)
            and t.numel() > 0
            for t in tensors
        )
        and _len_torch_dispatch_stack() == 0
        and _kernels() is not None
    )


def project(
    x: Tensor,
    projection: Projection,
    dtype: torch.dtype,
    *,
    scale: Tensor | None = None,
    sums: bool = False,
    factor: Tensor | None = None,
    copies: bool = False,
) -> tuple[Tensor, Tensor | None, Tensor | None, Tensor | None]:
    """Compute the coefficients of x.

    Args:
        x: Map, (B, N, C).
        projection: Projection over the N tokens.
        dtype: Dtype of the coefficients.
        scale: Factor of the coefficients of each channel, (C,) or None.
        sums: If True, also compute Σ x over images and tokens.
        factor: If given, also compute Σ x · factor over images and tokens.
        copies: If True, also convert x to `dtype`.

    Returns:
        Coefficients (B, R, C), Σ x (C,), Σ x · factor (C,) and x in `dtype`. Tensors that are not required are None.
    """
    if not supported(x, *(() if factor is None else (factor,))) or dtype not in (torch.float32, torch.bfloat16):
        copy = x.to(dtype)
        exact = torch.promote_types(x.dtype, torch.float32)
        x_hat = projection.project(copy, projection.constants(x.device, dtype))
        return (
            x_hat if scale is None else (x_hat * scale).to(dtype),
            x.sum((0, 1), dtype=exact) if sums else None,
            None if factor is None else (x.to(exact) * factor).sum((0, 1)),
            copy if copies else None,
        )
    x = x.contiguous()
    batch, n = len(x), x.shape[2]
    x_hat = x.new_empty(batch, projection.rank, n, dtype=dtype)
    converts = copies and x.dtype != dtype
    copy = torch.empty_like(x, dtype=dtype) if converts else x
    of_sum, of_product = torch.empty(2, batch, n, dtype=torch.float32)
    sizes = x.element_size(), dtype.itemsize, 0 if factor is None else factor.element_size()
    kernel = _kernels().project(*sizes, scale is not None, sums, converts)
    factor_or_x = x if factor is None else factor.contiguous()
    tensors = [x, x_hat, x if scale is None else scale, copy, factor_or_x, of_sum, of_product]
    _run(kernel, projection, batch, n, ["analysis"], tensors)
    of_x, of_factor = of_sum.sum(0) if sums else None, None if factor is None else of_product.sum(0)
    return x_hat, of_x, of_factor, copy if copies else None


def back(x_hat: Tensor, projection: Projection, dtype: torch.dtype, add: Tensor | None = None) -> Tensor:
    """Compute tokens (B, N, C) from coefficients (B, R, C), plus the tensor `add`."""
    if not supported(x_hat, *(() if add is None else (add,))) or dtype not in (torch.float32, torch.bfloat16):
        x = projection.back(x_hat, projection.constants(x_hat.device, x_hat.dtype))
        return (x if add is None else add + x).to(dtype)
    batch, _, n = x_hat.shape
    x_hat = x_hat.contiguous()
    x = x_hat.new_empty(batch, projection.tokens, n, dtype=dtype)
    kernel = _kernels().back(x_hat.element_size(), x.element_size(), 0 if add is None else add.element_size())
    _run(kernel, projection, batch, n, ["synthesis"], [x_hat, x, x if add is None else add.contiguous()])
    return x


def activate(
    f: Tensor, scale: Tensor, shift: Tensor, projection: Projection, projects: bool
) -> tuple[Tensor, Tensor | None]:
    """Compute y = GELU(f · scale + shift), and the coefficients of y if `projects` is True.

    f is a map (B, N, C), and `scale` and `shift` are (C,).
    """
    if not supported(f):
        y = F.gelu(torch.addcmul(shift, f, scale)).to(f.dtype)
        return y, projection.project(y, projection.constants(f.device, f.dtype)) if projects else None
    f = f.contiguous()
    batch, _, n = f.shape
    y, y_hat = torch.empty_like(f), f.new_empty(batch, projection.rank, n) if projects else None
    kernel = _kernels().activate(f.element_size(), projects)
    _run(kernel, projection, batch, n, ["analysis"], [f, y, scale, shift, y if y_hat is None else y_hat])
    return y, y_hat


def activate_backward(
    g_hat: Tensor, f: Tensor, scale: Tensor, shift: Tensor, projection: Projection
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute the backward pass of `activate` between the low-rank gradients of y and f.

    Args:
        g_hat: Coefficients of the gradient of y before synthesis, (B, R, C).
        f, scale, shift: Inputs of `activate`.
        projection: Projection over the tokens.

    Returns:
        Coefficients of the gradient of f (B, R, C), and the gradients of scale and shift (C,).
    """
    if not supported(g_hat, f):
        constants = projection.constants(f.device, f.dtype)
        h = torch.ops.aten.gelu_backward(
            projection.back(g_hat, constants).to(scale.dtype), torch.addcmul(shift, f, scale)
        )
        out = projection.project((h * scale).to(f.dtype), constants)
        return out, (h * f).sum((0, 1)), h.sum((0, 1))
    f, g_hat = f.contiguous(), g_hat.contiguous()
    batch, _, n = f.shape
    out, sums = torch.empty_like(g_hat), torch.empty(2, batch, n, dtype=torch.float32)
    tensors = [f, g_hat, out, scale, shift, *sums]
    kernel = _kernels().activate_backward(f.element_size())
    _run(kernel, projection, batch, n, ["analysis", "synthesis"], tensors)
    of_scale, of_shift = sums.sum(1)
    return out, of_scale, of_shift


def add_affine(x: Tensor | None, f: Tensor, scale: Tensor, shift: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute x + f · scale + shift in `dtype` for maps (B, N, C). If x is None, compute f · scale + shift."""
    if x is None or x.dtype != dtype or not supported(x, f):
        y = torch.addcmul(shift, f, scale)
        return (y if x is None else x + y).to(dtype)
    x, f = x.contiguous(), f.contiguous()
    y = torch.empty_like(x)
    rows, n = x.numel() // x.shape[-1], x.shape[-1]
    numbers = [-(-rows // _ROWS), n, rows, *(t.data_ptr() for t in (x, f, y, scale, shift)), _ROWS]
    run_in_threads(_kernels().add_affine(x.element_size(), f.element_size()), numbers)
    return y


def mix(x: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """Compute x + scale · (mean of the 3 × 3 neighborhood of x - x) in `dtype`, for a map (B, H, W, C)."""
    if not supported(x):
        x_BCHW = x.permute(0, 3, 1, 2)
        mean = F.avg_pool2d(x_BCHW, 3, 1, 1, count_include_pad=False).permute(0, 2, 3, 1)
        return (x + (mean - x) * scale).to(dtype)
    x, y = x.contiguous(), torch.empty(x.shape, dtype=dtype)
    kernel = _pooling().mix(x.element_size(), y.element_size())
    run_in_threads(kernel, [*_shape(x), *(t.data_ptr() for t in (x, y, scale))])
    return y


def mix_backward(g: Tensor, x: Tensor, scale: Tensor) -> tuple[Tensor, Tensor]:
    """Compute the gradients of x (in the dtype of x) and scale of `mix`."""
    if not supported(g, x):
        pool = torch.ops.aten.avg_pool2d_backward
        g_BCHW, x_BCHW = g.permute(0, 3, 1, 2), x.permute(0, 3, 1, 2).to(g.dtype)
        h = pool(g_BCHW, x_BCHW, [3, 3], [1, 1], [1, 1], False, False, None).permute(0, 2, 3, 1) - g
        return (g + h * scale).to(x.dtype), (h * x).sum((0, 1, 2))
    g, g_x = g.contiguous(), torch.empty_like(x)
    of_scale = torch.empty(len(x), x.shape[3], dtype=torch.float32)
    kernel = _pooling().mix_backward(g.element_size(), g_x.element_size(), x.element_size())
    run_in_threads(kernel, [*_shape(x), *(t.data_ptr() for t in (g, g_x, scale, x, of_scale))])
    return g_x, of_scale.sum(0)


def _shape(x: Tensor) -> list[int]:
    return [len(x) * -(-x.shape[3] // _pooling().WIDTH), x.shape[3], x.shape[1], x.shape[2]]


def _run(kernel: Any, projection: Projection, batch: int, n: int, of: list[str], tensors: list[Tensor]) -> None:
    blocks = projection.blocks()
    constants = [blocks["table"], blocks["positions"], blocks["numbers"]]
    matrices = [blocks[name].data_ptr() for name in of]
    matrices.insert(1, blocks[of[0]].numel())
    jobs = batch * -(-n // _kernels().WIDTH)
    sizes = [jobs, n, projection.tokens, projection.rank, len(blocks["table"])]
    run_in_threads(kernel, [*sizes, *(t.data_ptr() for t in constants), *matrices, *(t.data_ptr() for t in tensors)])
