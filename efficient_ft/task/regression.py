"""Regression of one or more numbers per image."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from efficient_ft.task.base import Scores, Task
from efficient_ft.task.multilabel import like
from efficient_ft.task.scale import Scale


class Regression(Task):
    """Regression with outputs (B, targets), the mean squared error of scaled targets, and R².

    The metric is the coefficient of determination R², averaged over the targets. R² is 1 for exact predictions, 0 if
    the mean of the targets is predicted, and negative for worse predictions.

    Args:
        names: names of the targets, which are part of the names of metrics if there are several targets.
        outputs: scale of the network's outputs, or None if the outputs are in the units of the user.
        targets: scale of the targets, or None if this scale equals the scale of the outputs.
    """

    name, metric, item = "regression", "r2", "image"
    _dimensions, _shape = 2, "(images, targets)"

    def __init__(self, names: Sequence[str] = (), outputs: Scale | None = None, targets: Scale | None = None) -> None:
        self._names, self._outputs, self._targets = names, outputs, targets or outputs

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        return F.mse_loss(logits.float(), like(targets, logits))

    def predicted(self, logits: Tensor) -> None:
        return None

    def chance_loss(self, num_classes: int) -> float:
        return 1.0  # the variance of scaled targets

    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        from efficient_ft.task.gathered import TargetScores

        return TargetScores(num_classes, self._names, self._outputs, self._targets, local)

    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        return torch.zeros(batch_size, 1)
