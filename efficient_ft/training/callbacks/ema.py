"""Exponential moving average (EMA) of the trained weights of a run (the setting ``trainer.ema``).

`timm.utils.ModelEmaV3` and `torch.optim.swa_utils.AveragedModel` copy the whole network. Methods freeze most of the
network, so this module keeps copies only of the tensors that training changes.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import lightning.pytorch as L
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.optim.swa_utils import get_ema_multi_avg_fn

from efficient_ft.config import Config, OptimConfig
from efficient_ft.models.frozen_batch_norm import frozen_layers
from efficient_ft.training.optimizer import build_optimizer

#: Exponent of the warm-up, which is timm's default.
_POWER = 2 / 3


def averaged_tensors(network: nn.Module) -> dict[str, Tensor]:
    """Return the tensors that training changes: parameters that require gradients, and live BatchNorm statistics.

    Call this function between steps, because methods freeze parameters within a step.
    """
    frozen = set(frozen_layers(network))
    found: dict[str, Tensor] = {name: p for name, p in network.named_parameters() if p.requires_grad}
    for name, module in network.named_modules():
        if isinstance(module, _BatchNorm) and module.running_mean is not None and name not in frozen:
            assert module.running_var is not None
            found |= {f"{name}.running_mean": module.running_mean, f"{name}.running_var": module.running_var}
    return found


def ema_bytes(network: nn.Module, decay: float | None) -> int:
    """Return the size of the averages in bytes, or 0 if `decay` is None. The averages are stored in float32."""
    return 0 if decay is None else 4 * sum(t.numel() for t in averaged_tensors(network).values())


def ema_decay(decay: float, updates: int) -> float:
    """Return the decay of an update after `updates` earlier updates.

    The decay increases from 0 to `decay`, as in timm's ``ModelEmaV3`` with ``use_warmup=True``, so that the average
    does not depend on the initial weights.
    """
    return min(decay, 1 - (1 + updates) ** -_POWER)


class RunOptimizer:
    """Callable that builds the optimizer of a run for a counted step, and counts the averaged weights of this step.

    Args:
        config: configuration of the run.
        optim: settings of the optimizer, or None for those of the run.

    Attributes:
        average_bytes: size of the averaged weights in bytes, or 0 before the call and without averages.
    """

    average_bytes = 0

    def __init__(self, config: Config, optim: OptimConfig | None = None) -> None:
        self._optim, self._trainer = optim or config.optim, config.trainer

    def __call__(self, model: nn.Module) -> torch.optim.Optimizer:
        self.average_bytes = ema_bytes(model, self._trainer.ema)
        return build_optimizer(model, self._optim, self._trainer.precision)


class WeightAverage(L.Callback):
    """Callback that averages the trained weights after each optimizer step, and evaluates the averaged weights.

    During an evaluation, the network has the averaged weights. `applied` does the same for other code. Checkpoints
    contain the weights and the averages. The averages are stored in float32, even if weights are stored in bfloat16.
    Place this callback after `MethodCallback`, and before callbacks that write checkpoints.

    Args:
        decay: maximum decay of the average.
    """

    def __init__(self, decay: float) -> None:
        self._decay = decay
        self._updates = 0
        self._step = 0  # number of the last optimizer step whose weights are included in the averages
        self._tensors: dict[str, Tensor] = {}
        self._averages: dict[str, Tensor] = {}
        #: During an evaluation, the weights that are stored in another data type than their averages.
        self._weights: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        """Copy the trained weights, or move the averages of a checkpoint to the device of the weights."""
        self._tensors = averaged_tensors(pl_module.get_submodule("model"))
        loaded, self._step = self._averages, trainer.global_step
        assert not loaded or loaded.keys() == self._tensors.keys(), "the checkpoint contains the averages of this run"
        self._averages = {
            name: loaded.get(name, t).detach().to(t.device, torch.float32, copy=True)
            for name, t in self._tensors.items()
        }

    @torch.no_grad()
    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if trainer.global_step == self._step:  # the optimizer has not stepped yet, because gradients are accumulated
            return
        self._step = trainer.global_step
        update: Any = get_ema_multi_avg_fn(ema_decay(self._decay, self._updates))
        same = [name for name, t in self._tensors.items() if t.dtype == torch.float32]
        if same:
            update([self._averages[name] for name in same], [self._tensors[name] for name in same], None)
        for name in self._tensors.keys() - same:  # one tensor at a time, because each is converted to float32
            update([self._averages[name]], [self._tensors[name].float()], None)
        self._updates += 1

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap()

    def on_validation_end(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._swap()

    @contextmanager
    def applied(self) -> Iterator[None]:
        """Return a context manager in which the network has the averaged weights."""
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        """Exchange the weights and the averages. Only one further tensor exists at a time, except for bfloat16."""
        back = bool(self._weights)
        for name, tensor in self._tensors.items():
            average = self._averages[name]
            if tensor.dtype != average.dtype:  # the average would be rounded, so it stays where it is
                if not back:
                    self._weights[name] = tensor.clone()
                tensor.copy_(self._weights[name] if back else average)
                continue
            before = tensor.clone()
            tensor.copy_(average)
            average.copy_(before)
        if back:
            self._weights = {}

    def state_dict(self) -> dict[str, Any]:
        return {"updates": self._updates, "averages": dict(self._averages)}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._updates, self._averages = state_dict["updates"], dict(state_dict["averages"])
