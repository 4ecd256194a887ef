"""Thread-local context for tensor packing, dropped tokens, recomputation and steps that only one process runs.

A value set with `set_context` applies to code that runs in the same thread inside the ``with`` block. On CUDA, autograd
runs the backward pass in separate threads, which begin with the default values. A forward pass that is recomputed in an
autograd thread enters its contexts again. State that is passed from one block of a model to the next is attached to
tensors instead (`efficient_ft.ops.tokens.attach_tokens`), so that recomputation restores the state.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Context(threading.local):
    """Fields of the context and their default values. Each thread has its own values.

    Attributes:
        packing: innermost packing mode (`efficient_ft.ops.saving.PackedOperations`), or None if tensors are not packed.
        tokens: tokens that the current layer receives (`efficient_ft.ops.tokens.Tokens`), or None if the layer receives
            all tokens.
        token_reduction_suspended: if True, blocks do not drop or merge tokens.
        local_only: if True, this process runs steps that other processes do not run, and `all_reduce_sum` returns its
            input.
        short_reports: if True, reports from `apply` omit notes, because some notes require the cost to be counted.
    """

    packing: Any = None
    tokens: Any = None
    token_reduction_suspended: bool = False
    local_only: bool = False
    short_reports: bool = False

    def __init__(self) -> None:
        # Attributes exist from the start. Setting a new attribute in compiled code would cause a recompilation.
        for field in type(self).__annotations__:
            setattr(self, field, getattr(type(self), field))


#: Context of the current thread.
context = Context()


@contextmanager
def set_context(field: str, value: Any) -> Iterator[None]:
    """Set a field of `context` inside a ``with`` block, and restore the previous value of the field at the end."""
    before = getattr(context, field)
    setattr(context, field, value)
    try:
        yield
    finally:
        setattr(context, field, before)


def is_recomputing() -> bool:
    """Return True inside a backward pass, where every forward pass is a recomputation (by this package or by torch)."""
    return torch._C._current_graph_task_id() != -1
