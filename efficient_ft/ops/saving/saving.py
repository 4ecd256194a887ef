"""Functions that save packed tensors for the backward pass of an autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.mode import PackedOperations
from efficient_ft.ops.storage import Packed, Packer


def save(ctx: Any, *parts: Tensor | Packed | None) -> None:
    """Save packed and dense tensors for the backward pass. All tensors are saved with ``save_for_backward``."""
    flat: list[Tensor | None] = []
    ctx.parts = []
    for part in parts:
        tensors = part.tensors if isinstance(part, Packed) else (part,)
        ctx.parts.append((len(tensors), part.unpack if isinstance(part, Packed) else None))
        flat += tensors
    ctx.save_for_backward(*flat)


def load(ctx: Any, one_by_one: bool = False) -> list[Any]:
    """Return the unpacked arguments of `save` in the same order.

    If `one_by_one` is True, packed arguments are returned as functions that unpack them. The caller can then unpack one
    tensor at a time, so that not all tensors are in memory at once.
    """
    saved, at, parts = ctx.saved_tensors, 0, []
    for count, unpack in ctx.parts:
        tensors = saved[at : at + count]
        if unpack is None:
            parts.append(tensors[0])
        else:
            parts.append(partial(unpack, *tensors) if one_by_one else unpack(*tensors))
        at += count
    return parts


class _StraightThrough(torch.autograd.Function):
    """Identity function that packs and unpacks x, and returns the gradient unchanged in the backward pass."""

    @staticmethod
    def forward(
        ctx: Any, mode: PackedOperations, x: Tensor, packer: Packer, dtype: torch.dtype | None, heads: int | None
    ) -> Tensor:
        kept = mode.keep(x, packer, dtype, heads)
        y = kept.shared.in_forward(kept.unpack, *kept.tensors)
        kept.shared.users -= 1  # `_StraightThrough` does not save x
        mode.set_source(y, kept)  # operations that save y reuse the packed tensor
        ctx.type = x.dtype
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        return None, g.to(ctx.type), None, None, None


def as_kept(
    mode: PackedOperations, x: Tensor, packer: Packer, needed: bool = True, heads: int | None = None, cast: bool = True
) -> Tensor:
    """Return x, which is packed and unpacked if `Policy.forward` is True (Back Razor, Figure 3: a negative control).

    `needed` is True if the operation saves x. `cast` is True if the operation converts x to the autocast dtype.
    """
    if not mode.policy.forward or not needed:
        return x
    device = x.device.type
    dtype = torch.get_autocast_dtype(device) if cast and torch.is_autocast_enabled(device) else None
    return _StraightThrough.apply(mode, x, packer, dtype, heads)
