"""Classification with any number of labels per image."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn import functional as F

from efficient_ft.task.base import Scores, Task


class MultiLabel(Task):
    """Multi-label classification with logits (B, labels), a loss for each label, and the mean average precision.

    The targets have the values 0 and 1, float32 (B, labels). Label smoothing is not used.

    Args:
        loss: ``bce`` (binary cross-entropy) or ``asymmetric`` (`asymmetric_loss`).
        gamma_positive, gamma_negative, margin: arguments of `asymmetric_loss`.

    Attributes:
        thresholds: minimum probability at which each label is predicted, for F1, or None for 0.5.
    """

    name, metric, item = "multilabel", "mean_average_precision", "image"
    _dimensions, _shape = 2, "(images, labels)"

    def __init__(
        self,
        loss: str = "bce",
        gamma_positive: float = 0.0,
        gamma_negative: float = 4.0,
        margin: float = 0.05,
    ) -> None:
        self._asymmetric = (gamma_positive, gamma_negative, margin) if loss == "asymmetric" else None
        self.thresholds: Sequence[float] | None = None

    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        logits, targets = logits.float(), like(targets, logits)
        if self._asymmetric is None:
            return F.binary_cross_entropy_with_logits(logits, targets)
        return asymmetric_loss(logits, targets, *self._asymmetric)

    def predicted(self, logits: Tensor) -> None:
        return None

    def chance_loss(self, num_classes: int) -> float:
        return math.log(2)

    @property
    def class_metric(self) -> str:
        return "average_precision"

    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        from efficient_ft.task.gathered import LabelScores

        return LabelScores(num_classes, self.thresholds, local)

    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        return torch.zeros(batch_size, 1)


def like(targets: Tensor, logits: Tensor) -> Tensor:
    """Repeat example targets (B, 1) for each output of the logits (B, outputs). Other targets are not changed."""
    return targets if targets.shape == logits.shape else targets.expand_as(logits).contiguous()


def asymmetric_loss(
    logits: Tensor, targets: Tensor, gamma_positive: float = 0.0, gamma_negative: float = 4.0, margin: float = 0.05
) -> Tensor:
    """Return the asymmetric loss, averaged over images and labels (Ridnik et al. 2021, Equation 7).

    With the probability p, the loss of a positive label is ``-(1 - p) ** gamma_positive * log(p)``. The loss of a
    negative label is ``-q ** gamma_negative * log(1 - q)`` with ``q = max(p - margin, 0)``. The loss is a mean
    instead of the sum in the authors' code, so that learning rates are comparable with those of the binary
    cross-entropy.

    Args:
        logits: float (B, labels).
        targets: 0 or 1, float (B, labels).
        gamma_positive: focusing exponent of positive labels, at least 0.
        gamma_negative: focusing exponent of negative labels, at least 0.
        margin: probability up to which negative labels have no loss, in [0, 1).
    """
    q = (logits.sigmoid() - margin).clamp(min=0)
    # Powers are computed from logarithms, because the gradient of x ** gamma is infinite at x = 0 if gamma < 1.
    positive = (gamma_positive * F.logsigmoid(-logits)).exp() * F.logsigmoid(logits)
    # Without a margin, log(1 - p) is computed from the logits, so that confident mistakes keep a gradient.
    if margin == 0:
        negative = (gamma_negative * F.logsigmoid(logits)).exp() * F.logsigmoid(-logits)
    else:
        negative = torch.where(q > 0, q, 1) ** gamma_negative * torch.log1p(-q)
    return -(targets * positive + (1 - targets) * negative).mean()
