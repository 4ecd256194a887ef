"""Backward passes that cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate a backward pass whose result cannot be differentiated again.

    The errors are those of ``once_differentiable``. Without ``create_graph``, autograd already disables gradients, so
    that the decorator adds almost no overhead.
    """
    checked = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *g: Any) -> Any:
        return checked(ctx, *g) if torch.is_grad_enabled() else backward(ctx, *g)

    return call
