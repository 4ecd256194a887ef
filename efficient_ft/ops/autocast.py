"""Autocast helpers for custom autograd functions, whose inputs torch does not convert automatically."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def to_single_precision(x: Tensor) -> Tensor:
    """Convert x to float32 under autocast on CUDA, as torch does for normalizations and softmax."""
    if x.device.type == "cuda" and torch.is_autocast_enabled("cuda"):
        return x.float()
    return x


def compute_dtype(x: Tensor) -> torch.dtype:
    """Return the dtype in which a linear layer computes with x: the autocast dtype, or the dtype of x."""
    device = x.device.type
    return torch.get_autocast_dtype(device) if torch.is_autocast_enabled(device) else x.dtype


def to_autocast_dtype(x: Tensor, weight: Tensor, bias: Tensor | None) -> tuple[Tensor, Tensor, Tensor | None]:
    """Convert the inputs of a linear layer or convolution to the autocast dtype if autocast is enabled.

    Autograd converts the gradients back to the original dtypes.
    """
    device = x.device.type
    if not torch.is_autocast_enabled(device):
        return x, weight, bias
    dtype = torch.get_autocast_dtype(device)
    return x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype)


def autocast_disabled(like: Tensor) -> AbstractContextManager[Any]:
    """Disable autocast for the device type of `like` in a ``with`` block. Do nothing if autocast is not enabled."""
    kind = like.device.type
    enabled = torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind)
    return torch.autocast(kind, enabled=False) if enabled else nullcontext()


def current_autocast(device: str) -> Callable[[], AbstractContextManager[Any]]:
    """Return a function that re-enters the current autocast state of a device type at any time and in any thread."""
    if not torch.is_autocast_enabled(device):
        return nullcontext
    dtype, cache = torch.get_autocast_dtype(device), torch.is_autocast_cache_enabled()
    return lambda: torch.autocast(device, dtype, cache_enabled=cache)
