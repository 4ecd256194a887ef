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


@torch.inference_mode()
def probabilities(task: Task, model: nn.Module, inputs: Inputs) -> Tensor:
    """Return class probabilities (B, classes) on the CPU.

    `inputs` is a tensor of images (B, 3, H, W), or a mapping from argument names to tensors for texts.

    Raises:
        UserError: If an output is not finite.
    """
    device = next(model.parameters()).device
    logits = task.logits(model, moved(inputs, device)).float()
    export.require_finite(logits)
    return logits.softmax(-1).cpu()


class ClassKind(Kind):
    """A kind of task that predicts one class for each sample."""

    #: Name of the CSV column and of the JSON key that contain the path or the text of a sample.
    item_key: str

    @abstractmethod
    def items(self, trained: Trained, options: PredictOptions) -> list[Item]:
        """Return the samples in the files of `options`."""

    @abstractmethod
    def inputs(self, trained: Trained, values: Sequence[Any]) -> Inputs:
        """Return a batch of network inputs for the given paths or texts of samples (`Item.value`)."""

    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        if options.out is not None or options.overlay:
            raise UserError(
                f"--out and --overlay require a run with task=segmentation, but the run {options.run} predicts classes."
            )
        return ClassPredictions(self, trained, self.items(trained, options), options)

    def file_batches(self, trained: Trained, files: Sequence[Path], count: int, size: int) -> Iterator[Inputs]:
        items = self.items(trained, PredictOptions(Path(), files))
        chosen = [items[k] for k in spread(len(items), count)]
        for start in range(0, len(chosen), size):
            yield self.inputs(trained, [item.value for item in chosen[start : start + size]])

    def heading(self, item: Item) -> str:
        """Return the line that is shown above the predicted classes of a sample."""
        return item.shown

    def samples(self, trained: Trained, data: OpenedData[Any, Any], device: torch.device) -> list[Sample]:
        """Return evenly spaced samples of the split that selects the best epoch, with their predictions."""
        dataset: Any = data.eval_loader(data.best_split).dataset
        chosen = spread(len(dataset), SAMPLES).tolist()
        inputs, labels = dataset.__getitems__([(0, index) for index in chosen])
        rows = probabilities(self.task, trained.model.to(device), inputs)
        found = []
        for content, label, row in zip(data.shown(inputs, trained.input), labels.tolist(), rows, strict=True):
            best = int(row.argmax())
            true, predicted = trained.class_names[label], trained.class_names[best]
            caption = f"{true}, predicted {predicted} ({format_percent(float(row[best]))})"
            found.append(Sample(content, caption))
        return found


class ClassPredictions(Predictions):
    """The most probable classes of each sample, and the accuracy over the labeled samples."""

    def __init__(self, kind: ClassKind, trained: Trained, items: Sequence[Item], options: PredictOptions) -> None:
        self._kind, self._trained, self._items, self._batch = kind, trained, items, options.batch_size
        self._names = [plain_line(name) for name in trained.class_names]
        self._top = min(options.top, len(self._names))
        self.total = len(items)
        self._pairs: Counter[tuple[str, str]] = Counter()
        self.header = [kind.item_key, "class", "probability", "label"]
        self.header += [f"{key}_{k}" for k in range(2, self._top + 1) for key in ("class", "probability")]

    def __iter__(self) -> Iterator[Prediction]:
        for start in range(0, self.total, self._batch):
            batch = self._items[start : start + self._batch]
            inputs = self._kind.inputs(self._trained, [item.value for item in batch])
            rows = probabilities(self._kind.task, self._trained.model, inputs)
            for item, row in zip(batch, rows, strict=True):
                values, labels = row.topk(self._top)
                top = [(self._names[int(k)], float(value)) for value, k in zip(values, labels, strict=True)]
                if item.label is not None:
                    self._pairs[item.label, top[0][0]] += 1
                yield self.prediction(item, top)

    def prediction(self, item: Item, top: Sequence[tuple[str, float]]) -> Prediction:
        """Return the prediction of a sample. `top` contains the most probable classes in descending order."""
        record = {
            self.header[0]: str(item.value),
            "class": top[0][0],
            "probability": top[0][1],
            "label": item.label,
            "top": [{"class": name, "probability": probability} for name, probability in top],
        }
        row = [str(item.value), *top[0], item.label, *(part for pair in top[1:] for part in pair)]
        values = [(name, format_percent(probability)) for name, probability in top]
        return Prediction(self._kind.heading(item), values, record, row)

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
