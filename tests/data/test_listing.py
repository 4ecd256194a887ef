"""Stratified splits."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.data.listing import Samples, stratified_split


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
def test_splits_are_stratified_disjoint_and_repeatable(labels: list[int], fraction: float, seed: int) -> None:
    samples = Samples([str(i) for i in range(len(labels))], np.asarray(labels, dtype=np.int64))
    kept, out = stratified_split(samples, fraction, seed)
    assert sorted([*kept.images, *out.images], key=int) == samples.images
    for label, total in Counter(labels).items():
        held = int((out.labels == label).sum())
        assert abs(held - total * fraction) <= 1
        assert (held == 0) == (total == 1)
        assert held < total
    again = stratified_split(samples, fraction, seed)
    assert again[1].images == out.images
    for part in (kept, out):
        assert [labels[int(i)] for i in part.images] == part.labels.tolist()


def test_a_new_image_in_one_class_moves_none_of_another() -> None:
    def held(labels: list[int]) -> set[str]:
        names = [f"{label}-{labels[:i].count(label)}" for i, label in enumerate(labels)]
        return set(stratified_split(Samples(names, np.asarray(labels, dtype=np.int64)), 0.3, 7)[1].images)

    before, after = held([0] * 20 + [1] * 20), held([0] * 21 + [1] * 20)
    assert {n for n in before if n[0] == "1"} == {n for n in after if n[0] == "1"}
