"""Training on several data sets in turn. The network has a separate classifier for each data set."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from efficient_ft.config import Config, ModelConfig
from efficient_ft.config.kinds import SEVERAL
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import ImageData, RoundRobinData, class_count
from efficient_ft.data.opened import OpenedData
from efficient_ft.models.tasks import tasks_of
from efficient_ft.training.kinds.base import (
    UNKNOWN_CLASSES,
    Evaluated,
    Kind,
    Predictions,
    PredictOptions,
    RunData,
    Sample,
    Trained,
    settings_of_task,
)


class SeveralDataSets(Kind):
    """A kind of task for several data sets of the same kind. The optimizer steps use the data sets in turn."""

    rules = SEVERAL

    def __init__(self, kind: Kind) -> None:
        self._kind, self.task = kind, kind.task

    def open(self, config: Config, spec: InputSpec) -> RunData:
        parts: dict[str, ImageData] = {}
        for name, data in config.tasks.items():
            with settings_of_task(name):
                one: Any = self._kind.open(config.model_copy(update={"data": data, "tasks": {}}), spec)
                parts[name] = one
        return RoundRobinData(parts, config.trainer.grad_accum_steps)

    def classes(self, config: Config) -> dict[str, int]:
        return {name: class_count(data) or UNKNOWN_CLASSES for name, data in config.tasks.items()}

    def network(self, model: ModelConfig, classes: int | Mapping[str, int], *, report: bool = True) -> nn.Module:
        return self._kind.network(model, classes, report=report)

    def random_network(self, model: ModelConfig, classes: int | Mapping[str, int]) -> nn.Module:
        return self._kind.random_network(model, classes)

    def portable(self, config: Config, network: nn.Module) -> ModelConfig:
        return self._kind.portable(config, network)

    def evaluate(
        self,
        config: Config,
        model: nn.Module,
        data: RunData,
        device: torch.device,
        notes: Mapping[str, Any] = {},
    ) -> Evaluated:
        switch, each = tasks_of(model), {}
        assert switch is not None, "a network for several data sets must have one classifier for each data set"
        for name, part in data.parts.items():
            switch.active = name
            each[name] = self._kind.evaluate(config, model, part, device, notes)
        found = {name: one["accuracy"] for name, one in each.items()}
        return {"accuracy": mean_accuracies(found), "tasks": found, "each": each}

    def samples(self, trained: Trained, data: OpenedData[Any, Any], device: torch.device) -> list[Sample]:
        return self._kind.samples(trained, data, device)

    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        return self._kind.predictions(trained, options)

    def largest_batch(self, data: RunData) -> int | None:
        return None

    def smaller_inputs(self, config: Config) -> list[Config]:
        return self._kind.smaller_inputs(config)


def mean_accuracies(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """Return the accuracy averaged over the data sets, for each split that all data sets have."""
    splits = [s for s in ("val", "test") if all(s in of for of in found.values())]
    return {split: sum(of[split] for of in found.values()) / len(found) for split in splits}
