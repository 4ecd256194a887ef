"""Thread-local context for packing, tokens, recomputation and local execution.

A value that is set here applies to code that the same thread runs in the ``with`` block. On CUDA, autograd runs the
backward pass in separate threads with default values, and a recomputed forward pass enters its contexts again. State
that moves from block to block of a model is attached to tensors instead (`efficient_ft.ops.tokens.attach_tokens`), so
that recomputation restores it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Context(threading.local):
    """Fields of a thread, with their defaults.

    Attributes:
        packing: innermost packing mode (`efficient_ft.ops.saving.PackedOperations`); None: no packing.
        tokens: record (`efficient_ft.ops.tokens.Tokens`) of the current layer's input tokens; None: all tokens.
        token_reduction_suspended: if True, blocks do not drop or merge tokens.
        local_only: if True, this process takes steps that the other processes do not take.
        short_reports: if True, reports from `apply` omit values that must be counted.
    """

    packing: Any = None
    tokens: Any = None
    token_reduction_suspended: bool = False
    local_only: bool = False
    short_reports: bool = False


#: Fields of the current thread.
context = Context()


@contextmanager
def set_context(field: str, value: Any) -> Iterator[None]:
    """Set one field of `context` in the ``with`` block, and restore its previous value at the end."""
    before = getattr(context, field)
    setattr(context, field, value)
    try:
        yield
    finally:
        setattr(context, field, before)


def is_recomputing() -> bool:
    """Return True while a forward pass runs inside backward (recomputation, by this package or by torch)."""
    return torch._C._current_graph_task_id() != -1
