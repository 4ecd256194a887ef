"""The number of this training process, and sums over all of them."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch.distributed as dist
from torch import Tensor

from efficient_ft.core.context import context, set_context


def local_only() -> AbstractContextManager[None]:
    """Make `all_reduce_sum` local inside a ``with`` block.

    For steps that one process takes and the others do not, or when they may have ended: counting the cost of a step.
    """
    return set_context("local_only", True)


def rank() -> int:
    """Return the number of this process; 0 without a process group."""
    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def all_reduce_sum(values: Tensor) -> Tensor:
    """All-reduce (sum). Collective: every process must call it.

    Args:
        values: of any shape, the same in all processes; not changed.

    Returns:
        The sum over all processes, on CUDA with the nccl backend. `values` itself without a process group, or inside
        `local_only`.
    """
    if context.local_only or not (dist.is_available() and dist.is_initialized()):
        return values
    # nccl reduces CUDA tensors only
    sums = values.cuda() if dist.get_backend() == "nccl" else values.clone()
    dist.all_reduce(sums)
    return sums
