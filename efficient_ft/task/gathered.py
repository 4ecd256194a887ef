"""Metrics that are computed from all outputs and targets of an evaluation, in float64 on the CPU."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchmetrics import Metric

from efficient_ft.task.base import Scores
from efficient_ft.task.scale import Scale

#: Threshold of the probability if no thresholds were tuned.
DEFAULT_THRESHOLD = 0.5


class _Gathered(Metric):
    """All outputs and targets (N, outputs) of an evaluation, including those of the other processes."""

    outputs: Any
    targets: Any

    def __init__(self, columns: int, local: bool) -> None:
        super().__init__(sync_on_compute=not local)
        self._columns = columns
        for name in ("outputs", "targets"):
            self.add_state(name, [], dist_reduce_fx="cat")

    def update(self, outputs: Tensor, targets: Tensor) -> None:
        self.outputs.append(outputs.detach().float())
        self.targets.append(targets.float())

    def _sync_dist(self, *args: Any, **kwargs: Any) -> None:
        if not self.outputs:  # all processes must gather, even if one of them has no samples
            for state in (self.outputs, self.targets):
                state.append(torch.zeros(0, self._columns, device=self.device))
        super()._sync_dist(*args, **kwargs)

    def compute(self) -> tuple[Tensor, Tensor]:
        joined = [torch.cat(one) if isinstance(one, list) else one for one in (self.outputs, self.targets)]
        return joined[0].cpu().double(), joined[1].cpu().double()


class _GatheredScores(Scores):
    """Metrics of the outputs that `_Gathered` collects."""

    def __init__(self, columns: int, local: bool) -> None:
        super().__init__()
        self._all = _Gathered(columns, local)

    def update(self, logits: Tensor, targets: Tensor) -> None:
        self._all.update(logits, targets)

    def reset(self) -> None:
        self._all.reset()


class LabelScores(_GatheredScores):
    """Average precision of each label, its mean over the labels that occur, and F1 (macro and micro).

    Args:
        num_classes: number of labels.
        thresholds: minimum probability at which each label is predicted, for F1, or None for 0.5.
        local: if True, the metrics are not synchronized with other processes.
    """

    def __init__(self, num_classes: int, thresholds: Sequence[float] | None = None, local: bool = False) -> None:
        super().__init__(num_classes, local)
        self._thresholds = torch.tensor(thresholds or [DEFAULT_THRESHOLD] * num_classes, dtype=torch.float64)

    def compute(self) -> dict[str, float]:
        logits, targets = self._all.compute()
        predicted = logits.sigmoid() >= self._thresholds
        true = (predicted & (targets > 0)).sum(0).double()
        total = (predicted.sum(0) + (targets > 0).sum(0)).double()  # 2 TP + FP + FN
        return {
            "mean_average_precision": float(average_precision(logits, targets).nanmean().nan_to_num()),
            "f1_macro": float((2 * true / total.clamp(min=1)).mean()),
            "f1_micro": float(2 * true.sum() / total.sum().clamp(min=1)),
        }

    def labels(self) -> dict[str, list[Any]]:
        logits, targets = self._all.compute()
        predicted, precision = logits.sigmoid() >= self._thresholds, average_precision(logits, targets).tolist()
        return {
            "support": (targets > 0).sum(0).tolist(),
            "predicted": predicted.sum(0).tolist(),
            "correct": (predicted & (targets > 0)).sum(0).tolist(),
            "average_precision": [value if value == value else None for value in precision],
        }

    def samples(self) -> dict[str, np.ndarray]:
        logits, targets = self._all.compute()
        return {"labels": (targets > 0).numpy(), "predicted": (logits.sigmoid() >= self._thresholds).numpy()}

    def each_class(self) -> dict[int, float]:
        found = average_precision(*self._all.compute()).tolist()
        return {number: value for number, value in enumerate(found) if value == value}

    def notes(self) -> dict[str, Any]:
        """Return the threshold of each label that maximizes the F1 of these predictions."""
        return {"thresholds": best_thresholds(*self._all.compute())}


class TargetScores(_GatheredScores):
    """R², mean absolute error (MAE) and root mean squared error (RMSE) in the units of the user.

    Args:
        num_classes: number of targets.
        names: names of the targets, for the metrics of several targets.
        outputs, targets: scales of the outputs and of the targets, or None for the units of the user.
        local: if True, the metrics are not synchronized with other processes.
    """

    def __init__(
        self,
        num_classes: int,
        names: Sequence[str] = (),
        outputs: Scale | None = None,
        targets: Scale | None = None,
        local: bool = False,
    ) -> None:
        super().__init__(num_classes, local)
        self._names, self._scales = names, (outputs, targets)

    def _values(self) -> tuple[Tensor, Tensor]:
        both = zip(self._all.compute(), self._scales, strict=True)
        predicted, true = (values if scale is None else scale.restored(values) for values, scale in both)
        return predicted, true

    def compute(self) -> dict[str, float]:
        predicted, true = self._values()
        errors = predicted - true
        found = {"r2": float(r2(predicted, true).mean())}
        for k in range(errors.shape[1]):
            of = f"_{self._names[k] if self._names else k}" if errors.shape[1] > 1 else ""
            found[f"mae{of}"] = float(errors[:, k].abs().mean())
            found[f"rmse{of}"] = float(errors[:, k].square().mean().sqrt())
        return found

    def samples(self) -> dict[str, np.ndarray]:
        predicted, true = self._values()
        return {"target": true.float().numpy(), "predicted": predicted.float().numpy()}

    def each_class(self) -> dict[int, float]:
        return dict(enumerate(r2(*self._values()).tolist()))


def average_precision(scores: Tensor, targets: Tensor) -> Tensor:
    """Return the average precision of each label, float64 (labels,), or NaN for labels without a positive image.

    The average precision is the sum of the precisions at all thresholds, weighted by the increase of the recall. Images
    with equal scores have the same threshold.

    Args:
        scores: (N, labels). Larger scores denote more probable labels.
        targets: 0 or 1, (N, labels).
    """
    true, count, last, _ = _ranked(scores, targets)
    reached = torch.where(last, true, 0).cummax(0).values
    before = torch.cat([reached.new_zeros(1, reached.shape[1]), reached[:-1]])
    gain = torch.where(last, true - before, 0)
    return (gain * true / count).sum(0) / true[-1].where(true[-1] > 0, torch.nan)


def best_thresholds(logits: Tensor, targets: Tensor) -> list[float]:
    """Return the threshold of the probability of each label that maximizes its F1.

    A threshold is the midpoint between two adjacent probabilities. If several thresholds reach the same F1, the highest
    is returned. The threshold of labels without a positive image is 0.5.
    """
    true, count, last, order = _ranked(logits, targets)
    f1 = torch.where(last, 2 * true / (count + true[-1]), -1)
    at = f1.argmax(0)
    probabilities = logits.double().sigmoid().gather(0, order)
    following = torch.cat([probabilities[1:], probabilities.new_zeros(1, probabilities.shape[1])])
    middle = (probabilities.gather(0, at[None]) + following.gather(0, at[None]))[0] / 2
    found = torch.where(true[-1] > 0, middle, DEFAULT_THRESHOLD).clamp(1e-6, 1 - 1e-6)
    values: list[float] = found.tolist()
    return values


def _ranked(scores: Tensor, targets: Tensor) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Sort each label by descending score.

    Return the number of true positives in the first images (N, labels), the number of these images (N, 1), True for
    the last of several images with the same score, and the order.
    """
    ranked, order = scores.double().sort(dim=0, descending=True, stable=True)
    true = (targets > 0).double().gather(0, order).cumsum(0)
    count = torch.arange(1, len(scores) + 1, dtype=torch.float64)[:, None]
    last = torch.ones_like(true, dtype=torch.bool)
    last[:-1] = ranked[1:] != ranked[:-1]
    return true, count, last, order


def r2(predicted: Tensor, true: Tensor) -> Tensor:
    """Return the coefficient of determination of each target, float64 (targets,).

    The result is 1 for exact predictions, and 0 for constant targets that are not predicted exactly.
    """
    errors = (predicted - true).square().sum(0)
    spread = (true - true.mean(0)).square().sum(0)
    exact = torch.where(errors == 0, 1.0, 0.0).double()
    return torch.where(spread > 0, 1 - errors / spread.where(spread > 0, 1.0), exact)
