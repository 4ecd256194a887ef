"""Backward passes that cannot be differentiated again."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def first_order(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the backward pass of an autograd function that cannot be differentiated.

    Like ``once_differentiable``, but without its overhead if gradients are not recorded.
    """
    checked = once_differentiable(backward)

    @functools.wraps(backward)
    def call(ctx: Any, *g: Any) -> Any:
        return checked(ctx, *g) if torch.is_grad_enabled() else backward(ctx, *g)

    return call
