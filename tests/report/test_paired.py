"""Tests of the paired comparison of two rows of a study."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from efficient_ft.record.results import correct_samples
from efficient_ft.report.paired import paired_difference


def runs(*correct: Any, seeds: tuple[int, ...] = (1, 2, 3)) -> list[dict[str, Any]]:
    pairs = zip(seeds, correct, strict=False)
    return [{"seed": seed, "correct": correct_samples([bool(c) for c in one])} for seed, one in pairs]


@pytest.mark.slow
def test_the_interval_of_one_seed_is_that_of_the_normal_distribution() -> None:
    generator = np.random.default_rng(1)
    base, ours = generator.random(600) < 0.8, generator.random(600) < 0.75
    found = paired_difference(runs(ours), runs(base))
    each = 100 * (ours.astype(float) - base)
    half = 1.96 * each.std() / math.sqrt(600)
    assert found is not None
    assert found.points == pytest.approx(each.mean())
    assert (found.low, found.high) == pytest.approx((each.mean() - half, each.mean() + half), abs=0.4)


def test_pairing_removes_what_the_rows_have_in_common() -> None:
    generator = np.random.default_rng(2)
    base = generator.random((3, 600)) < 0.8
    ours = base.copy()
    ours[:, :6] = ~ours[:, :6]
    found = paired_difference(runs(*ours), runs(*base))
    assert found is not None
    assert found.high - found.low < 2.5, "the interval of unpaired rows is about 6 points wide"


def test_seeds_that_differ_widen_the_interval() -> None:
    base = np.ones((3, 400), dtype=bool)
    ours = base.copy()
    ours[0, :80] = False  # 20 points in one seed
    found = paired_difference(runs(*ours), runs(*base))
    assert found is not None
    assert found.points == pytest.approx(-20 / 3)
    assert found.low < -12
    assert found.high == pytest.approx(0, abs=1e-9)
    assert str(found).startswith("−6.7 [−")


def test_only_common_seeds_and_images_are_compared() -> None:
    base = runs([1, 1, 0, 0], [1, 1, 1, 1])
    assert paired_difference(runs([1, 0, 0, 0], seeds=(2,)), base)[0] == -75  # type: ignore[index]
    assert paired_difference(runs([1, 0, 0, 0], seeds=(7,)), base) is None
    assert paired_difference(runs([1, 0, 0], seeds=(2,)), base) is None
    assert paired_difference([{"seed": 1}], base) is None


def test_rows_are_not_compared_over_fewer_seeds_than_their_means() -> None:
    base = runs([1, 1, 0, 0], [1, 1, 1, 1])
    ours = runs([1, 0, 0, 0], [1, 1, 1, 0])
    del ours[0]["correct"]
    assert paired_difference(ours, base) is None
    assert paired_difference(ours[1:], base) is not None
