"""Functions that return the rank of this training process and sum tensors over all processes."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from efficient_ft.core.context import context, set_context


def local_only() -> AbstractContextManager[None]:
    """Make `all_reduce_sum` return its input inside a ``with`` block, for steps that only one process runs."""
    return set_context("local_only", True)


def rank() -> int:
    """Return the rank of this process, or 0 if there is no process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """Sum a tensor over all processes (all-reduce). Every process must call this function.

    Args:
        values: tensor with the same shape in all processes. The tensor is not modified.

    Returns:
        The sum over all processes. The sum is on a CUDA device if the backend is nccl. Without a process group or
        inside `local_only`, `values` is returned.
    """
    if context.local_only or not (dist.is_available() and dist.is_initialized()):
        return values
    # nccl supports only CUDA tensors.
    sums = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(sums)
    return sums
