"""Rank of this training process, and sums over all processes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from efficient_ft.core.context import context, set_context


def local_only() -> AbstractContextManager[None]:
    """Make `all_reduce_sum` local in a ``with`` block, for steps that only one process takes (such as a cost count)."""
    return set_context("local_only", True)


def rank() -> int:
    """Return the rank of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """All-reduce (sum). Collective: every process must call it.

    Args:
        values: tensor whose shape is the same in all processes; it is not changed.

    Returns:
        The sum over all processes, on CUDA with the nccl backend. Without a process group or in `local_only`, `values`.
    """
    if context.local_only or not (dist.is_available() and dist.is_initialized()):
        return values
    # nccl only reduces CUDA tensors.
    sums = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(sums)
    return sums
