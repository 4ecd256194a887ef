"""Functions that save packed tensors for the backward pass of an autograd function."""

from __future__ import annotations

from functools import partial
from typing import Any

from torch import Tensor

from efficient_ft.ops.storage import Packed


def save(ctx: Any, *parts: Tensor | Packed | None) -> None:
    """Save packed and dense tensors for the backward pass, all through ``save_for_backward``."""
    flat: list[Tensor | None] = []
    ctx.parts = []
    for part in parts:
        tensors = part.tensors if isinstance(part, Packed) else (part,)
        ctx.parts.append((len(tensors), part.unpack if isinstance(part, Packed) else None))
        flat += tensors
    ctx.save_for_backward(*flat)


def load(ctx: Any, one_by_one: bool = False) -> list[Any]:
    """Return the arguments of `save` in the same order, unpacked.

    With `one_by_one`, return packed arguments as functions that unpack them, so that not all are in memory at once.
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
