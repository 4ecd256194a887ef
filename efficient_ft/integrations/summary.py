"""Text that ``print(session)`` prints."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from torch import nn

from efficient_ft.core.errors import first_line
from efficient_ft.core.format import format_bytes, format_number
from efficient_ft.methods.base import Method
from efficient_ft.methods.summary import trained

if TYPE_CHECKING:
    from efficient_ft.cost.executed import Executed


def summary(model: nn.Module, methods: Sequence[Method], saved: Sequence[str], count: Callable[[], Executed]) -> str:
    """Return three lines that describe the trainable parameters, the memory and the FLOPs.

    `saved` contains the names of the tensors that `MethodSession.save` writes. `count` is a function that returns the
    cost of a training step.
    """
    tensors, names = model.state_dict(), ", ".join(method.name for method in methods)
    part = format_bytes(sum(tensors[name].nbytes for name in saved))
    head = f"trainable: {trained(model)} ({names}); save() writes {part}"
    try:
        cost = count()
    except Exception as error:  # an error in a summary must not interrupt training
        why = f"not counted ({first_line(error)}). Call session.cost() with the input size and the task."
        return f"{head}\nmemory: {why}\nFLOPs: {why}"
    kept, peak = format_bytes(cost.saved_bytes), format_bytes(cost.peak_bytes)
    forward, backward = format_number(cost.forward_flops), format_number(cost.backward_flops)
    return (
        f"{head}\nmemory: {kept} kept per image for the backward pass; peak {peak} with {cost.batch_size} images\n"
        f"FLOPs: {forward} forward and {backward} backward per image"
    )
