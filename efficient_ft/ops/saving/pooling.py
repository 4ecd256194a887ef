"""Average and maximum pooling."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.saving.products import pair
from efficient_ft.ops.saving.table import packs

aten = torch.ops.aten


class _AveragePool(torch.autograd.Function):
    """Average pooling that saves only the shape of the input, whereas torch saves the input itself."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, gradient: Any) -> Tensor:
        ctx.shape, ctx.gradient = x.shape, gradient
        return function(x)

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return ctx.gradient(g, g.new_empty(1).expand(ctx.shape)), None, None


@packs(F.avg_pool2d)
def _avg_pool2d(
    mode: PackedOperations,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    ceil_mode: bool = False,
    count_include_pad: bool = True,
    divisor_override: int | None = None,
) -> Any:
    if not mode.supports(input):
        return NotImplemented
    kernel = pair(kernel_size)
    step = kernel if stride is None else pair(stride)
    settings = kernel, step, pair(padding), ceil_mode, count_include_pad, divisor_override
    return _AveragePool.apply(
        input, lambda x: F.avg_pool2d(x, *settings), lambda g, like: aten.avg_pool2d_backward(g, like, *settings)
    )


@packs(F.adaptive_avg_pool2d)
def _adaptive_avg_pool2d(mode: PackedOperations, input: Tensor, output_size: Any) -> Any:
    if not mode.supports(input):
        return NotImplemented
    function = partial(F.adaptive_avg_pool2d, output_size=output_size)
    return _AveragePool.apply(input, function, aten._adaptive_avg_pool2d_backward)


class _MaxPool2d(torch.autograd.Function):
    """Maximum pooling that saves one byte per output (the position in the window) instead of input and index."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, kernel: list[int], stride: list[int], padding: list[int], dilation: list[int], ceil: bool
    ) -> Tensor:
        y, index = aten.max_pool2d_with_indices(x, kernel, stride, padding, dilation, ceil)
        ctx.shape, ctx.window = x.shape, (kernel[1], stride, padding, dilation)
        top, left = _corners(index, stride, padding)
        row, column = (index // x.shape[3] - top) // dilation[0], (index % x.shape[3] - left) // dilation[1]
        ctx.save_for_backward((row * kernel[1] + column).to(torch.uint8))
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (position,) = ctx.saved_tensors
        width, stride, padding, dilation = ctx.window
        top, left = _corners(position, stride, padding)
        position = position.long()
        index = (top + position // width * dilation[0]) * ctx.shape[3] + left + position % width * dilation[1]
        g_x = g.new_zeros(*ctx.shape[:2], ctx.shape[2:].numel())
        g_x = g_x.scatter_add_(2, index.flatten(2), g.flatten(2)).view(ctx.shape)
        # g_x has the memory format of g, so that earlier layers do not have to copy g_x.
        g_x = g_x if g.is_contiguous() else g_x.contiguous(memory_format=torch.channels_last)
        return g_x, None, None, None, None, None


def _corners(output: Tensor, stride: list[int], padding: list[int]) -> tuple[Tensor, Tensor]:
    """Return the first row (H, 1) and the first column (W,) of each window for an output (B, C, H, W)."""
    rows, columns = (
        torch.arange(n, device=output.device) * s - p for n, s, p in zip(output.shape[2:], stride, padding, strict=True)
    )
    return rows[:, None], columns


@packs(F.max_pool2d, torch.max_pool2d)
def _max_pool2d(
    mode: PackedOperations,
    input: Tensor,
    kernel_size: Any,
    stride: Any = None,
    padding: Any = 0,
    dilation: Any = 1,
    ceil_mode: bool = False,
    return_indices: bool = False,
) -> Any:
    kernel = pair(kernel_size)
    if return_indices or input.dim() != 4 or kernel[0] * kernel[1] > 256 or not mode.supports(input):
        return NotImplemented
    step = kernel if stride is None or stride == [] else pair(stride)
    return _MaxPool2d.apply(input, kernel, step, pair(padding), pair(dilation), ceil_mode)
