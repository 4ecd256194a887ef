"""Thread-local context of the running code: packing, tokens, recomputation, local-only execution.

A value set here holds for code that the same thread runs inside the ``with`` block, not for other threads. Autograd
runs the backward pass on CUDA in threads of its own, which start from the defaults; a forward pass that is recomputed
there enters its contexts again. State that has to travel from block to block of a model does not belong here: it is
attached to the tensors (`efficient_ft.ops.tokens.attach_tokens`), so that recomputation replays it.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch


class Context(threading.local):
    """The fields and their defaults, one set for each thread.

    Attributes:
        packing: the innermost packing mode (`efficient_ft.ops.saving.PackedOperations`); None: no mode is entered.
        tokens: the record (`efficient_ft.ops.tokens.Tokens`) of the tokens that the current layer takes; None: all.
        token_reduction_suspended: blocks neither drop nor merge tokens.
        local_only: this process takes steps that the other processes do not take.
        short_reports: reports of `apply` leave out what has to be counted for them.
    """

    packing: Any = None
    tokens: Any = None
    token_reduction_suspended: bool = False
    local_only: bool = False
    short_reports: bool = False


#: The fields of the current thread.
context = Context()


@contextmanager
def set_context(field: str, value: Any) -> Iterator[None]:
    """Set one field of `context`, and restore its value at the end."""
    before = getattr(context, field)
    setattr(context, field, value)
    try:
        yield
    finally:
        setattr(context, field, before)


def is_recomputing() -> bool:
    """Return True while a forward pass runs inside backward (recomputation, by this package or by torch)."""
    return torch._C._current_graph_task_id() != -1
