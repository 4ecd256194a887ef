"""Tests of the order of the images, which depends only on counters."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.data import (
    CounterSampler,
)


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
