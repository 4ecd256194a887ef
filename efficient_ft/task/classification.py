"""Classification of images and of texts."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional as F

from efficient_ft.core.inputs import Inputs
from efficient_ft.task.base import Scores, Task, total_weight

#: Exclusive upper bound of the token ids in example texts. Every vocabulary contains the ids below this bound.
_EXAMPLE_IDS = 4


class Classification(Task):
    """Image classification with logits (B, classes), cross-entropy and top-1 accuracy."""

    name = "classification"
    metric = "accuracy"
    item = "image"
    _dimensions = 2
    _shape = "(images, classes)"

    weighs_classes = True

    def loss(
        self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0, class_weights: Tensor | None = None
    ) -> Tensor:
        if class_weights is not None and targets.is_floating_point():  # PyTorch divides by the number of samples here
            total = F.cross_entropy(logits, targets, class_weights, reduction="sum", label_smoothing=label_smoothing)
            return total / total_weight(targets, class_weights)
        return F.cross_entropy(logits, targets, class_weights, label_smoothing=label_smoothing)

    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        from efficient_ft.task.metrics import Accuracy

        return Accuracy(num_classes, local)

    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        return torch.zeros(batch_size, dtype=torch.long)


class TextClassification(Classification):
    """Classification of texts or pairs of texts. The inputs are token ids (B, L) and an attention mask (B, L)."""

    name = "text"
    item = sample = "text"
    input_dimensions = 1
    _shape = "(texts, classes)"

    def example_inputs(
        self, batch_size: int, channels: int, input_size: tuple[int, ...], generator: torch.Generator | None = None
    ) -> Inputs:
        ids = torch.randint(1, _EXAMPLE_IDS, (batch_size, *input_size), generator=generator)
        return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
