"""Evaluate a network on the splits of a data set."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.data.opened import OpenedData
from efficient_ft.task import Task, moved
from efficient_ft.training.trainer import use_channels_last


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
    """Return the measures of a task.

    Args:
        task: loss and metric.
        model: moved to `device` and set to evaluation mode.
        loader: batches of (inputs, targets).
        classes: number of classes.
        device: evaluates.
        precision: ``fp32``, or the type of autocast: ``bf16``, ``fp16``.
        limit: number of batches; None: all.

    Raises:
        UserError: an output is not finite.
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
        half = f" It was evaluated with trainer.precision={precision}: try fp32." if dtype is not None else ""
        raise UserError(f"The network's outputs are not finite: its weights are of no use.{half}")
    return found.compute()


def split_scores(
    config: Config, task: Task, model: nn.Module, data: OpenedData[Any, Any], device: torch.device
) -> dict[str, dict[str, float]]:
    """Return the measures of one data set by split.

    Args:
        config: the configuration of the run; its precision and number of batches count.
        task: loss and metric.
        model: the network.
        data: the data set.
        device: evaluates.
    """
    options = config.trainer
    if use_channels_last(config, device):  # as in training
        model.to(memory_format=torch.channels_last)
    return {
        split: scores(
            task,
            model,
            data.eval_loader(split),
            data.num_classes,
            device,
            options.precision,
            options.limit_eval_batches,
        )
        for split in ("val", "test")
        if split in data.splits
    }
