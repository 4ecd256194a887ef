"""Base class of the kinds of task that require a label file."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar, cast

from torch import Tensor, nn

from efficient_ft.config import Config
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.models.transformers_files import CONFIG
from efficient_ft.task import Inputs
from efficient_ft.training.kinds.base import PredictOptions, RunData, Trained
from efficient_ft.training.kinds.classes import Predicted, finite_logits
from efficient_ft.training.kinds.classification import ClassificationKind
from efficient_ft.training.kinds.files import Item, image_files


class LabelFileKind(ClassificationKind):
    """A kind of task whose images have a row of labels each, (B, outputs).

    Attributes:
        problem_type: name of the kind of task in config.json of `transformers`.
    """

    problem_type: ClassVar[str]

    def open(self, config: Config, spec: InputSpec) -> RunData:
        opened: Any = super().open(config, spec)
        smoothing = config.optim.label_smoothing
        if smoothing not in (0, type(config.optim).model_fields["label_smoothing"].default):
            setting = f"optim.label_smoothing={smoothing:g}"
            opened.add_note(f"{setting} is not used with task={config.task}.")
        return cast("RunData", opened)

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        return {"task": self.rules.name, **super().notes(config, data)}

    def companions(self, config: Config, network: nn.Module, data: RunData) -> dict[str, str]:
        files = super().companions(config, network, data)
        if CONFIG in files:
            about = {**json.loads(files[CONFIG]), "problem_type": self.problem_type}
            files[CONFIG] = json.dumps(about, indent=2) + "\n"
        return files

    def items(self, trained: Trained, options: PredictOptions) -> list[Item]:
        return list(image_files(options.files, ()))

    def outputs(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the outputs of the network for a batch, float64 (B, outputs), on the CPU."""
        return finite_logits(self.task, model, inputs).cpu().double()

    @abstractmethod
    def header(self, trained: Trained, top: int) -> list[str]: ...

    @abstractmethod
    def predicted(self, trained: Trained, row: Tensor, top: int, label: str | None = None) -> Predicted:
        """Return the lines for the terminal, the JSON entries and the CSV cells for the outputs of an image."""

    def caption(self, trained: Trained, row: Tensor) -> str:
        return ", ".join(" ".join(pair).strip() for pair in self.predicted(trained, row, 3)[0])


def numbers(notes: Mapping[str, Any], key: str) -> list[float]:
    """Return a list of numbers in the metadata of model.safetensors."""
    found: list[float] = json.loads(notes[key]) if isinstance(notes[key], str) else list(notes[key])
    return found


def names(trained: Trained) -> list[str]:
    """Return the names of the outputs for display."""
    return [plain_line(name) for name in trained.class_names]
