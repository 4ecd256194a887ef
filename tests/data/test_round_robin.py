"""Tests of alternating data sets: counters alone determine the order of the batches."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import BatchSampler

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data import CounterSampler, RoundRobinData, open_data
from efficient_ft.data.round_robin import RoundRobinSampler
from tests.data.pictures import SPEC, save, truncate


def round_robin(
    sizes: dict[str, tuple[int, int]], grad_accum_steps: int = 1, rank: int = 0, world: int = 1
) -> RoundRobinSampler:
    """Return a sampler of several tasks. `sizes` maps each task to its number of images and its batch size."""
    batches = {
        task: BatchSampler(CounterSampler(images, 7, rank, world), batch, False)
        for task, (images, batch) in sizes.items()
    }
    return RoundRobinSampler(batches, grad_accum_steps)


SIZES = st.dictionaries(
    st.sampled_from("abcd"), st.tuples(st.integers(1, 12), st.integers(1, 5)), min_size=2, max_size=4
)


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, grad_accum_steps=st.integers(1, 3))
def test_tasks_take_turns_and_every_set_is_gone_through_again_and_again(
    sizes: dict[str, tuple[int, int]], grad_accum_steps: int
) -> None:
    sampler = round_robin(sizes, grad_accum_steps)
    rounds = max(math.ceil(math.ceil(images / batch) / grad_accum_steps) for images, batch in sizes.values())
    seen: dict[str, list[tuple[int, int]]] = {task: [] for task in sizes}
    for epoch in range(3):
        sampler.set_epoch(epoch)
        found = list(sampler)
        assert len(found) == len(sampler) == rounds * grad_accum_steps * len(sizes)
        tasks = [task for task, _ in found]
        assert tasks == [task for _ in range(rounds) for task in sizes for _ in range(grad_accum_steps)]
        for task, keys in found:
            seen[task] += keys
    for task, (images, batch) in sizes.items():
        expected: list[tuple[int, int]] = []
        one = CounterSampler(images, 7)
        while len(expected) < len(seen[task]):
            one.set_epoch(len(expected) // images)
            expected += list(one)
        assert seen[task] == expected[: len(seen[task])]
        assert len(seen[task]) >= images, "the largest set is seen once in an epoch"
        assert batch


@settings(max_examples=60, deadline=None)
@given(sizes=SIZES, grad_accum_steps=st.integers(1, 3), epoch=st.integers(0, 4), data=st.data())
def test_it_continues_wherever_it_was(
    sizes: dict[str, tuple[int, int]], grad_accum_steps: int, epoch: int, data: st.DataObject
) -> None:
    whole = round_robin(sizes, grad_accum_steps)
    whole.set_epoch(epoch)
    expected = list(whole)
    at = data.draw(st.integers(0, len(whole)))
    resumed = round_robin(sizes, grad_accum_steps)
    resumed.set_epoch(epoch)
    resumed.start = at
    assert list(resumed) == expected[at:]
    assert resumed.start == 0
    assert list(resumed) == expected  # `start` applies only once


def test_two_processes_have_the_same_turns_and_share_the_images() -> None:
    sizes = {"a": (8, 2), "b": (6, 1)}
    shares = [list(round_robin(sizes, rank=rank, world=2)) for rank in (0, 1)]
    assert [task for task, _ in shares[0]] == [task for task, _ in shares[1]] == ["a", "b"] * 3
    of_b = [{key for task, keys in share for key in keys if task == "b"} for share in shares]
    assert of_b[0].isdisjoint(of_b[1])
    assert {index for share in of_b for _, index in share} == set(range(6))


def task_configs(tmp_path: Path, sizes: dict[str, int]) -> dict[str, DataConfig]:
    """Write image folders with `sizes` training images per class. The tasks have two, three, … classes."""
    made = {}
    for number, (name, images) in enumerate(sizes.items()):
        for label in range(2 + number):
            for i in range(images):
                save(tmp_path / name / "train" / f"{name}{label}" / f"{i}.png", seed=100 * number + 10 * label + i)
            save(tmp_path / name / "val" / f"{name}{label}" / "v.png", seed=label)
        made[name] = DataConfig(name="folder", root=str(tmp_path / name), batch_size=4, num_workers=0)
    return made


@pytest.mark.parametrize("workers", [0, pytest.param(2, marks=pytest.mark.slow)])
def test_batches_are_those_of_each_set_whatever_the_workers(tmp_path: Path, workers: int) -> None:
    configs = {
        name: config.model_copy(update={"num_workers": workers if name == "b" else 0})
        for name, config in task_configs(tmp_path, {"a": 6, "b": 3}).items()
    }
    parts = {name: open_data(config, SPEC, 3) for name, config in configs.items()}
    data = RoundRobinData(parts, 1)
    assert data.num_classes == {"a": 2, "b": 3}
    assert data.class_names == {"a": ["a0", "a1"], "b": ["b0", "b1", "b2"]}
    loader = data.train_loader()
    loader.sampler.set_epoch(0)  # type: ignore[attr-defined]
    found = list(loader)
    assert [task for _, _, task in found] == ["a", "b"] * 3
    for name, part in parts.items():
        once = part.train_loader()
        own = list(once)
        if name == "b":  # the third batch starts a new pass because the incomplete batch is dropped
            once.sampler.set_epoch(1)  # type: ignore[attr-defined]
            own.append(next(iter(once)))
        mine = [(images, labels) for images, labels, task in found if task == name]
        for (images, labels), (x, y) in zip(mine, own, strict=True):
            assert torch.equal(images, x)
            assert torch.equal(labels, y)
    assert [len(of) for of in data.eval_loaders("val")] == [1, 1]


def test_what_cannot_be_read_is_named(tmp_path: Path) -> None:
    configs = task_configs(tmp_path, {"a": 2, "b": 2})
    data = RoundRobinData({name: open_data(config, SPEC, 3) for name, config in configs.items()}, 1)
    for file in (tmp_path / "b" / "train").rglob("*.png"):
        truncate(file)
    with pytest.raises(UserError, match="b/train"):
        list(data.train_loader())


def test_notes_say_whose_they_are(tmp_path: Path) -> None:
    configs = task_configs(tmp_path, {"a": 2, "b": 2})
    configs["a"] = configs["a"].model_copy(update={"batch_size": 5})
    report = RoundRobinData({name: open_data(config, SPEC, 3) for name, config in configs.items()}, 1).report()
    assert "a: Each batch contains all 4 training images, which are fewer than data.batch_size=5." in report["notes"]
    assert {note[:3] for note in report["notes"]} == {"a: ", "b: "}
    assert {task: of["splits"] for task, of in report["tasks"].items()} == {
        "a": {"train": 4, "val": 2},
        "b": {"train": 6, "val": 3},
    }
