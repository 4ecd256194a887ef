"""Tests of the metrics of classifiers, compared with direct computations in float64."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch.nn import functional as F

from efficient_ft.core.input_spec import IGNORED
from efficient_ft.record.class_results import class_results, confusion_matrix, confusions, precisions, recalls
from efficient_ft.record.files import json_text
from efficient_ft.task import Classification, Segmentation, total_weight
from efficient_ft.task.class_metrics import reliability


def some_logits(samples: int, classes: int, seed: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    targets = (torch.rand(samples, generator=generator) ** 2 * classes).long()  # rare and absent classes
    logits = torch.randn(samples, classes, generator=generator) + F.one_hot(targets, classes)
    return logits, targets


def reference(logits: Tensor, targets: Tensor) -> dict[str, float]:
    """Compute each metric class by class, with loops in float64."""
    x, y = logits.double().numpy(), targets.numpy()
    classes, guess = x.shape[1], x.argmax(1)
    recall, f1 = [], []
    for c in range(classes):
        both, true, found = ((y == c) & (guess == c)).sum(), (y == c).sum(), (guess == c).sum()
        if true:
            recall.append(both / true)
        if true or found:
            precision, rate = both / found if found else 0.0, both / true if true else 0.0
            f1.append(2 * precision * rate / (precision + rate) if both else 0.0)
    probabilities = np.exp(x - x.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    confidence, error = probabilities.max(1), 0.0
    for b in range(15):
        inside = (confidence > b / 15) & (confidence <= (b + 1) / 15)
        if inside.any():
            gap = (guess == y)[inside].mean() - confidence[inside].mean()
            error += inside.mean() * abs(gap)
    found = {"accuracy": (guess == y).mean(), "balanced_accuracy": np.mean(recall), "macro_f1": np.mean(f1)}
    found["calibration_error"] = error
    if classes > 5:
        found["top5_accuracy"] = np.mean([y[i] in np.argsort(-x[i])[:5] for i in range(len(y))])
    return {name: float(value) for name, value in found.items()}


@settings(max_examples=25, deadline=None)
@given(samples=st.integers(1, 80), classes=st.integers(2, 12), seed=st.integers(0, 10**6), batch=st.integers(1, 30))
def test_metrics_equal_a_computation_class_by_class(samples: int, classes: int, seed: int, batch: int) -> None:
    logits, targets = some_logits(samples, classes, seed)
    scores = Classification().scores(classes, local=True)
    for start in range(0, samples, batch):
        scores.update(logits[start : start + batch], targets[start : start + batch])
    assert scores.compute() == pytest.approx(reference(logits, targets), abs=1e-6)
    outcomes = scores.outcomes()
    assert outcomes is not None
    bins = reliability(outcomes.confidence, outcomes.right)
    results = class_results(outcomes.targets, outcomes.predicted, classes, bins)
    matrix = np.zeros((classes, classes), dtype=int)
    for true, guess in zip(targets.tolist(), logits.argmax(1).tolist(), strict=True):
        matrix[true, guess] += 1
    assert (confusion_matrix(results) == matrix).all()
    assert (results["support"], results["predicted"]) == (matrix.sum(1).tolist(), matrix.sum(0).tolist())
    assert recalls(results) == {c: matrix[c, c] / matrix[c].sum() for c in range(classes) if matrix[c].any()}
    assert precisions(results) == {c: matrix[c, c] / matrix[:, c].sum() for c in range(classes) if matrix[:, c].any()}
    sizes = [one.samples for one in confusions(results)]
    assert sizes == sorted(sizes, reverse=True)
    assert scores.correct().tolist() == (logits.argmax(1) == targets).tolist()  # type: ignore[union-attr]
    scores.reset()
    assert scores.outcomes() is None


def test_metrics_of_training_keep_only_counts() -> None:
    logits, targets = some_logits(200, 8, 3)
    scores = Classification().scores(8)
    scores.update(logits, targets)
    assert scores.outcomes() is None
    expected = reference(logits, targets)
    assert scores.compute() == pytest.approx({k: expected[k] for k in ("accuracy", "balanced_accuracy", "macro_f1")})


def test_a_confidence_at_the_limit_of_a_bin_belongs_to_the_lower_bin() -> None:
    bins = reliability(np.array([0.0, 1 / 15, 0.0667, 1.0, 0.98]), np.array([False, True, True, True, False]))
    assert bins.samples.tolist() == [2, 1, *[0] * 11, 0, 2]
    assert bins.error() == pytest.approx((abs(1 - 1 / 15) + abs(1 - 0.0667) + abs(1 - 1.98)) / 5)


def test_a_thousand_classes_stay_small() -> None:
    generator = np.random.default_rng(0)
    targets = np.repeat(np.arange(1000), 50)
    wrong = generator.random(len(targets)) < 0.25
    predicted = np.where(wrong, generator.integers(0, 1000, len(targets)), targets)
    results = class_results(targets, predicted, 1000, reliability(np.full(len(targets), 0.9), ~wrong))
    assert len(confusions(results)) > 10_000
    assert len(json_text(results, indent=2)) < 200_000


# ---------------------------------------------------------------------------------------------------- weighted loss
def test_the_weighted_loss_is_the_weighted_mean() -> None:
    logits, targets = some_logits(40, 6, 1)
    weights = torch.rand(6, generator=torch.Generator().manual_seed(0)) + 0.1
    each = -logits.double().log_softmax(1).gather(1, targets[:, None])[:, 0]
    own = weights.double()[targets]
    expected = (own * each).sum() / own.sum()
    assert float(Classification().loss(logits, targets, class_weights=weights)) == pytest.approx(float(expected))
    assert float(total_weight(targets, weights)) == pytest.approx(float(own.sum()))
    soft = F.one_hot(targets, 6).float()  # the targets of MixUp
    assert float(total_weight(soft, weights)) == pytest.approx(float(own.sum()))
    losses = [Classification().loss(logits, of, 0.1, class_weights=weights) for of in (soft, targets)]
    assert float(losses[0]) == pytest.approx(float(losses[1]))
    mixed = 0.3 * soft + 0.7 * soft.roll(1, 0)
    expected = -(mixed.double() * weights.double() * logits.double().log_softmax(1)).sum() / (mixed @ weights).sum()
    assert float(Classification().loss(logits, mixed, class_weights=weights)) == pytest.approx(float(expected))


def test_the_weighted_loss_of_masks_ignores_pixels_without_a_label() -> None:
    generator = torch.Generator().manual_seed(0)
    logits, weights = torch.randn(2, 3, 4, 5, generator=generator), torch.tensor([0.2, 1.0, 3.0])
    targets = torch.randint(0, 3, (2, 4, 5), generator=generator)
    targets[0, :2] = IGNORED
    log = logits.double().log_softmax(1)
    total = weight = 0.0
    for b, i, j in np.ndindex(2, 4, 5):
        if targets[b, i, j] != IGNORED:
            w = float(weights[targets[b, i, j]])
            total, weight = total - w * float(log[b, targets[b, i, j], i, j]), weight + w
    assert float(Segmentation().loss(logits, targets, class_weights=weights)) == pytest.approx(total / weight)
    assert float(total_weight(targets, weights)) == pytest.approx(weight)
    empty = torch.full_like(targets, IGNORED)
    assert float(Segmentation().loss(logits, empty, class_weights=weights)) == 0.0
