"""Paired comparison of two rows of a study on the same test images and seeds."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from efficient_ft.record.results import are_correct

#: Number of bootstrap samples, and the probability that the interval covers.
RESAMPLES, LEVEL = 10_000, 0.95


class Difference(NamedTuple):
    """Difference between the test accuracies of two rows in percentage points, with a bootstrap interval."""

    points: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.points:+.1f} [{self.low:+.1f}…{self.high:+.1f}]".replace("-", "−")


def paired_difference(runs: Sequence[Mapping[str, Any]], base: Sequence[Mapping[str, Any]]) -> Difference | None:
    """Compare the runs of a row with the runs of the baseline that have the same seeds.

    The interval covers 95 % of the bootstrap samples. Each sample draws both the test images and the seeds with
    replacement. With few seeds, the interval underestimates the variation between seeds.

    Args:
        runs, base: records of `record.study.Records` with the entry ``correct``.

    Returns:
        The difference in percentage points, or None if no seed has two records of the same images.
    """
    of_seed = {one["seed"]: are_correct(one["correct"]) for one in base if "correct" in one}
    pairs = [
        (are_correct(one["correct"]), of_seed[one["seed"]])
        for one in runs
        if "correct" in one and len(of_seed.get(one["seed"], ())) == one["correct"]["samples"]
    ]
    if not pairs:
        return None
    # S seeds, N images, R bootstrap samples
    ours, theirs = (np.array(side, dtype=float) for side in zip(*pairs, strict=True))
    difference_SN = 100 * (ours - theirs)
    seeds, images = difference_SN.shape
    generator = np.random.default_rng(0)
    weights_RS = generator.multinomial(seeds, np.full(seeds, 1 / seeds), RESAMPLES) / seeds
    weights_RN = generator.multinomial(images, np.full(images, 1 / images), RESAMPLES) / images
    sampled_R = np.einsum("rn,rn->r", weights_RS @ difference_SN, weights_RN)
    low, high = np.quantile(sampled_R, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return Difference(float(difference_SN.mean()), float(low), float(high))
