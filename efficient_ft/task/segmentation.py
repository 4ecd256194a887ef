"""Semantic segmentation: one class per pixel."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.inputs import Inputs
from efficient_ft.task.base import Scores, Task, at_size, total_weight


class Segmentation(Task):
    """Segmentation with pixel-wise cross-entropy and mean IoU.

    Logits (B, classes, h, w) are resized to the size of the masks.

    Args:
        window: size (h, w) of the sliding windows for evaluation, or None to evaluate whole images. Windows overlap by
            at least a third of their size. The logits of a pixel are averaged over all windows that contain the pixel.
    """

    name = "segmentation"
    metric = "mean_iou"
    item = "pixel"
    _dimensions = 4
    _shape = "(images, classes, height, width)"

    weighs_classes = True

    def loss(
        self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> Tensor:
        logits = at_size(logits, targets)
        total = F.cross_entropy(
            logits, targets, class_weights, ignore_index=IGNORED, label_smoothing=label_smoothing, reduction="sum"
        )
        # `clamp` avoids 0 / 0 for a crop without labeled pixels.
        if class_weights is None:
            return total / self.labeled(targets).clamp(min=1)
        return total / total_weight(targets, class_weights).clamp(min=class_weights.min())

    def labeled(self, targets: Tensor) -> Tensor:
        return (targets != IGNORED).sum()

    def __init__(self, window: tuple[int, int] | None = None) -> None:
        self._window = window

    @property
    def class_metric(self) -> str:
        return "iou"

    def evaluation_logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        if self._window is None:
            return self.logits(model, inputs)
        assert isinstance(inputs, Tensor)
        height, width = inputs.shape[-2:]
        h, w = min(self._window[0], height), min(self._window[1], width)
        total: Tensor | None = None
        count = inputs.new_zeros(1, 1, height, width)
        for top in _starts(height, h):
            for left in _starts(width, w):
                part = inputs[..., top : top + h, left : left + w]
                logits = at_size(self.logits(model, part), part[:, 0])
                if total is None:
                    total = logits.new_zeros(*logits.shape[:2], height, width)
                total[..., top : top + h, left : left + w] += logits
                count[..., top : top + h, left : left + w] += 1
        assert total is not None
        return total / count

    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        from efficient_ft.task.metrics import Overlap

        return Overlap(num_classes, IGNORED, local)

    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        return torch.zeros(batch_size, *input_size, dtype=torch.long)


def _starts(length: int, window: int) -> list[int]:
    """Return the start positions of evenly spaced windows that start at most two thirds of a window apart."""
    steps = max(-(-3 * (length - window) // (2 * window)), 1)
    return sorted({round((length - window) * k / steps) for k in range(steps + 1)})
