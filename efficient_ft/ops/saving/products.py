"""Linear layers, convolutions, products of two activations, and pooling."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.saving.saving import as_kept, load, save
from efficient_ft.ops.saving.table import packs

aten = torch.ops.aten


class _Linear(torch.autograd.Function):
    """Linear layer. g_x = g w and g_b are exact, and g_w = gᵀ x uses the unpacked x."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        used, kept_weight = mode.weight(weight)
        y = F.linear(x, used, bias)
        kept = mode.keep(x, mode.policy.product, y.dtype, -1) if ctx.needs_input_grad[2] else None
        save(ctx, kept, kept_weight if ctx.needs_input_grad[1] else None)
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = load(ctx)
        of_x, of_weight, of_bias = ctx.types
        g_rows = g.reshape(-1, g.shape[-1])
        g_w = None if x is None else (g_rows.T @ x.reshape(-1, x.shape[-1])).to(of_weight)
        g_b = g_rows.sum(0).to(of_bias) if ctx.needs_input_grad[3] else None
        g_x = None if weight is None else (g @ weight.to(g.dtype)).to(of_x)
        return None, g_x, g_w, g_b


@packs(F.linear)
def _linear(mode: PackedOperations, input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Any:
    if not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    input = as_kept(mode, input, mode.policy.product, weight.requires_grad, -1)
    return _Linear.apply(mode, input, weight, bias)


class _Conv2d(torch.autograd.Function):
    """Convolution, with gradients as in `_Linear`. If g_w is not required, only the shape of the input is saved."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, weight: Tensor, bias: Tensor | None, geometry: tuple[Any, ...]
    ) -> Tensor:
        used, kept_weight = mode.weight(weight)
        y = F.conv2d(x, used, bias, *geometry)
        kept = mode.keep(x, mode.policy.product, y.dtype) if ctx.needs_input_grad[2] else None
        save(ctx, kept, kept_weight)
        ctx.geometry, ctx.shape = geometry, x.shape
        ctx.types = x.dtype, weight.dtype, None if bias is None else bias.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = load(ctx)
        stride, padding, dilation, groups = ctx.geometry
        if x is None:
            x = g.new_empty(1).expand(ctx.shape)
        wanted = [ctx.needs_input_grad[i] for i in (1, 2, 3)]
        sizes = None if ctx.types[2] is None else [weight.shape[0]]
        found = aten.convolution_backward(
            g, x, weight.to(g.dtype), sizes, stride, padding, dilation, False, [0, 0], groups, wanted
        )
        return None, *(t.to(d) if w else None for t, d, w in zip(found, ctx.types, wanted, strict=True)), None


@packs(F.conv2d, torch.conv2d)
def _conv2d(
    mode: PackedOperations,
    input: Tensor,
    weight: Tensor,
    bias: Tensor | None = None,
    stride: Any = 1,
    padding: Any = 0,
    dilation: Any = 1,
    groups: int = 1,
) -> Any:
    if input.dim() != 4 or not mode.supports(input, trained=(weight, bias)):
        return NotImplemented
    stride, dilation = pair(stride), pair(dilation)
    if padding == "valid":
        padding = 0
    elif padding == "same":
        around = [d * (k - 1) for d, k in zip(dilation, weight.shape[2:], strict=True)]
        if any(total % 2 for total in around):
            return NotImplemented
        padding = [total // 2 for total in around]
    input = as_kept(mode, input, mode.policy.product, weight.requires_grad)
    return _Conv2d.apply(mode, input, weight, bias, (stride, pair(padding), dilation, groups))


def pair(value: int | Sequence[int]) -> list[int]:
    """Expand a setting of a convolution or pooling layer to both dimensions."""
    return [value, value] if isinstance(value, int) else [*value] * (3 - len(value))


class _Matmul(torch.autograd.Function):
    """The product of two activations (..., n, k) and (..., k, m)."""

    @staticmethod
    def forward(ctx: Any, mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
        y = a @ b
        packer = mode.policy.attention
        kept_a = mode.keep(a, packer, y.dtype, 1, role="a") if ctx.needs_input_grad[2] else None
        kept_b = mode.keep(b, packer, y.dtype, 1, role="b") if ctx.needs_input_grad[1] else None
        save(ctx, kept_b, kept_a)  # a is unpacked last, because the softmax that returned a uses it next
        ctx.types = a.dtype, b.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        b, a = load(ctx)
        g_a = None if b is None else (g @ b.mT).to(ctx.types[0])
        g_b = None if a is None else (a.mT @ g).to(ctx.types[1])
        return None, g_a, g_b


@packs(torch.bmm, Tensor.bmm)
def _bmm(mode: PackedOperations, input: Tensor, mat2: Tensor) -> Any:
    return matmul(mode, input, mat2)


@packs(torch.matmul, Tensor.matmul, Tensor.__matmul__)
def matmul(mode: PackedOperations, input: Tensor, other: Tensor) -> Any:
    """Multiply two activations with equal leading dimensions. Return NotImplemented for other tensors."""
    batched = input.dim() == other.dim() >= 3 and input.shape[:-2] == other.shape[:-2]
    if not batched or not mode.supports(input, other):
        return NotImplemented
    return product(mode, input, other)


def product(mode: PackedOperations, a: Tensor, b: Tensor) -> Tensor:
    """Multiply two activations (..., n, k) and (..., k, m). Both are packed with `Policy.attention`."""
    packer, of_a, of_b = mode.policy.attention, b.requires_grad, a.requires_grad
    return _Matmul.apply(mode, as_kept(mode, a, packer, of_a, 1), as_kept(mode, b, packer, of_b, 1))


class _AveragePool(torch.autograd.Function):
    """Average pooling. Its gradient requires only the shape of the input, although torch saves the input."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, function: Any, gradient: Any) -> Tensor:
        ctx.shape, ctx.gradient = x.shape, gradient
        return function(x)

    @staticmethod
    @once_differentiable
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
    """Maximum pooling. It saves one byte per output value: the position of the maximum in the window.

    torch saves the input, and an index of 8 bytes per output value.
    """

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
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        (position,) = ctx.saved_tensors
        width, stride, padding, dilation = ctx.window
        top, left = _corners(position, stride, padding)
        position = position.long()
        index = (top + position // width * dilation[0]) * ctx.shape[3] + left + position % width * dilation[1]
        g_x = g.new_zeros(*ctx.shape[:2], ctx.shape[2:].numel())
        g_x = g_x.scatter_add_(2, index.flatten(2), g.flatten(2)).view(ctx.shape)
        # g_x has the memory format of g, so that the layers below do not copy it.
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
