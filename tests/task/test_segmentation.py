"""Tests of the loss and scores of segmentation against counts by hand, and of evaluation in windows."""

from __future__ import annotations

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.task import TASKS, Classification, Segmentation
from efficient_ft.task.segmentation import _starts

CLASSES = 4


def _case(seed: int, ignored: float = 0.2, size: tuple[int, int] = (6, 5)) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(3, CLASSES, *size, generator=generator, dtype=torch.float64)
    targets = torch.randint(0, CLASSES, (3, *size), generator=generator)
    targets[torch.rand(targets.shape, generator=generator) < ignored] = IGNORED
    return logits, targets


@given(seed=st.integers(0, 99), smoothing=st.sampled_from([0.0, 0.1]))
def test_the_loss_is_the_mean_over_labeled_pixels(seed: int, smoothing: float) -> None:
    logits, targets = _case(seed)
    log = logits.log_softmax(1)
    losses = []
    for b, y, x in (targets != IGNORED).nonzero().tolist():
        true = -log[b, targets[b, y, x], y, x]
        losses.append((1 - smoothing) * true - smoothing * log[b, :, y, x].mean())
    expected = torch.stack(losses).mean()
    torch.testing.assert_close(Segmentation().loss(logits, targets, smoothing), expected)


def test_a_batch_without_labels_has_no_loss_and_no_gradient() -> None:
    logits, targets = _case(0, ignored=1.1)
    loss = Segmentation().loss(logits.requires_grad_(), targets)
    assert loss == 0
    (gradient,) = torch.autograd.grad(loss, logits)
    assert not gradient.any()


def test_logits_are_brought_to_the_size_of_the_masks() -> None:
    logits, targets = _case(1, size=(8, 12))
    small = torch.nn.functional.avg_pool2d(logits, 4)
    whole = torch.nn.functional.interpolate(small, (8, 12), mode="bilinear")
    torch.testing.assert_close(Segmentation().loss(small, targets), Segmentation().loss(whole, targets))


@given(seed=st.integers(0, 99))
def test_scores_are_those_counted_by_hand_over_all_batches(seed: int) -> None:
    scores = Segmentation().scores(CLASSES)
    predicted, true = [], []
    for k in range(2):
        logits, targets = _case(100 * k + seed)
        scores.update(logits, targets)
        labeled = targets != IGNORED
        predicted += logits.argmax(1)[labeled].tolist()
        true += targets[labeled].tolist()
    found = scores.compute()
    overlaps = {}
    for c in range(CLASSES):
        both = sum(p == t == c for p, t in zip(predicted, true, strict=True))
        union = sum(c in (p, t) for p, t in zip(predicted, true, strict=True))
        if union:
            overlaps[c] = both / union
    assert next(iter(found)) == Segmentation.metric
    assert found["mean_iou"] == pytest.approx(sum(overlaps.values()) / len(overlaps))
    assert found["pixel_accuracy"] == pytest.approx(
        sum(p == t for p, t in zip(predicted, true, strict=True)) / len(true)
    )
    assert {k: v for k, v in found.items() if k.startswith("iou_")} == pytest.approx(
        {f"iou_{c}": v for c, v in overlaps.items()}
    )


def test_a_class_that_nobody_has_is_left_out_of_the_mean() -> None:
    scores = Segmentation().scores(5)
    targets = torch.tensor([[[0, 0, 1, IGNORED]]])
    scores.update(torch.nn.functional.one_hot(torch.tensor([[[0, 1, 1, 4]]]), 5).permute(0, 3, 1, 2).float(), targets)
    assert scores.compute() == pytest.approx({"mean_iou": 0.5, "pixel_accuracy": 2 / 3, "iou_0": 0.5, "iou_1": 0.5})
    scores.reset()
    scores.update(torch.zeros(1, 5, 1, 1), torch.zeros(1, 1, 1, dtype=torch.long))
    assert scores.compute()["mean_iou"] == 1


@given(length=st.integers(1, 200), window=st.integers(1, 80))
def test_windows_cover_everything_and_overlap(length: int, window: int) -> None:
    window = min(window, length)
    starts = _starts(length, window)
    assert starts[0] == 0
    assert starts[-1] == length - window
    steps = [b - a for a, b in pairwise(starts)]
    assert all(0 < step <= math.ceil(2 * window / 3) for step in steps)


@given(height=st.integers(4, 23), width=st.integers(4, 23))
def test_windows_of_a_network_that_sees_single_pixels_change_nothing(height: int, width: int) -> None:
    torch.manual_seed(0)
    network = nn.Conv2d(3, CLASSES, 1).double().requires_grad_(False)
    images = torch.randn(2, 3, height, width, dtype=torch.float64)
    found = Segmentation((7, 9)).evaluation_logits(network, images)
    torch.testing.assert_close(found, network(images))


def test_a_network_of_another_task_is_refused() -> None:
    with pytest.raises(UserError, match=r"Flatten must return logits of shape \(images, .*, width\), got \(2, 3\)"):
        Segmentation().logits(nn.Flatten(), torch.zeros(2, 3))
    with pytest.raises(UserError, match=r"Identity must return logits of shape \(images, .*\), got \(2, 3, 4, 4\)"):
        Classification().logits(nn.Identity(), torch.zeros(2, 3, 4, 4))
    assert list(TASKS) == ["classification", "segmentation", "text", "multilabel", "regression"]
