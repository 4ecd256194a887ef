"""Tests of the data summary, as lines and as a record: classes, samples and their origin, facts and warnings."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data import open_data
from efficient_ft.data.inspection import Inspection, SplitSummary, Summary, abridged, in_threads, spread

SPEC = InputSpec((32, 32), (0.5,) * 3, (0.5,) * 3)


def make(**changed: object) -> Summary:
    fields: dict = {
        "name": "images",
        "task": "classification",
        "noun": "image",
        "class_names": ["cat", "dog"],
        "splits": {"train": SplitSummary(5, "train/", np.array([2, 3])), "val": SplitSummary(1, "val/")},
        "best_split": "val",
        "inspection": Inspection({"examined": 5}, ["images: 32×32"], ["Two images are black."]),
    }
    return Summary(**(fields | changed))


def test_lines_state_classes_samples_origin_and_facts() -> None:
    summary = make(left_out={"not images: .txt": 3}, skipped={"a.jpg": "a.jpg: not readable.", "b.jpg": "b.jpg: …"})
    assert summary.lines() == [
        "data: images, classification, 2 classes: cat, dog",
        "  train: 5 images, 2 to 3 per class, train/",
        "  val: 1 image, val/",
        "  images: 32×32",
        "  not used: not images: .txt (3)",
        "  skipped: a.jpg and 1 more (not readable)",
    ]


def test_a_class_without_a_training_sample_is_a_warning() -> None:
    summary = make(splits={"train": SplitSummary(2, "", np.array([2, 0]))})
    assert summary.warnings == ["Two images are black.", "1 class has no training image: dog."]
    record = json.loads(json.dumps(summary.record()))
    assert record["splits"]["train"] == {"samples": 2, "origin": "", "per_class": [2, 0]}
    assert record["examined"] == 5
    assert record["warnings"] == summary.warnings


def test_many_names_are_abridged_and_control_characters_escaped() -> None:
    assert abridged([str(i) for i in range(100)]) == "0, 1, 2, 3, 4, 5, 6, 7, … (92 more)"
    assert len(abridged(["long" * 40, "b"])) < 100
    assert abridged(["a\nb", "c"]) == "a\\x0ab, c"


def test_an_opened_folder_states_where_its_samples_come_from(
    folders: Callable[..., Path], data_config: Callable[..., DataConfig]
) -> None:
    root = folders(train={"cat": 6, "dog": 4}, test={"cat": 1, "dog": 2})
    summary = open_data(data_config("folder", root=str(root), val_fraction=0.25), SPEC, 0).summary()
    assert [len(one.per_class) for one in summary.splits.values() if one.per_class is not None] == [2, 2, 2]
    assert {name: one.samples for name, one in summary.splits.items()} == {"train": 7, "val": 3, "test": 3}
    assert summary.splits["val"].origin == "held out of train (data.val_fraction=0.25)"


def test_the_sheet_has_every_class_before_a_second_sample_of_one(
    folders: Callable[..., Path], data_config: Callable[..., DataConfig]
) -> None:
    data = open_data(data_config("folder", root=str(folders(a=9, b=9, c=9)), val_fraction=0.2), SPEC, 0)
    (pixels, labels), indices = data.training_batch(5)
    assert pixels.shape == (5, 3, 32, 32)
    assert sorted(labels.tolist()[:3]) == [0, 1, 2]
    assert len(set(indices)) == 5
    assert len(data.training_batch(1000)[1]) == data.splits["train"]


def test_unreadable_samples_are_left_out_of_the_sheet(
    folders: Callable[..., Path], data_config: Callable[..., DataConfig]
) -> None:
    root = folders(a=4, b=4)
    for path in (root / "a").iterdir():
        path.write_bytes(b"no image")
    data = open_data(data_config("folder", root=str(root), val_fraction=0.2), SPEC, 0)
    (_, labels), _ = data.training_batch(4)
    assert set(labels.tolist()) == {1}
    for path in (root / "b").iterdir():
        path.write_bytes(b"no image")
    with pytest.raises(UserError, match="not readable as an image"):
        data.training_batch(4)


def test_indices_are_spread_and_threads_keep_the_order() -> None:
    assert spread(10, 3).tolist() == [0, 4, 9]
    assert spread(2, 5).tolist() == [0, 1]
    assert spread(0, 5).tolist() == []
    assert list(in_threads(lambda x: x * 2, range(50))) == list(range(0, 100, 2))
