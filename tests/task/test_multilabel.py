"""Tests of multi-label classification against float64 references in NumPy."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from efficient_ft.task import MultiLabel
from efficient_ft.task.gathered import LabelScores, average_precision, best_thresholds
from efficient_ft.task.multilabel import asymmetric_loss


@pytest.fixture
def batch() -> tuple[Tensor, Tensor]:
    """Logits with equal values, and targets with a label that every image has and a label that no image has."""
    generator = torch.Generator().manual_seed(0)
    logits = (2 * torch.randn(40, 5, generator=generator)).round(decimals=0)
    targets = (torch.rand(40, 5, generator=generator) < 0.3).float()
    targets[:, 3], targets[:, 4] = 1, 0
    return logits, targets


def reference_precision(scores: np.ndarray, targets: np.ndarray) -> float:
    """Return the average precision as scikit-learn defines it: Σ (Rₙ − Rₙ₋₁) Pₙ over the distinct scores."""
    total, last = 0.0, 0.0
    for threshold in sorted(set(scores.tolist()), reverse=True):
        chosen = scores >= threshold
        true = float((chosen & (targets > 0)).sum())
        recall = true / float(targets.sum())
        total += (recall - last) * true / float(chosen.sum())
        last = recall
    return total


def f1(chosen: np.ndarray, targets: np.ndarray) -> float:
    true = float((chosen & (targets > 0)).sum())
    return 2 * true / max(float(chosen.sum() + targets.sum()), 1)


def test_binary_cross_entropy(batch: tuple[Tensor, Tensor]) -> None:
    logits, targets = batch
    x, y = logits.double().numpy(), targets.double().numpy()
    p = 1 / (1 + np.exp(-x))
    reference = -(y * np.log(p) + (1 - y) * np.log(1 - p)).mean()
    assert math.isclose(float(MultiLabel().loss(logits, targets)), reference, rel_tol=1e-6)
    assert float(MultiLabel().loss(logits, targets, 0.1)) == float(MultiLabel().loss(logits, targets))
    assert math.isclose(MultiLabel().chance_loss(5), float(MultiLabel().loss(0 * logits, targets)), rel_tol=1e-6)


@pytest.mark.parametrize(("positive", "negative", "margin"), [(0.0, 4.0, 0.05), (1.0, 2.0, 0.2), (1.0, 4.0, 0.0)])
def test_asymmetric_loss(batch: tuple[Tensor, Tensor], positive: float, negative: float, margin: float) -> None:
    logits, targets = batch[0].double() + 0.13, batch[1].double()
    logits.requires_grad_()
    x, y = logits.detach().numpy(), targets.numpy()

    def reference(x: np.ndarray) -> float:
        p = 1 / (1 + np.exp(-x))
        q = np.maximum(p - margin, 0)
        of_positive = (1 - p) ** positive * np.log(p)
        return float(-(y * of_positive + (1 - y) * q**negative * np.log(1 - q)).mean())

    loss = asymmetric_loss(logits, targets, positive, negative, margin)
    assert math.isclose(float(loss.detach()), reference(x), rel_tol=1e-12)
    (gradient,) = torch.autograd.grad(loss, logits)
    for at in [(0, 0), (3, 1), (7, 4), (12, 3)]:
        step = np.zeros_like(x)
        step[at] = 1e-6
        numeric = (reference(x + step) - reference(x - step)) / 2e-6
        assert math.isclose(float(gradient[at]), numeric, rel_tol=1e-4, abs_tol=1e-9)
    task = MultiLabel("asymmetric", positive, negative, margin)
    assert math.isclose(float(task.loss(logits.detach().float(), targets.float())), reference(x), rel_tol=1e-5)


@pytest.mark.parametrize("margin", [0.0, 0.05])
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 4.0])
def test_the_asymmetric_loss_of_certain_predictions_has_a_finite_gradient(gamma: float, margin: float) -> None:
    """In fp32, probabilities above 1 - 2^-24 are 1. A negative label with p < margin has a probability of exactly 0."""
    logits = torch.tensor([[18.0, -18.0, 60.0, -60.0, -3.2]] * 2, requires_grad=True)
    targets = torch.tensor([[1.0] * 5, [0.0] * 5])
    loss = asymmetric_loss(logits, targets, gamma, gamma, margin)
    (gradient,) = torch.autograd.grad(loss, logits)
    assert loss.isfinite()
    assert gradient.isfinite().all()


def test_without_exponents_and_margin_the_asymmetric_loss_is_the_cross_entropy(batch: tuple[Tensor, Tensor]) -> None:
    logits, targets = batch
    assert torch.allclose(asymmetric_loss(logits, targets, 0, 0, 0), MultiLabel().loss(logits, targets))


def test_average_precision_and_f1(batch: tuple[Tensor, Tensor]) -> None:
    logits, targets = batch
    x, y = logits.double().numpy(), targets.numpy()
    expected = [reference_precision(x[:, k], y[:, k]) for k in range(4)]
    found = average_precision(logits, targets).tolist()
    assert np.allclose(found[:4], expected, rtol=0, atol=1e-12)
    assert math.isnan(found[4])
    scores = LabelScores(5, local=True)
    for start in range(0, 40, 16):
        scores.update(logits[start : start + 16], targets[start : start + 16])
    metrics = scores.compute()
    assert next(iter(metrics)) == MultiLabel.metric
    assert math.isclose(metrics["mean_average_precision"], np.mean(expected), rel_tol=1e-12)
    assert math.isclose(metrics["f1_micro"], f1(x >= 0, y), rel_tol=1e-12)
    assert math.isclose(metrics["f1_macro"], np.mean([f1(x[:, k] >= 0, y[:, k]) for k in range(5)]), rel_tol=1e-12)
    assert set(scores.each_class()) == {0, 1, 2, 3}
    scores.reset()
    scores.update(logits, targets * 0)
    assert scores.compute()["mean_average_precision"] == 0


def test_thresholds_maximize_f1(batch: tuple[Tensor, Tensor]) -> None:
    logits, targets = batch
    thresholds = best_thresholds(logits, targets)
    p, y = logits.double().sigmoid().numpy(), targets.numpy()
    for k in range(4):
        best = max(f1(p[:, k] >= t, y[:, k]) for t in p[:, k])
        assert math.isclose(f1(p[:, k] >= thresholds[k], y[:, k]), best, rel_tol=1e-12)
        assert 0 < thresholds[k] < 1
    assert thresholds[4] == 0.5
    tuned = LabelScores(5, thresholds, local=True)
    tuned.update(logits, targets)
    expected = np.mean([f1(p[:, k] >= thresholds[k], y[:, k]) for k in range(5)])
    assert math.isclose(tuned.compute()["f1_macro"], expected, rel_tol=1e-12)
