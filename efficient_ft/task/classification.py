"""Image classification: one class per image."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from efficient_ft.task.base import Scores, Task


class Classification(Task):
    """Logits (B, classes), cross-entropy, top-1 accuracy."""

    name = "classification"
    metric = "accuracy"
    item = "image"
    _dimensions = 2
    _shape = "(images, classes)"

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return F.cross_entropy(logits, targets, label_smoothing=label_smoothing)

    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        from efficient_ft.task.metrics import Accuracy

        return Accuracy(num_classes, local)

    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        return torch.zeros(batch_size, dtype=torch.long)
