"""Tests of stratified splits."""

from __future__ import annotations

from collections import Counter

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.data.file_list import Paths
from efficient_ft.data.listing import Listing, Samples, stratified_split


@settings(max_examples=60, deadline=None)
@given(
    labels=st.lists(st.integers(0, 5), min_size=1, max_size=80),
    fraction=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**32 - 1),
)
def test_splits_are_stratified_disjoint_and_repeatable(labels: list[int], fraction: float, seed: int) -> None:
    samples = Samples(Paths(str(i) for i in range(len(labels))), np.asarray(labels, dtype=np.int64))
    kept, out = stratified_split(samples, fraction, seed)
    assert sorted([*kept.images, *out.images], key=int) == list(samples.images)
    for label, total in Counter(labels).items():
        held = int((out.labels == label).sum())
        assert abs(held - total * fraction) <= 1
        assert (held == 0) == (total == 1)
        assert held < total
    again = stratified_split(samples, fraction, seed)
    assert list(again[1].images) == list(out.images)
    for part in (kept, out):
        assert [labels[int(i)] for i in part.images] == part.labels.tolist()


def test_a_new_image_in_one_class_moves_none_of_another() -> None:
    def held(labels: list[int]) -> set[str]:
        names = [f"{label}-{labels[:i].count(label)}" for i, label in enumerate(labels)]
        return set(stratified_split(Samples(Paths(names), np.asarray(labels, dtype=np.int64)), 0.3, 7)[1].images)

    before, after = held([0] * 20 + [1] * 20), held([0] * 21 + [1] * 20)
    assert {n for n in before if n[0] == "1"} == {n for n in after if n[0] == "1"}


def test_the_digest_tells_copies_with_other_images_apart_and_not_their_places(tmp_path):
    def listing(folder, sizes=(10, 20, 30), labels=(0, 1, 0), names=("a", "b")):
        (tmp_path / folder).mkdir(exist_ok=True)
        paths = []
        for i, size in enumerate(sizes):
            path = tmp_path / folder / f"{i}.jpg"
            path.write_bytes(b"x" * size)
            paths.append(str(path))
        return Listing(list(names), Samples(Paths(paths), np.asarray(labels)))

    digest = listing("one").digest()
    assert listing("two").digest() == digest
    assert len(digest) == 8
    others = [
        listing("sizes", sizes=(10, 21, 30)),
        listing("labels", labels=(0, 1, 1)),
        listing("names", names=("a", "c")),
        listing("fewer", sizes=(10, 20), labels=(0, 1)),
    ]
    split = listing("split")
    others.append(Listing(split.class_names, split.train.take(np.arange(2)), test=split.train.take(np.arange(2, 3))))
    assert len({digest, *(other.digest() for other in others)}) == 6


def test_the_digest_of_pixels_in_memory_is_of_their_values():
    pixels = np.zeros((3, 4, 4, 3), np.uint8)
    digest = Listing(["a"], Samples(pixels, np.zeros(3, np.int64))).digest()
    pixels[1, 2, 3, 0] = 1
    assert Listing(["a"], Samples(pixels, np.zeros(3, np.int64))).digest() != digest
