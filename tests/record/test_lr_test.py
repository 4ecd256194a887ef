"""Tests of the rule that suggests a learning rate, and of the file of a learning rate range test."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from pathlib import Path

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.record.lr_test import NAME, RangeTest, read_suggestion, smooth, suggest, write_lr_test


def of(loss: Callable[[float], float], noise: float = 0.0, steps: int = 100) -> RangeTest:
    """Return a test from 1e-6 to 1 whose losses are a function of log10 of the learning rate."""
    rates, draw = [10 ** (-6 + 6 * i / (steps - 1)) for i in range(steps)], random.Random(0)
    return RangeTest(rates, [loss(math.log10(rate)) + draw.gauss(0, noise) for rate in rates])


def lowest_at(place: float) -> Callable[[float], float]:
    """Return a loss that is constant below 10^(place - 2), and then a parabola with its minimum at 10^place."""
    return lambda here: 2 + min(2.0, (here - place) ** 2 / 2)


@pytest.mark.parametrize(("place", "lr"), [(-3.5, 1e-4), (-3.0, 3e-4), (-2.5, 1e-3), (-2.1, 3e-3)])
@pytest.mark.parametrize("noise", [0.0, 0.1])
def test_the_suggestion_is_a_third_of_the_rate_with_the_lowest_loss(place: float, lr: float, noise: float) -> None:
    found = suggest(of(lowest_at(place), noise))
    assert found.lr == pytest.approx(lr)
    assert found.exact is not None
    assert abs(math.log10(3 * found.exact) - place) < 0.2
    assert f"is lowest at a learning rate of {3 * found.exact:.2g}." in found.reason


def test_a_loss_that_still_falls_at_the_end_is_reported() -> None:
    assert "Repeat the test with a larger --to." in suggest(of(lambda here: -here)).reason


@pytest.mark.parametrize("loss", [lambda place: 3.0 + place, lambda place: 3.0])
def test_a_loss_that_does_not_fall_gives_no_suggestion(loss: Callable[[float], float]) -> None:
    found = suggest(of(loss, 0.2))
    assert found.lr is None
    assert "did not decrease by more than its noise" in found.reason


def test_the_smoothed_loss_is_not_delayed_and_keeps_constants() -> None:
    test = of(lowest_at(-3), steps=61)
    assert test.smoothed.index(min(test.smoothed)) == 30
    assert smooth(test.rates, [2.5] * 61) == pytest.approx([2.5] * 61)


def test_the_file_keeps_the_suggestion(tmp_path: Path) -> None:
    test = of(lowest_at(-3))
    assert write_lr_test(tmp_path, test, suggest(test), ["method=full"], {}) == tmp_path / NAME
    assert read_suggestion(tmp_path) == pytest.approx(3e-4)
    none = of(lambda place: 3.0 + place)
    write_lr_test(tmp_path, none, suggest(none), [], {})
    assert read_suggestion(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{}", "[1]", '{"suggestion": {"lr": "much"}}'])
def test_a_damaged_file_is_rejected(tmp_path: Path, text: str) -> None:
    (tmp_path / NAME).write_text(text)
    with pytest.raises(UserError, match=r"is missing or damaged\. Run the learning rate test again"):
        read_suggestion(tmp_path)
