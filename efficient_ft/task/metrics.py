"""The measures of the tasks, by torchmetrics. Imported where predictions are judged: it takes seconds to import."""

from __future__ import annotations

from torch import Tensor
from torchmetrics.classification import MulticlassAccuracy, MulticlassConfusionMatrix

from efficient_ft.task.base import Scores, at_size


class Accuracy(Scores):
    """The share of images whose class is predicted."""

    def __init__(self, num_classes: int, local: bool = False) -> None:
        super().__init__()
        self._metric = MulticlassAccuracy(num_classes, average="micro", validate_args=False, sync_on_compute=not local)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._metric.update(logits, targets)

    def compute(self) -> dict[str, float]:
        return {"accuracy": float(self._metric.compute())}

    def reset(self) -> None:
        self._metric.reset()


class Overlap(Scores):
    """Intersection over union per class, over all images together, as the benchmarks of this task count it.

    The mean leaves out classes that neither the masks nor the predictions have.
    """

    def __init__(self, num_classes: int, ignored: int, local: bool = False) -> None:
        super().__init__()
        self._matrix = MulticlassConfusionMatrix(
            num_classes, ignore_index=ignored, validate_args=False, sync_on_compute=not local
        )

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._matrix.update(at_size(logits, targets).argmax(1), targets)

    def compute(self) -> dict[str, float]:
        counts = self._matrix.compute().double()  # (true, predicted)
        both, union = counts.diagonal(), counts.sum(0) + counts.sum(1) - counts.diagonal()
        overlaps = both / union
        found = {"mean_iou": float(overlaps.nanmean()), "pixel_accuracy": float(both.sum() / counts.sum())}
        each = enumerate(overlaps.tolist())
        return {**found, **{f"iou_{number}": value for number, value in each if value == value}}

    def reset(self) -> None:
        self._matrix.reset()
