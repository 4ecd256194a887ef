"""Regression of one or more numbers per image."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from torch import Tensor

from efficient_ft.config import Config
from efficient_ft.config.kinds import RULES
from efficient_ft.core.text import plain_line
from efficient_ft.data import class_count
from efficient_ft.task import Regression, Task
from efficient_ft.task.scale import Scale
from efficient_ft.training.kinds.base import RunData, Trained, only
from efficient_ft.training.kinds.classes import Predicted
from efficient_ft.training.kinds.labels import LabelFileKind, names, numbers
from efficient_ft.training.kinds.registry import register


class RegressionKind(LabelFileKind):
    """One or more numbers per image, which are scaled by their mean and standard deviation over the training split."""

    rules, task = RULES["regression"], Regression()
    problem_type = "regression"

    def task_on(self, config: Config, data: RunData, notes: Mapping[str, Any] = {}) -> Task:
        part = only(data)
        own = Scale(part.mean.tolist(), part.std.tolist())
        return Regression([plain_line(name) for name in part.class_names], _scale(notes) or own, own)

    def classes(self, config: Config) -> int:
        assert config.data.labels is not None, "refused by `config.check`"
        label = config.data.labels.label
        return class_count(config.data) or (len(label) if isinstance(label, list) else 1)

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        part = only(data)
        scale = {"target_mean": part.mean.tolist(), "target_std": part.std.tolist()}
        return {**super().notes(config, data), **scale}

    def check_notes(self, notes: Mapping[str, Any], classes: int) -> None:
        mean, std = notes.get("target_mean") or (), notes.get("target_std") or ()
        if len(mean) != classes or len(std) != classes:
            raise ValueError("target_mean and target_std must contain one number per target")
        if not all(map(math.isfinite, (*mean, *std))) or min(std) <= 0:
            raise ValueError("target_mean and target_std must be finite, and target_std must be > 0")

    def header(self, trained: Trained, top: int) -> list[str]:
        return names(trained)

    def predicted(self, trained: Trained, row: Tensor, top: int, label: str | None = None) -> Predicted:
        scale = _scale(trained.notes)
        assert scale is not None, "checked by `check_notes`"
        values = scale.restored(row).tolist()
        pairs = list(zip(names(trained), values, strict=True))
        return [(name, f"{value:.6g}") for name, value in pairs], {"values": dict(pairs)}, values


def _scale(notes: Mapping[str, Any]) -> Scale | None:
    """Return the scale in the metadata of model.safetensors, or None if there is no scale."""
    if "target_mean" not in notes:
        return None
    return Scale(numbers(notes, "target_mean"), numbers(notes, "target_std"))


register(RegressionKind())
