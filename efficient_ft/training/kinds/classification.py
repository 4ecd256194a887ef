"""Image classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from efficient_ft.config import Config, ModelConfig
from efficient_ft.config.kinds import RULES
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data import Transform, open_data
from efficient_ft.models import factory
from efficient_ft.models.loading_report import loading_report
from efficient_ft.models.transformers_classifier import companions, portable
from efficient_ft.task import TASKS, Inputs
from efficient_ft.training.kinds.base import PredictOptions, RunData, Trained
from efficient_ft.training.kinds.classes import ClassKind
from efficient_ft.training.kinds.files import Item, image_files
from efficient_ft.training.kinds.registry import register
from efficient_ft.training.output.console import say


class ClassificationKind(ClassKind):
    """Image classification, with one class per image."""

    rules, task = RULES["classification"], TASKS["classification"]
    table_classes, fixed_batches, item_key = 100, True, "path"

    def open(self, config: Config, spec: InputSpec) -> RunData:
        return open_data(config.data, spec, config.seed)

    def check_network(self, network: nn.Module, data: RunData) -> None:
        report, names = loading_report(network), data.class_names
        if report is None or not report.kept or not isinstance(names, list | tuple):
            return
        about: Any = network.config
        own = list((about.id2label or {}).values())
        if sorted(own) == sorted(names) and own != list(names):
            say("warning: The classifier of the weights has the same classes as the data, but in a different order.")

    def portable(self, config: Config, network: nn.Module) -> ModelConfig:
        return config.model if config.model.library is None else portable(config.model, network)

    def companions(self, config: Config, network: nn.Module, data: RunData) -> dict[str, str]:
        if config.model.library is None:
            return {}
        return companions(network, list(data.class_names), factory.input_of(config.model))

    def items(self, trained: Trained, options: PredictOptions) -> list[Item]:
        return list(image_files(options.files, [plain_line(name) for name in trained.class_names]))

    def inputs(self, trained: Trained, values: Sequence[Any]) -> Inputs:
        transform = Transform(trained.input, decoding=trained.decoding)
        return torch.stack([transform(path) for path in values])


register(ClassificationKind())
