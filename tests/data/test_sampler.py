"""The order of the images: counters decide, nothing else."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.data import (
    CounterSampler,
)


@settings(max_examples=80, deadline=None)
@given(size=st.integers(1, 60), world=st.integers(1, 7), seed=st.integers(0, 2**32 - 1), epoch=st.integers(0, 99))
def test_shares_cover_an_epoch_and_repeat_only_to_fill_up(size: int, world: int, seed: int, epoch: int) -> None:
    shares = []
    for rank in range(world):
        sampler = CounterSampler(size, seed, rank, world)
        sampler.set_epoch(epoch)
        shares.append(list(sampler))
        assert len(shares[-1]) == len(sampler) == -(-size // world)
        assert {e for e, _ in shares[-1]} == {epoch}
    together = [index for share in shares for _, index in share]
    assert set(together) == set(range(size))
    assert len(together) - size < world
    single = CounterSampler(size, seed)
    single.set_epoch(epoch)
    interleaved = [pair for row in zip(*shares, strict=True) for pair in row]
    assert interleaved[:size] == list(single)  # the same global order for any number of processes


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
    sampler.set_epoch(0)  # as Lightning does, after the state was restored
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
