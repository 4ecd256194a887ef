"""Classification of images with any number of labels each."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, cast

from torch import Tensor

from efficient_ft.config import Config
from efficient_ft.config.kinds import RULES
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.task import MultiLabel, Task
from efficient_ft.training.kinds.base import RunData, Trained
from efficient_ft.training.kinds.classes import Predicted
from efficient_ft.training.kinds.labels import LabelFileKind, names, numbers
from efficient_ft.training.kinds.registry import register


class MultiLabelKind(LabelFileKind):
    """Any number of labels per image. The thresholds of the labels are tuned on the validation images."""

    rules, task = RULES["multilabel"], MultiLabel()
    problem_type = "multi_label_classification"

    def open(self, config: Config, spec: InputSpec) -> RunData:
        opened: Any = super().open(config, spec)
        if config.multilabel.thresholds == "tuned":
            opened.warn_of_few_images()
        return cast("RunData", opened)

    def task_of(self, config: Config) -> Task:
        of = config.multilabel
        return MultiLabel(of.loss, of.gamma_positive, of.gamma_negative, of.margin)

    def task_on(self, config: Config, data: RunData, notes: Mapping[str, Any] = {}) -> Task:
        task = self.task_of(config)
        assert isinstance(task, MultiLabel)
        if "thresholds" in notes:
            task.thresholds = numbers(notes, "thresholds")
        return task

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        fixed, count = config.multilabel.thresholds, len(data.class_names)
        same = {} if isinstance(fixed, str) else {"thresholds": [fixed] * count}
        return {**super().notes(config, data), **same}

    def check_notes(self, notes: Mapping[str, Any], classes: int) -> None:
        thresholds = notes.get("thresholds")
        if thresholds is None or len(thresholds) != classes:
            raise ValueError("thresholds must contain one number per class")
        if not all(0 < one < 1 for one in thresholds):
            raise ValueError("thresholds must be > 0 and < 1")

    def header(self, trained: Trained, top: int) -> list[str]:
        return ["labels", *(f"{key}_{k}" for k in range(1, top + 1) for key in ("class", "probability"))]

    def predicted(self, trained: Trained, row: Tensor, top: int, label: str | None = None) -> Predicted:
        shown, thresholds = names(trained), numbers(trained.notes, "thresholds")
        probabilities = row.sigmoid().tolist()
        order = sorted(range(len(shown)), key=lambda k: -probabilities[k])
        found = [k for k in order if probabilities[k] >= thresholds[k]]
        lines = [
            (shown[k], f"{format_percent(probabilities[k])} (threshold {format_percent(thresholds[k])})") for k in found
        ]
        best = [{"class": shown[k], "probability": probabilities[k], "threshold": thresholds[k]} for k in order[:top]]
        record = {"labels": [shown[k] for k in found], "top": best}
        cells = ["|".join(shown[k] for k in found)]
        cells += [one[key] for one in best for key in ("class", "probability")]
        return lines or [("(no label)", "")], record, cells


register(MultiLabelKind())
