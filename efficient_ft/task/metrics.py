"""Metrics of the tasks. Import this module only when metrics are needed, because importing torchmetrics is slow."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from efficient_ft.task.base import Scores, at_size
from efficient_ft.task.class_metrics import TOP, Outcomes, balanced_accuracy, macro_f1, reliability


class _Counts(Metric):
    """Metric that counts the samples, the predictions and the correct predictions of each class."""

    right: Tensor
    support: Tensor
    predicted: Tensor

    def __init__(self, num_classes: int, local: bool) -> None:
        super().__init__(sync_on_compute=not local)
        for name in ("right", "support", "predicted"):
            self.add_state(name, torch.zeros(num_classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, logits: Tensor, targets: Tensor) -> None:
        predicted = logits.argmax(1)
        self.right += targets[predicted == targets].bincount(minlength=len(self.right))
        self.support += targets.bincount(minlength=len(self.support))
        self.predicted += predicted.bincount(minlength=len(self.predicted))

    def compute(self) -> tuple[Tensor, Tensor, Tensor]:
        return self.right, self.support, self.predicted


class _Confusion(Metric):
    """Metric that counts the pixels of each pair of a true class and a predicted class, (classes, classes)."""

    counts: Tensor

    def __init__(self, num_classes: int, ignored: int, local: bool) -> None:
        super().__init__(sync_on_compute=not local)
        self._ignored = ignored
        self.add_state("counts", torch.zeros(num_classes, num_classes, dtype=torch.long), dist_reduce_fx="sum")

    def update(self, predicted: Tensor, targets: Tensor) -> None:
        valid = targets != self._ignored
        pairs = targets[valid] * len(self.counts) + predicted[valid]
        self.counts += pairs.bincount(minlength=self.counts.numel()).view_as(self.counts)

    def compute(self) -> Tensor:
        return self.counts


class MeanLoss(Metric):
    """Mean loss over all items, computed from the mean losses of batches."""

    # MeanMetric of torchmetrics is not used, because MeanMetric ignores weights if nan_strategy="disable".
    total: Tensor
    items: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("items", torch.zeros((), dtype=torch.long), dist_reduce_fx="sum")

    def update(self, mean: Tensor, items: Tensor | int) -> None:
        """Add a batch with the mean loss `mean` over `items` items."""
        self.total += mean * items
        self.items += items

    def compute(self) -> Tensor:
        """Return the mean loss of all items since the last reset."""
        return self.total / self.items.clamp(min=1)


class Accuracy(Scores):
    """Fraction of correct predictions, balanced accuracy and macro-F1.

    Only local metrics keep the predictions of individual samples, and compute the top-5 accuracy and the calibration
    error from these predictions.
    """

    def __init__(self, num_classes: int, local: bool = False) -> None:
        super().__init__()
        self._metric, self._classes = _Counts(num_classes, local), num_classes
        self._kept: list[tuple[Tensor, ...]] | None = [] if local else None

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._metric.update(logits, targets)
        if self._kept is not None:
            confidence = logits.softmax(1).amax(1)
            top = logits.topk(min(TOP, self._classes), 1).indices
            self._kept.append((targets, logits.argmax(1), confidence, (top == targets[:, None]).any(1)))

    def compute(self) -> dict[str, float]:
        right, support, predicted = self._metric.compute()
        counts = [of.cpu().numpy() for of in (right, support, predicted)]
        found = {
            "accuracy": float(right.sum().float() / support.sum().float().clamp(min=1)),
            "balanced_accuracy": balanced_accuracy(*counts[:2]),
            "macro_f1": macro_f1(*counts),
        }
        outcomes = self.outcomes()
        if outcomes is not None:
            if self._classes > TOP:
                found[f"top{TOP}_accuracy"] = float(outcomes.in_top.mean())
            found["calibration_error"] = reliability(outcomes.confidence, outcomes.right).error()
        return found

    def outcomes(self) -> Outcomes | None:
        if not self._kept:
            return None
        targets, predicted, confidence, in_top = (torch.cat(of).cpu() for of in zip(*self._kept, strict=True))
        return Outcomes(targets.numpy(), predicted.numpy(), confidence.double().numpy(), in_top.numpy())

    def samples(self) -> dict[str, np.ndarray]:
        found = self.outcomes()
        if found is None:
            return {}
        return {
            "label": found.targets,
            "predicted": found.predicted,
            "probability": found.confidence.astype(np.float32),
        }

    def correct(self) -> Tensor | None:
        found = self.outcomes()
        return None if found is None else torch.from_numpy(found.right)

    def each_class(self) -> dict[int, float]:
        right, support, _ = (counts.tolist() for counts in self._metric.compute())
        return {number: a / b for number, (a, b) in enumerate(zip(right, support, strict=True)) if b}

    def reset(self) -> None:
        self._metric.reset()
        if self._kept is not None:
            self._kept.clear()


class Overlap(Scores):
    """Intersection over union (IoU) of each class, computed over all images together.

    The mean excludes classes that occur neither in the masks nor in the predictions.
    """

    def __init__(self, num_classes: int, ignored: int, local: bool = False) -> None:
        super().__init__()
        # MulticlassConfusionMatrix of torchmetrics is not used, because its module imports all metrics.
        self._matrix = _Confusion(num_classes, ignored, local)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._matrix.update(at_size(logits, targets).argmax(1), targets)

    def compute(self) -> dict[str, float]:
        counts = self._matrix.compute().double()
        return {
            "mean_iou": float(_overlaps(counts).nanmean()),
            "pixel_accuracy": float(counts.diagonal().sum() / counts.sum()),
            **{f"iou_{number}": value for number, value in self.each_class().items()},
        }

    def each_class(self) -> dict[int, float]:
        overlaps = _overlaps(self._matrix.compute().double()).tolist()
        return {number: value for number, value in enumerate(overlaps) if value == value}

    def reset(self) -> None:
        self._matrix.reset()


def _overlaps(counts: Tensor) -> Tensor:
    """Return the IoU of each class from `counts` (true class, predicted class), or NaN for absent classes."""
    both = counts.diagonal()
    return both / (counts.sum(0) + counts.sum(1) - both)
