"""The Lightning Trainer of a run."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Method
from efficient_ft.record.environment import device_name
from efficient_ft.training.bf16_units import bf16_is_emulated
from efficient_ft.training.output import checkpoint
from efficient_ft.training.processes import environment, world_size

log = logging.getLogger(__name__)

_PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def build_trainer(
    config: Config,
    folder: Path,
    methods: Sequence[Method],
    callbacks: list[L.Callback],
    loggers: list[Logger],
    epochs: int,
) -> L.Trainer:
    """Build the Trainer for `config.trainer`. Lightning calls the callbacks in the given order.

    Raises:
        UserError: If the accelerator, the devices or the precision are not available on this machine.
    """
    options = config.trainer
    # DDP must accept that frozen layers and the classifiers of other tasks receive no gradient in some steps.
    unused = bool(config.tasks) or any(getattr(m, "find_unused_parameters", False) for m in methods)
    ddp = options.strategy == "ddp" or world_size(config) > 1
    strategy = "ddp_find_unused_parameters_true" if unused and ddp else options.strategy
    try:
        trainer = L.Trainer(
            accelerator=options.accelerator,
            devices=options.devices,
            num_nodes=options.num_nodes,
            strategy=strategy,
            precision=_PRECISION[options.precision],
            max_epochs=epochs,
            accumulate_grad_batches=options.grad_accum_steps,
            gradient_clip_val=config.optim.grad_clip_norm,
            limit_val_batches=options.limit_eval_batches,
            deterministic=options.deterministic,
            num_sanity_val_steps=0,
            callbacks=callbacks,
            plugins=[checkpoint.AtomicCheckpointIO(), environment()],
            logger=loggers or False,
            use_distributed_sampler=False,  # the sampler of the run handles ranks and resuming
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise UserError(
            f"trainer.accelerator={options.accelerator}, trainer.devices={options.devices} and"
            f" trainer.precision={options.precision} are not available on this machine: {error}"
        ) from error
    if options.precision == "fp16" and trainer.strategy.root_device.type == "cpu":
        raise SettingError("trainer.precision", "fp16", "fp32 or bf16 on a CPU")
    device = trainer.strategy.root_device
    if options.precision == "bf16" and trainer.is_global_zero and bf16_is_emulated(device):
        log.warning(
            "The run trains in bf16, but the device %s has no bfloat16 instructions, so PyTorch emulates them. Steps"
            " can take much longer than with fp32 (16 times as long for DeiT-Tiny on an AMD EPYC with AVX2).",
            device_name(device),
        )
    return trainer


def ends_step(trainer: L.Trainer, batch_idx: int) -> bool:
    """Return True if the optimizer steps after this micro-batch. The last step of an epoch may have fewer of them."""
    return (batch_idx + 1) % trainer.accumulate_grad_batches == 0 or batch_idx + 1 == trainer.num_training_batches


def use_channels_last(config: Config, device: torch.device) -> bool:
    """Return `trainer.channels_last`. If this setting is None, return True on a CPU and False on other devices."""
    chosen = config.trainer.channels_last
    return device.type == "cpu" if chosen is None else chosen


def on_device(config: Config) -> torch.device:
    """Return the device on which a run trains, without building a Trainer."""
    chosen = config.trainer.accelerator
    if chosen in ("auto", "gpu") and torch.cuda.is_available():
        return torch.device("cuda")
    if chosen in ("auto", "mps") and torch.backends.mps.is_available():
        return torch.device("mps")
    return torch.device("cpu")
