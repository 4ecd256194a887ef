"""A kind of task of another package: regression of one number per image with the mean squared error.

`tests.training.test_fourth_kind` installs this file as a module of a package.
"""

from __future__ import annotations

import csv
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F
from torchmetrics import Metric

from efficient_ft.config import Config
from efficient_ft.config.kinds import KindRules
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import ImageData, Transform, read_data
from efficient_ft.data.file_list import Paths
from efficient_ft.data.inspection import Inspection
from efficient_ft.data.listing import Listing, Samples, splits_of
from efficient_ft.task import Scores, Task
from efficient_ft.training.kinds.base import Kind, Prediction, Predictions, PredictOptions, RunData, Trained
from efficient_ft.training.kinds.files import image_files
from efficient_ft.training.kinds.registry import register


class Regression(Task):
    """Regression task with logits of shape (B, 1), the mean squared error and the explained variance."""

    name, metric, item = "brightness", "r2", "image"
    _dimensions, _shape = 2, "(images, 1)"

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return F.mse_loss(logits[:, 0], targets)

    def predicted(self, logits: Tensor) -> None:
        return None

    def chance_loss(self, num_classes: int) -> float:
        return 0.0

    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        return Errors(local)

    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        return torch.zeros(batch_size)


class _Sums(Metric):
    sums: Tensor

    def __init__(self, local: bool) -> None:
        super().__init__(sync_on_compute=not local)
        self.add_state("sums", torch.zeros(4, dtype=torch.double), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        errors, true = (predicted - targets).double(), targets.double()
        self.sums += torch.stack([true.new_tensor(len(true)), (errors**2).sum(), true.sum(), (true**2).sum()])

    def compute(self) -> Tensor:
        return self.sums


class Errors(Scores):
    """The fraction of explained variance, and the mean squared error."""

    def __init__(self, local: bool) -> None:
        super().__init__()
        self._metric = _Sums(local)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._metric.update(logits[:, 0], targets)

    def compute(self) -> dict[str, float]:
        count, errors, total, squares = self._metric.compute().tolist()
        return {"r2": 1 - errors / (squares - total**2 / count), "mean_squared_error": errors / count}

    def each_class(self) -> dict[int, float]:
        return {}

    def reset(self) -> None:
        self._metric.reset()


class NumberData(ImageData):
    """Images with one number each."""

    task = "brightness"

    def _split(self, listing: Listing) -> dict[str, Samples]:
        return self._choose_splits(splits_of(listing), _hold_out)

    def _labels(self, part: Samples) -> None:  # type: ignore[override]
        return None

    def inspect(self, *, thorough: bool = False) -> Inspection:
        return Inspection()

    def labeled(self, inputs: Any, targets: Tensor, input: InputSpec) -> list[tuple[Any, str]]:
        return [(one, f"{number:.3g}") for one, number in zip(self.shown(inputs, input), targets.tolist(), strict=True)]


def _hold_out(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    order = np.random.default_rng(seed).permutation(len(samples))
    count = max(round(len(samples) * fraction), 1)
    return samples.take(np.sort(order[count:])), samples.take(np.sort(order[:count]))


class Numbers:
    """The data set ``numbers``: ROOT/numbers.csv with the columns file, number and split (train or test)."""

    def missing(self, config: Any) -> str | None:
        file = Path(config.root) / "numbers.csv"
        return None if file.is_file() else f"data.root={config.root}: there is no numbers.csv."

    def class_count(self, config: Any) -> int:
        return 1

    def read(self, config: Any) -> Listing:
        with open(Path(config.root) / "numbers.csv", encoding="utf-8", newline="") as file:
            rows = list(csv.DictReader(file))
        parts = {}
        for split in ("train", "test"):
            own = [row for row in rows if row["split"] == split]
            paths = Paths([str(Path(config.root) / row["file"]) for row in own])
            parts[split] = Samples(paths, np.asarray([float(row["number"]) for row in own], dtype=np.float32))
        return Listing(["number"], parts["train"], test=parts["test"])


class NumberPredictions(Predictions):
    """The predicted number of each image."""

    header = ("path", "number")

    def __init__(self, trained: Trained, options: PredictOptions) -> None:
        self._trained, self._items = trained, list(image_files(options.files, ()))
        self.total = len(self._items)

    @torch.inference_mode()
    def __iter__(self) -> Iterator[Prediction]:
        transform = Transform(self._trained.input, decoding=self._trained.decoding)
        for item in self._items:
            number = float(self._trained.model(transform(str(item.value))[None]))
            yield Prediction(item.shown, [("number", f"{number:.3f}")], {"number": number}, [str(item.value), number])


class BrightnessKind(Kind):
    """Regression of one number per image."""

    rules = KindRules(
        "brightness", ("numbers",), data_words=("with a number for each image", "Choose data=numbers."),
        unsupported={"tasks": None},
    )  # fmt: skip
    task = Regression()
    sources: ClassVar = {"numbers": Numbers()}

    def open(self, config: Config, spec: InputSpec) -> RunData:
        listing: Any = read_data(config.data)
        return NumberData(listing, config.data, spec, config.seed)

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        return {"task": self.rules.name, **super().notes(config, data)}

    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        return NumberPredictions(trained, options)


brightness = register(BrightnessKind())
