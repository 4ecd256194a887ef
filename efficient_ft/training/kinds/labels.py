"""Base class of the kinds of task that require a label file, and of their predictions."""

from __future__ import annotations

import json
from abc import abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, ClassVar, cast

import torch
from torch import Tensor, nn

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data.inspection import spread
from efficient_ft.data.opened import OpenedData
from efficient_ft.models.transformers_files import CONFIG
from efficient_ft.task import moved
from efficient_ft.training.kinds.base import Prediction, Predictions, PredictOptions, RunData, Sample, Trained
from efficient_ft.training.kinds.classes import SAMPLES
from efficient_ft.training.kinds.classification import ClassificationKind
from efficient_ft.training.kinds.files import Item, image_files
from efficient_ft.training.output import export

#: The lines for the terminal, the JSON entries and the CSV cells of an image.
Predicted = tuple[list[tuple[str, str]], dict[str, Any], list[Any]]


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

    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        if options.out is not None or options.overlay:
            raise UserError(
                f"--out and --overlay require a run with task=segmentation, but the run {options.run} has"
                f" task={self.rules.name}."
            )
        return LabelFilePredictions(self, trained, self.items(trained, options), options)

    def samples(self, trained: Trained, data: OpenedData[Any, Any], device: torch.device) -> list[Sample]:
        dataset: Any = data.eval_loader(data.best_split).dataset
        chosen = spread(len(dataset), SAMPLES).tolist()
        inputs, targets = dataset.__getitems__([(0, index) for index in chosen])
        rows = outputs(self, trained, inputs, device)
        pairs: Any = zip(data.labeled(inputs, targets, trained.input), rows, strict=True)
        return [Sample(image, f"{true}, predicted {self.caption(trained, row)}") for (image, true), row in pairs]

    @abstractmethod
    def header(self, trained: Trained, top: int) -> list[str]:
        """Return the column names of the CSV output."""

    @abstractmethod
    def predicted(self, trained: Trained, row: Tensor, top: int) -> Predicted:
        """Return the lines for the terminal, the JSON entries and the CSV cells for the outputs of an image."""

    def caption(self, trained: Trained, row: Tensor) -> str:
        """Return the prediction for the outputs of an image as one line."""
        return ", ".join(" ".join(pair).strip() for pair in self.predicted(trained, row, 3)[0])


@torch.inference_mode()
def outputs(kind: LabelFileKind, trained: Trained, inputs: Any, device: torch.device) -> Tensor:
    """Return the outputs of the network for a batch, float64 (B, outputs) on the CPU."""
    logits = kind.task.logits(trained.model.to(device), moved(inputs, device))
    export.require_finite(logits)
    return logits.float().cpu().double()


class LabelFilePredictions(Predictions):
    """The predicted labels or numbers of each image."""

    def __init__(self, kind: LabelFileKind, trained: Trained, items: Sequence[Item], options: PredictOptions) -> None:
        self._kind, self._trained, self._items, self._options = kind, trained, items, options
        self._top = min(options.top, len(trained.class_names))
        self.total, self.header = len(items), ["path", *kind.header(trained, self._top)]

    def __iter__(self) -> Iterator[Prediction]:
        size, device = self._options.batch_size, next(self._trained.model.parameters()).device
        for start in range(0, self.total, size):
            batch = self._items[start : start + size]
            inputs = self._kind.inputs(self._trained, [item.value for item in batch])
            for item, row in zip(batch, outputs(self._kind, self._trained, inputs, device), strict=True):
                values, record, cells = self._kind.predicted(self._trained, row, self._top)
                path = str(item.value)
                yield Prediction(item.shown, values, {"path": path, **record}, [path, *cells])


def numbers(notes: Mapping[str, Any], key: str) -> list[float]:
    """Return a list of numbers in the metadata of model.safetensors."""
    found: list[float] = json.loads(notes[key]) if isinstance(notes[key], str) else list(notes[key])
    return found


def names(trained: Trained) -> list[str]:
    """Return the names of the outputs for display."""
    return [plain_line(name) for name in trained.class_names]
