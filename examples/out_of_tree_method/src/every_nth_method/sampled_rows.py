"""Method that computes the gradients of the first rows of each weight from every n-th token."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn.functional import linear

from efficient_ft.core.errors import SettingError
from efficient_ft.methods import Applied, Axis, Exactness, Method, ModelView, PlanCandidate, Reason, Skipped, register
from efficient_ft.methods.forwards import foreign_forward
from efficient_ft.methods.skip import is_skipped, refuse_skip
from efficient_ft.ops.autocast import autocast_disabled, to_autocast_dtype


class _SampledLinear(torch.autograd.Function):
    """Linear operation that computes the gradient of the first `rows` weight rows from every `stride`-th token."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, rows: int, stride: int) -> Tensor:
        # Only tensors that are saved here are counted. All sizes are derived from shapes to support fake tensors.
        sampled = x[:, ::stride].contiguous() if ctx.needs_input_grad[1] else None
        ctx.save_for_backward(sampled, weight if ctx.needs_input_grad[0] else None)
        ctx.rows, ctx.stride = rows, stride
        with autocast_disabled(x):
            return linear(x, weight, bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        g_x = None if weight is None else g @ weight
        g_w = None
        if x is not None:
            g_rows = g[:, :: ctx.stride, : ctx.rows].flatten(0, 1)
            scale = g.shape[1] / x.shape[1]
            g_w = x.new_zeros(g.shape[2], x.shape[2])
            g_w[: ctx.rows] = scale * (g_rows.T @ x.flatten(0, 1))
        g_b = g.sum((0, 1)) if ctx.needs_input_grad[2] else None
        return g_x, g_w, g_b, None, None


class SampledLinear(nn.Linear):
    """`nn.Linear` that uses `_SampledLinear` in training. The method sets this class on existing layers."""

    sampled: tuple[int, int]

    def forward(self, x: Tensor) -> Tensor:
        if not (self.training and torch.is_grad_enabled() and self.weight.requires_grad and x.dim() == 3):
            return super().forward(x)
        return _SampledLinear.apply(*to_autocast_dtype(x, self.weight, self.bias), *self.sampled)


@register
class SampledRows(Method):
    """Compute the gradients of the first rows of each weight from every n-th token.

    Args:
        rows: fraction of the rows of each weight that receives a gradient, in (0, 1].
        stride: distance between two stored tokens. If `stride` is 1, all tokens are stored.
        skip: substrings of the names of layers whose gradients remain exact.

    Raises:
        SettingError: If an argument is outside of its range.
        UserError: If no linear layer of the model processes a sequence of tokens. Raised when the method is applied.
    """

    name = "sampled_rows"
    axis = Axis.BACKPROP
    other_axes = (Axis.MEMORY,)
    changes_weights = False
    candidates = (PlanCandidate({"rows": 1.0, "stride": 2}, Exactness.APPROXIMATE),)

    def __init__(self, rows: float = 0.5, stride: int = 2, skip: Sequence[str] | None = None) -> None:
        if not isinstance(rows, int | float) or isinstance(rows, bool) or not 0 < rows <= 1:
            raise SettingError("rows", rows, "a number in (0, 1]")
        if type(stride) is not int or stride < 1:
            raise SettingError("stride", stride, "an integer >= 1")
        refuse_skip(skip)
        self.rows, self.stride, self.skip = rows, stride, skip

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        chosen: dict[str, nn.Linear] = {}
        skipped: dict[str, Skipped] = {}
        for layer in view.layers:  # decide about every layer before the model is changed
            if layer.tokens is None:
                assert layer.why_not is not None
                skipped[layer.name] = layer.why_not
            elif layer.tokens.form != "tokens" or layer.reach is not None or type(layer.module) is not nn.Linear:
                skipped[layer.name] = Skipped(Reason.OTHER_FORM, "the layer is not an nn.Linear on tokens (B, N, C)")
            elif foreign_forward(layer.module) is not None:
                skipped[layer.name] = Skipped(Reason.OTHER_FORM, "the forward method of the layer has been replaced")
            elif is_skipped(layer.name, self.skip):
                skipped[layer.name] = Skipped(Reason.NOT_CHOSEN, f"left exact ({self.full_name('skip')})")
            else:
                chosen[layer.name] = layer.module
        for module in chosen.values():
            module.__class__ = SampledLinear
            module.sampled = math.ceil(self.rows * module.out_features), self.stride  # type: ignore[assignment]
        summary = (
            f"{len(chosen)} layers train {self.rows:.0%} of their rows with 1 of {self.stride} tokens" if chosen else ""
        )
        return Applied(self.name, tuple(chosen), skipped, summary=summary)

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            if isinstance(module, SampledLinear):
                del module.sampled
                module.__class__ = nn.Linear
