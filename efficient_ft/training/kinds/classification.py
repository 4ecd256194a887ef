"""Image classification."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from efficient_ft.config import Config
from efficient_ft.config.kinds import RULES
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data import Transform, open_data
from efficient_ft.task import TASKS, Inputs
from efficient_ft.training.kinds.base import PredictOptions, RunData, Trained
from efficient_ft.training.kinds.classes import ClassKind
from efficient_ft.training.kinds.files import Item, image_files
from efficient_ft.training.kinds.registry import register


class ClassificationKind(ClassKind):
    """Image classification, with one class per image."""

    rules, task = RULES["classification"], TASKS["classification"]
    table_classes, fixed_batches, item_key = 100, True, "path"

    def open(self, config: Config, spec: InputSpec) -> RunData:
        return open_data(config.data, spec, config.seed)

    def items(self, trained: Trained, options: PredictOptions) -> list[Item]:
        return list(image_files(options.files, [plain_line(name) for name in trained.class_names]))

    def inputs(self, trained: Trained, values: Sequence[Any]) -> Inputs:
        transform = Transform(trained.input, decoding=trained.decoding)
        return torch.stack([transform(path) for path in values])


register(ClassificationKind())
