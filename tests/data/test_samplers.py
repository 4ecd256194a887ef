"""Tests of the samplers, whose order depends only on counters."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.data.samplers import BalancedSampler, CounterSampler, class_shares


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 60), world=st.integers(1, 7), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 99))
def test_shares_are_the_order_of_a_single_process_dealt_out(size: int, world: int, seed: int, epoch: int) -> None:
    single = CounterSampler(size, seed)
    single.set_epoch(epoch)
    order = list(single)
    assert sorted(order) == [(epoch, index) for index in range(size)]
    for rank in range(world):
        sampler = CounterSampler(size, seed, rank, world)
        sampler.set_epoch(epoch)
        assert list(sampler) == order[rank::world]
        assert len(sampler) == len(order[rank::world])


@settings(max_examples=300, deadline=None)
@given(size=st.integers(1, 300), world=st.integers(1, 7), batch=st.integers(1, 30))
def test_all_processes_have_as_many_batches_and_none_of_one_image(size: int, world: int, batch: int) -> None:
    shares = [len(CounterSampler(size, 0, rank, world, batch_size=batch)) for rank in range(world)]
    assert len({-(-share // batch) for share in shares}) == 1
    each = size // world
    if 0 < each < batch:
        assert sum(shares) == size
    assert size - sum(shares) < 2 * world, "no more is left out than it takes"
    if batch > 1 and each > batch:
        assert all(share % batch != 1 for share in shares)
    # Except at the end of the epoch, the batches of all processes together equal the batches of a single process.
    if world * batch > 1 and each % batch not in (0, 1):
        assert sum(shares) == size


@settings(max_examples=40, deadline=None)
@given(size=st.integers(1, 40), world=st.integers(1, 5))
def test_evaluation_sees_every_image_once(size: int, world: int) -> None:
    samplers = [CounterSampler(size, 0, rank, world, shuffle=False) for rank in range(world)]
    seen = [index for sampler in samplers for _, index in sampler]
    assert sorted(seen) == list(range(size))
    assert [len(list(s)) for s in samplers] == [len(s) for s in samplers]


@given(size=st.integers(1, 40), start=st.integers(0, 50))
def test_start_leaves_out_what_was_seen_once(size: int, start: int) -> None:
    sampler = CounterSampler(size, 3)
    whole = list(sampler)
    sampler.start = start
    sampler.set_epoch(0)  # Lightning calls this after the state is restored
    assert len(sampler) == size
    assert list(sampler) == whole[start:]
    assert list(sampler) == whole


def test_epochs_and_seeds_differ() -> None:
    def order(seed: int, epoch: int) -> list[int]:
        sampler = CounterSampler(50, seed)
        sampler.set_epoch(epoch)
        return [index for _, index in sampler]

    assert order(0, 0) == order(0, 0)
    assert len({tuple(order(s, e)) for s in range(3) for e in range(3)}) == 9


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
