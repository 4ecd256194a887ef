"""Kinds of task that predict one class for each image or text, and the predictions of these kinds."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.text import plain_line, shortened, terminal_width
from efficient_ft.data.inspection import spread
from efficient_ft.data.opened import OpenedData
from efficient_ft.task import Inputs, Task, moved
from efficient_ft.training.kinds.base import Kind, Prediction, Predictions, PredictOptions, Sample, Trained
from efficient_ft.training.kinds.files import Item
from efficient_ft.training.output import export

#: Maximum number of printed pairs of classes that the network confuses.
_CONFUSIONS = 5
#: Maximum number of samples of each data set that are logged.
SAMPLES = 8


#: The lines for the terminal, the JSON entries and the CSV cells of a sample.
Predicted = tuple[list[tuple[str, str]], dict[str, Any], list[Any]]


@torch.inference_mode()
def finite_logits(task: Task, model: nn.Module, inputs: Inputs) -> Tensor:
    """Return the logits of a batch, float32 (B, outputs), on the device of the network.

    `inputs` is a tensor of images (B, 3, H, W), or a mapping from argument names to tensors for texts.

    Raises:
        UserError: If an output is not finite.
    """
    logits = task.logits(model, moved(inputs, next(model.parameters()).device)).float()
    export.require_finite(logits)
    return logits


class ClassKind(Kind):
    """A kind of task that predicts one class for each sample.

    Subclasses that predict something else for each sample override `outputs`, `header`, `predicted` and `caption`.
    """

    #: Name of the CSV column and of the JSON key that contain the path or the text of a sample.
    item_key: str

    @abstractmethod
    def items(self, trained: Trained, options: PredictOptions) -> list[Item]:
        """Return the samples in the files of `options`."""

    @abstractmethod
    def inputs(self, trained: Trained, values: Sequence[Any]) -> Inputs:
        """Return a batch of network inputs for the given paths or texts of samples (`Item.value`)."""

    def outputs(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Return the class probabilities (B, classes) on the CPU. Raise UserError if an output is not finite."""
        return finite_logits(self.task, model, inputs).softmax(-1).cpu()

    def header(self, trained: Trained, top: int) -> list[str]:
        """Return the column names of the CSV output after `item_key`."""
        further = [f"{key}_{k}" for k in range(2, top + 1) for key in ("class", "probability")]
        return ["class", "probability", "label", *further]

    def predicted(self, trained: Trained, row: Tensor, top: int, label: str | None = None) -> Predicted:
        """Return the lines for the terminal, the JSON entries and the CSV cells for the outputs of a sample.

        `label` is the label of the sample if it is known.
        """
        values, labels = row.topk(top)
        names = [plain_line(trained.class_names[k]) for k in labels.tolist()]
        pairs = list(zip(names, values.tolist(), strict=True))
        best, probability = pairs[0]
        record = {
            "class": best,
            "probability": probability,
            "label": label,
            "top": [{"class": name, "probability": value} for name, value in pairs],
        }
        cells = [best, probability, label, *(part for pair in pairs[1:] for part in pair)]
        return [(name, format_percent(value)) for name, value in pairs], record, cells

    def caption(self, trained: Trained, row: Tensor) -> str:
        """Return the prediction for the outputs of a sample as one line."""
        [(name, probability)], *_ = self.predicted(trained, row, 1)
        return f"{name} ({probability})"

    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        if options.out is not None or options.overlay:
            raise UserError(
                f"--out and --overlay require a run with task=segmentation, but the run {options.run} has"
                f" task={self.rules.name}."
            )
        return ClassPredictions(self, trained, options)

    def file_batches(self, trained: Trained, files: Sequence[Path], count: int, size: int) -> Iterator[Inputs]:
        items = self.items(trained, PredictOptions(Path(), files))
        chosen = [items[k] for k in spread(len(items), count)]
        for start in range(0, len(chosen), size):
            yield self.inputs(trained, [item.value for item in chosen[start : start + size]])

    def heading(self, item: Item) -> str:
        """Return the line that is shown above the prediction of a sample."""
        return item.shown

    def samples(self, trained: Trained, data: OpenedData[Any, Any], device: torch.device) -> list[Sample]:
        """Return evenly spaced samples of the split that selects the best epoch, with their predictions."""
        dataset: Any = data.eval_loader(data.best_split).dataset
        chosen = spread(len(dataset), SAMPLES).tolist()
        inputs, targets = dataset.__getitems__([(0, index) for index in chosen])
        pairs = zip(
            data.labeled(inputs, targets, trained.input), self.outputs(trained.model.to(device), inputs), strict=True
        )
        return [Sample(content, f"{true}, predicted {self.caption(trained, row)}") for (content, true), row in pairs]


class ClassPredictions(Predictions):
    """The prediction of each sample, and the accuracy over the images in folders that are named after classes."""

    def __init__(self, kind: ClassKind, trained: Trained, options: PredictOptions) -> None:
        self._kind, self._trained, self._batch = kind, trained, options.batch_size
        self._items = kind.items(trained, options)
        self._top = min(options.top, len(trained.class_names))
        self.total, self.header = len(self._items), [kind.item_key, *kind.header(trained, self._top)]
        self._pairs: Counter[tuple[str, str]] = Counter()

    def __iter__(self) -> Iterator[Prediction]:
        for start in range(0, self.total, self._batch):
            batch = self._items[start : start + self._batch]
            inputs = self._kind.inputs(self._trained, [item.value for item in batch])
            for item, row in zip(batch, self._kind.outputs(self._trained.model, inputs), strict=True):
                values, record, cells = self._kind.predicted(self._trained, row, self._top, item.label)
                if item.label is not None:
                    self._pairs[item.label, record["class"]] += 1
                key = str(item.value)
                yield Prediction(self._kind.heading(item), values, {self._kind.item_key: key, **record}, [key, *cells])

    def summary(self) -> list[str]:
        return confusion_lines(self._pairs, self.total)


def confusion_lines(pairs: Counter[tuple[str, str]], total: int) -> list[str]:
    """Return lines with the accuracy and the most frequent confusions, or an empty list if no item has a label.

    `pairs` counts the pairs (label, predicted class) of labeled items. `total` also includes unlabeled items.
    """
    labelled = pairs.total()
    if not labelled:
        return []
    sizes: Counter[str] = Counter()
    for (label, _), number in pairs.items():
        sizes[label] += number
    wrong = Counter({pair: number for pair, number in pairs.items() if pair[0] != pair[1]})
    of = "" if labelled == total else f" (of {total})"
    images = "image" if labelled == 1 else "images"
    accuracy = format_percent((labelled - wrong.total()) / labelled)
    lines = ["", f"accuracy over {labelled} {images}{of} in class folders: {accuracy}"]
    room = (terminal_width() - 30) // 2
    for (label, predicted), number in wrong.most_common(_CONFUSIONS):
        pair = f"{shortened(label, room)} → {shortened(predicted, room)}"
        lines.append(f"  {pair}: {number} of {sizes[label]}")
    return lines
