"""Tests of split names: case, affixes, joint names of several splits, and the setting `data.splits`."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.config import DataConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.data.splits import part_names, places_of, show, split_of, splits_in


@pytest.mark.parametrize(
    ("name", "split"),
    [
        ("train", "train"), ("Training", "train"), ("TRAIN", "train"), ("train_set", "train"), ("trainset", "train"),
        ("TrainImages", "train"), ("seg_train", "train"), ("train2017", "train"), ("01-train", "train"),
        ("training_data", "train"), ("train (1)", "train"), ("trainingset", "train"),
        ("val", "val"), ("VALID", "val"), ("Validation", "val"), ("dev", "val"), ("eval", "val"), ("valset", "val"),
        ("Entrenamiento", "train"), ("训练集", "train"), ("Validación", "val"), ("Validierung", "val"),
        ("prueba", "test"), ("测试集", "test"), ("テスト", "test"),
        ("Test", "test"), ("TESTING", "test"), ("test_set", "test"), ("seg_test", "test"), ("testdata", "test"),
    ],
)  # fmt: skip
def test_names_denote_splits_in_any_case_and_with_affixes(name: str, split: str) -> None:
    assert split_of(name) == split


@pytest.mark.parametrize(
    "name", ["train_station", "test tube", "bullet-train", "cat", "devil", "trainer", "valley", "contest", "train_test"]
)
def test_names_of_things_denote_no_split(name: str) -> None:
    assert split_of(name) is None
    assert splits_in([name, "cat", "dog"]) == {}


def test_names_with_a_common_rest_denote_splits_together() -> None:
    names = ["asl_alphabet_train", "asl_alphabet_test", "notes"]
    assert splits_in(names) == {"asl_alphabet_train": "train", "asl_alphabet_test": "test"}
    assert splits_in(["train_station", "test_tube"]) == {}
    assert splits_in(["bus_train", "bus_training"]) == {}


@pytest.mark.parametrize(
    ("names", "parts"),
    [
        (["trainA", "testB", "cat"], ["trainA", "testB"]),
        (["train1", "fold_a", "fold 2", "Part-3", "batch_01", "split_b"], None),
        (["cat", "fold", "part_time", "set", "1", "a", "test_tube", "freight_train", "train_station"], []),
    ],
)
def test_names_of_parts_of_a_data_set(names: list[str], parts: list[str] | None) -> None:
    assert part_names(names) == (names if parts is None else parts)


def test_places_are_below_the_root_and_named_once(tmp_path: Path) -> None:
    for name in ("a", "b", "c d"):
        (tmp_path / name).mkdir()
    places = places_of(tmp_path, {"train": ["a", "b"], "test": "c d"})
    assert places == {"train": [tmp_path / "a", tmp_path / "b"], "test": [tmp_path / "c d"]}
    assert places_of(tmp_path, {"train": "."}) == {"train": [tmp_path]}


@pytest.mark.parametrize(
    ("chosen", "message"),
    [
        ({"test": "a"}, "with the training data"),
        ({"train": "aa"}, r"data.splits.train must be a folder or file in .*, got aa. It has a, b"),
        ({"train": ".."}, "a path below data.root"),
        ({"train": "a", "test": "a"}, "data.splits.test must be outside of .*a [(]train[)], got a"),
        ({"train": ".", "test": "a"}, "[(]train[)]"),
    ],
)
def test_mistakes_in_the_setting(tmp_path: Path, chosen: dict, message: str) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
    with pytest.raises(SettingError, match=message):
        places_of(tmp_path, chosen)


def test_the_setting_is_shown_as_hydra_reads_it() -> None:
    from hydra.core.override_parser.overrides_parser import OverridesParser

    chosen = {"train": ["fold 1", "fold2", "2019", "007"], "val": "True", "test": "Prüfung, neu"}
    (override,) = OverridesParser.create().parse_overrides([f"data.splits={show(chosen)}"])
    assert override.value() == chosen


def test_a_number_is_the_name_of_a_folder() -> None:
    settings = DataConfig(name="folder", splits={"train": [2019, "2020"], "test": 2021})
    assert settings.splits == {"train": ["2019", "2020"], "test": "2021"}
