"""Tests of the sampler that balances classes."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.data.balanced_sampler import BalancedSampler, class_shares


def keys_of(sampler: BalancedSampler, epoch: int) -> list[tuple[int, int]]:
    sampler.set_epoch(epoch)
    return list(sampler)


_SIZES = st.lists(st.integers(0, 30), min_size=1, max_size=12).filter(any)


@settings(max_examples=150, deadline=None)
@given(sizes=_SIZES, kind=st.sampled_from(["balanced", "sqrt"]), seed=st.integers(0, 99), epoch=st.integers(0, 10**5))
def test_an_epoch_draws_each_class_by_its_share(sizes: list[int], kind: str, seed: int, epoch: int) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    keys = keys_of(BalancedSampler(labels, kind, seed), epoch)
    assert len(keys) == len(labels)
    drawn = np.bincount(labels[[index for _, index in keys]], minlength=len(sizes))
    shares = class_shares(np.array(sizes), kind)
    roots = np.array([size**0.5 if kind == "sqrt" else float(size > 0) for size in sizes])
    np.testing.assert_allclose(shares, roots / roots.sum())
    assert (np.abs(drawn - shares * len(labels)) < 2).all()


@settings(max_examples=60, deadline=None)
@given(sizes=_SIZES, kind=st.sampled_from(["balanced", "sqrt"]), seed=st.integers(0, 99))
def test_the_samples_of_a_class_are_drawn_in_turn_with_new_views(sizes: list[int], kind: str, seed: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    sampler = BalancedSampler(labels, kind, seed)
    keys = [key for epoch in range(5) for key in keys_of(sampler, epoch)]
    assert len(set(keys)) == len(keys), "no view of a sample is drawn twice"
    counts = Counter(index for _, index in keys)
    assert set(keys) == {(turn, index) for index, number in counts.items() for turn in range(number)}
    for label in set(labels.tolist()):
        numbers = [counts[index] for index in np.flatnonzero(labels == label)]
        assert max(numbers) - min(numbers) <= 1


@settings(max_examples=60, deadline=None)
@given(sizes=_SIZES, world=st.integers(1, 4), epoch=st.integers(0, 20), start=st.integers(0, 40))
def test_processes_share_the_order_of_one_process(sizes: list[int], world: int, epoch: int, start: int) -> None:
    labels = np.repeat(np.arange(len(sizes)), sizes)
    order = keys_of(BalancedSampler(labels, "balanced", 1), epoch)
    for rank in range(world):
        sampler = BalancedSampler(labels, "balanced", 1, rank, world)
        sampler.start = start  # a resumed run continues with the next key
        assert keys_of(sampler, epoch) == order[rank::world][start:]
        assert keys_of(sampler, epoch) == order[rank::world]


def test_equal_classes_are_drawn_once_per_epoch() -> None:
    sampler = BalancedSampler(np.repeat(np.arange(4), 25), "balanced", 0)
    for epoch in range(3):
        assert sorted(keys_of(sampler, epoch)) == [(epoch, index) for index in range(100)]
    assert keys_of(sampler, 0) != keys_of(sampler, 1)
    assert [i for _, i in keys_of(sampler, 0)] != [i for _, i in keys_of(sampler, 1)]


@pytest.mark.parametrize("kind", ["balanced", "sqrt"])
def test_a_million_samples_are_fast(kind: str) -> None:
    sizes = np.maximum(1, 40_000 // np.arange(1, 1001) ** 1)
    sampler = BalancedSampler(np.repeat(np.arange(1000), sizes), kind, 0)
    turns, indices = sampler._keys(7)
    assert len(turns) == len(indices) == sizes.sum()
