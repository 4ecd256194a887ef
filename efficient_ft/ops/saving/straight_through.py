"""A negative control: the forward pass also computes with the packed tensors (Back Razor, Figure 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.storage import Packer


class _StraightThrough(torch.autograd.Function):
    """Pack and unpack x, and pass the gradient on unchanged."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, packer: Packer, dtype: torch.dtype | None, heads: int | None
    ) -> Tensor:
        kept = mode.keep(x, packer, dtype, heads)
        y = kept.shared.in_forward(kept.unpack, *kept.tensors)
        kept.shared.users -= 1  # this function saves nothing
        mode.set_source(y, kept)  # operations that save y reuse the packed tensor
        ctx.type = x.dtype
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, g.to(ctx.type), None, None, None


def as_kept(
    mode: PackedOperations,
    x: Tensor,
    packer: Packer,
    needed: bool = True,
    heads: int | None = None,
    autocast: bool = True,
) -> Tensor:
    """Return x, or with `Policy.forward` the packed and unpacked x.

    Args:
        mode: the packing mode.
        x: the input of an operation.
        packer: the packer of x.
        needed: True if the operation saves x.
        heads: see `PackedOperations.keep`.
        autocast: True if the operation converts x to autocast's dtype.
    """
    if not mode.policy.forward or not needed:
        return x
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if autocast and torch.is_autocast_enabled(device) else None
    return _StraightThrough.apply(mode, x, packer, dtype, heads)
