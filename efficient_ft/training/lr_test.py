"""A learning rate range test (Smith 2017, Section 3.3): train a few steps while the learning rate grows exponentially.

The test trains like a run: with the methods, the optimizer, its factors for the classifier and the layers, clipping,
precision and gradient accumulation of the configuration. It trains its own copy of the network, writes no run folder,
and restores the random state.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost.probe import undisturbed
from efficient_ft.data.loader import refuse_killed_worker
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.models import factory
from efficient_ft.record.lr_test import RangeTest, mean_around
from efficient_ft.training.balance import balance_classes
from efficient_ft.training.datamodule import (
    RunDataModule,
    refuse_missing_files,
    refuse_unusable,
    summaries,
    summary_text,
)
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.batch_size import (
    provisional,
    with_effective_batch_size,
    with_selected_batch_size,
)
from efficient_ft.training.memory.out_of_memory import out_of_memory
from efficient_ft.training.memory.watch import within_budget
from efficient_ft.training.module import FineTuner
from efficient_ft.training.output.console import quiet_lightning, say
from efficient_ft.training.precision import resolve_precision
from efficient_ft.training.processes import world_size
from efficient_ft.training.train import build_network, raise_signal
from efficient_ft.training.trainer import build_trainer, ends_step, on_device, use_channels_last

#: The test stops if the smoothed loss exceeds this multiple of the lowest smoothed loss.
DIVERGED = 2.0
#: Number of steps before the test can stop, because the average of the first losses is noisy.
LEAST_STEPS = 10


class _TestModule(FineTuner):
    """`FineTuner` that sets the learning rate of each step to the given rates and records the losses."""

    def __init__(self, *args: Any, rates: Sequence[float], progress: Callable[[int, float], None]) -> None:
        super().__init__(*args)
        self.rates, self.losses, self.ended = rates, list[float](), ""
        self._progress, self._micro, self._lowest = progress, list[Tensor](), math.inf

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        for group in self.trainer.optimizers[0].param_groups:
            group["lr"] = group["initial_lr"] / self.config.optim.lr * self.rates[len(self.losses)]

    def on_total_loss(self, loss: Tensor) -> None:
        self._micro.append(loss.detach())

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(outputs, batch, batch_idx)
        if not ends_step(self.trainer, batch_idx):
            return
        loss = float(torch.stack(self._micro).float().mean())
        self._micro.clear()
        rate = self.rates[len(self.losses)]
        if math.isfinite(loss):
            self.losses.append(loss)
            mean = mean_around(rate, self.rates[: len(self.losses)], self.losses)
            if len(self.losses) > LEAST_STEPS:
                self._lowest = min(self._lowest, mean)
            self._progress(len(self.losses), rate)
            if mean > DIVERGED * self._lowest:
                self.ended = f"The loss diverged at a learning rate of {rate:.2g}."
        else:
            self.ended = f"The loss was {loss} at a learning rate of {rate:.2g}."
        if self.ended or len(self.losses) == len(self.rates):
            self.trainer.should_stop = True


def range_test(
    config: Config,
    steps: int,
    lowest: float,
    highest: float,
    progress: Callable[[int, float], None] = lambda step, rate: None,
) -> RangeTest:
    """Train for at most `steps` optimizer steps with learning rates from `lowest` to `highest`.

    Args:
        config: the configuration of the run whose learning rate is tested. The test ignores `optim.lr`, the schedule
            and the warm-up.
        steps: number of optimizer steps.
        lowest: learning rate of the first step.
        highest: learning rate of the last step. The test stops earlier if the loss diverges.
        progress: function that is called after each step with the number of steps and the learning rate.

    Raises:
        UserError: If the data or weights are missing, or if a setting cannot be used.
    """
    if world_size(config) > 1:
        do = "The test runs in one process. To keep the number of samples per step, set trainer.grad_accum_steps."
        raise SettingError("trainer.devices", world_size(config), "1 with efficient-ft lr", do)
    if config.evaluate is not None or config.cost_only:
        name, value = ("evaluate", config.evaluate) if config.evaluate is not None else ("cost_only", "true")
        raise SettingError(
            name, value, "left out with efficient-ft lr", "The test trains the network. Remove this setting."
        )
    refuse_missing_files(config)
    quiet_lightning()
    device = on_device(config)
    config = with_effective_batch_size(resolve_precision(provisional(config), device))
    # Without evaluation, stored features and compilation, which do not change the training loss.
    options = config.trainer.model_copy(
        update={"limit_eval_batches": 0, "cache_features": "off", "compile": False, "progress": False}
    )
    config = config.model_copy(update={"trainer": options})
    rates = [lowest * (highest / lowest) ** (i / (steps - 1)) for i in range(steps)]
    cuda = [device] if device.type == "cuda" else []
    with undisturbed(cuda), within_budget(config, device), out_of_memory(config):
        module = _train(config, rates, progress)
    if not module.losses:
        raise UserError(f"{module.ended} No loss was finite, so no learning rate can be suggested. Check the data.")
    used = rates[: len(module.losses)]
    return RangeTest(used, module.losses, module.ended)


def _train(config: Config, rates: Sequence[float], progress: Callable[[int, float], None]) -> _TestModule:
    L.seed_everything(config.seed, verbose=False)
    data = kind_of(config).open(config, factory.input_of(config.model))
    config, *_ = with_selected_batch_size(config, data, None)
    found = summaries(data)
    refuse_unusable(config, found)
    say(summary_text(found))
    kind = kind_of(config)
    weights, task = balance_classes(config, kind.task, data), kind.task_on(config, data)
    per_epoch = -(-len(data.train_loader()) // config.trainer.grad_accum_steps)
    epochs = -(-len(rates) // max(per_epoch, 1))
    for part in data.parts.values():
        part.keep_decoded(epochs)
    network, methods = build_network(config, data)
    apply = MethodCallback(methods, frozen_bn=config.model.frozen_bn)
    trainer = build_trainer(config, Path(), methods, [apply], [], epochs)
    if use_channels_last(config, trainer.strategy.root_device):
        network.to(memory_format=torch.channels_last)
    module = _TestModule(network, config, data.num_classes, len(rates), weights, task, rates=rates, progress=progress)
    try:
        trainer.fit(module, datamodule=RunDataModule(data))
    except BaseException as error:
        refuse_killed_worker(error)
        raise_signal(trainer, error)
        raise
    return module
