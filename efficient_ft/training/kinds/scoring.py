"""Evaluate a network on one split of a data set."""

from __future__ import annotations

from contextlib import nullcontext

import torch
from torch import nn
from torch.utils.data import DataLoader

from efficient_ft.core.errors import UserError
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.task import Task, moved


@torch.inference_mode()
def scores(
    task: Task,
    model: nn.Module,
    loader: DataLoader,
    classes: int,
    device: torch.device,
    precision: str,
    limit: int | None = None,
) -> dict[str, float]:
    """Return the metrics of a task.

    Args:
        task: the task, which defines loss and metrics.
        model: the network, which is moved to `device` and set to evaluation mode.
        loader: batches of (inputs, targets).
        classes: number of classes.
        device: the device that evaluates.
        precision: ``fp32``, or the autocast type ``bf16`` or ``fp16``.
        limit: maximum number of batches; None for all.

    Raises:
        UserError: If an output is not finite.
    """
    model.eval().to(device)
    found = task.scores(classes, local=True).to(device)  # other processes of the run may have ended
    dtype = AUTOCAST[precision]
    finite = torch.ones((), dtype=torch.bool, device=device)
    for number, (inputs, targets) in enumerate(loader):
        if number == limit:
            break
        with torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext():
            logits = task.evaluation_logits(model, moved(inputs, device))
        finite &= logits.isfinite().all()
        found.update(logits.float(), targets.to(device, non_blocking=True))
    if not finite:
        half = f" Try fp32 instead of trainer.precision={precision}." if dtype is not None else ""
        raise UserError(f"The network's outputs are not finite, so its weights cannot be used.{half}")
    return found.compute()
