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
        The difference in percentage points, or None if both rows have no common seed, or if the records of a common
        seed do not contain the correct samples of the same images. A difference over fewer seeds would not agree with
        the mean accuracies of the rows.
    """
    of_seed = {one["seed"]: one.get("correct", {"samples": 0}) for one in base}
    both = [(one.get("correct", {"samples": 0}), of_seed[one["seed"]]) for one in runs if one["seed"] in of_seed]
    if not both or any(ours["samples"] != theirs["samples"] or not ours["samples"] for ours, theirs in both):
        return None
    pairs = [(are_correct(ours), are_correct(theirs)) for ours, theirs in both]
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
