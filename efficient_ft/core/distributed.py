"""Sums over the processes that train together."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist
from torch import Tensor


class _Here(threading.local):
    alone: bool = False


_here = _Here()


@contextmanager
def alone() -> Iterator[None]:
    """Meanwhile this process takes steps that the others do not take, and may have ended: a cost is counted."""
    before, _here.alone = _here.alone, True
    try:
        yield
    finally:
        _here.alone = before


def summed(values: Tensor) -> Tensor:
    """Σ over all processes, the same in each of them; every one must call it. Of one process alone: `values`."""
    if _here.alone or not (dist.is_available() and dist.is_initialized()):
        return values
    # nccl knows no other tensors
    sums = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(sums)
    return sums
