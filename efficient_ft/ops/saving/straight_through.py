"""A negative control: the forward pass, too, computes with the packed tensors (Back Razor, Figure 3)."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.storage import Packer


class _StraightThrough(torch.autograd.Function):
    """Pack and unpack x; the gradient is passed on unchanged."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, packer: Packer, dtype: torch.dtype | None, heads: int | None
    ) -> Tensor:
        kept = mode.keep(x, packer, dtype, heads)
        y = kept.shared.in_forward(kept.unpack, *kept.tensors)
        kept.shared.users -= 1  # nothing is saved here
        mode.set_source(y, kept)  # an operation that saves y saves nothing more
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
    """Return x; with `Policy.forward`, packed and unpacked.

    Args:
        mode: the packing mode.
        x: the input of an operation.
        packer: of x.
        needed: the operation keeps x.
        heads: see `PackedOperations.keep`.
        autocast: the operation takes x in autocast's dtype.
    """
    if not mode.policy.forward or not needed:
        return x
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if autocast and torch.is_autocast_enabled(device) else None
    return _StraightThrough.apply(mode, x, packer, dtype, heads)
