"""Tests of layouts of text data sets: split names, parts of files, nested class folders and data.splits."""

from __future__ import annotations

import gzip
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.core.errors import SettingError, UserError
from tests.data.text_sets import class_files, json_lines, open_set, printed, table, write_all
from tests.models.text_models import sentences

TRAIN, TEST = table(20), table(6, seed=1)


@pytest.mark.parametrize(
    ("files", "splits"),
    [
        ({"Train.csv": TRAIN, "TEST.csv": TEST}, {"train": 18, "val": 2, "test": 6}),
        ({"training.tsv": table(20, "\t"), "Validation.tsv": table(6, "\t", 1)}, {"train": 20, "val": 6}),
        ({"sms_train.csv": TRAIN, "sms_test.csv": TEST}, {"train": 18, "val": 2, "test": 6}),
        ({"train.csv.gz": gzip.compress(TRAIN.encode()), "dev.csv": TEST}, {"train": 20, "val": 6}),
        (class_files("Training", count=5) | class_files("Testing"), {"train": 8, "val": 2, "test": 6}),
        (class_files("train.v1", count=5) | class_files("test.v1"), {"train": 8, "val": 2, "test": 6}),
        ({"train/a.csv": TRAIN, "test/b.jsonl": json_lines([{"text": "a", "label": "fruit"}])},
         {"train": 18, "val": 2, "test": 1}),
        ({"only.csv": TRAIN}, {"train": 14, "val": 2, "test": 4}),
    ],
)  # fmt: skip
def test_splits_are_recognized_by_their_names(tmp_path: Path, files: dict[str, Any], splits: dict[str, int]) -> None:
    data = open_set(write_all(tmp_path, files))
    assert data.class_names == ["fruit", "metal"]
    assert data.splits == splits


def test_numbered_parts_are_joined_in_order(tmp_path: Path) -> None:
    rows = [{"text": text, "label": label} for text, label in sentences(20)]
    parts = {f"train-0000{k}-of-00002.jsonl": json_lines(rows[10 * k : 10 * k + 10]) for k in range(2)}
    data = open_set(write_all(tmp_path, {**parts, "validation-00000-of-00001.jsonl": json_lines(rows[:4])}))
    assert data._parts["train"].texts == [(row["text"],) for row in rows]
    assert "2 files train-… are concatenated in order." in printed(data)
    (tmp_path / "train-00000-of-00002.jsonl").unlink()
    with pytest.raises(UserError, match=r"1 of 2 parts of train\. Part 0 is missing\..*data\.splits="):
        open_set(tmp_path)


def test_the_rows_and_lines_of_each_split_are_printed(tmp_path: Path) -> None:
    text = printed(open_set(write_all(tmp_path, {"train.csv": TRAIN, "test.csv": TEST, "notes.csv": "a,b\n1,2\n"})))
    assert "train.csv (20 rows in 21 lines)" in text
    assert "test.csv (6 rows in 7 lines)" in text
    assert "not used: in no split: notes.csv (1)" in text


def test_the_setting_names_files_and_folders(tmp_path: Path) -> None:
    files = {"a.csv": TRAIN, "b.csv": table(8, seed=2), **class_files("new")}
    data = open_set(write_all(tmp_path, files), splits={"train": ["a.csv", "b.csv"], "test": "new"})
    assert data.splits == {"train": 26, "val": 2, "test": 6}
    with pytest.raises(SettingError, match=r"data\.splits\.train must be a folder or file .* Did you mean 'a\.csv'"):
        open_set(tmp_path, splits={"train": "aa.csv"})
    with pytest.raises(SettingError, match=r"data\.splits must be null if data\.root is a file"):
        open_set(tmp_path / "a.csv", splits={"train": "a.csv"})


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.csv": TRAIN, "b.csv": TEST},
         r"a\.csv \(20 rows\), b\.csv \(6 rows\).*'data\.splits=\{train: a\.csv, test: b\.csv\}'.*train: \[a\.csv, b"),
        ({"train.csv": TRAIN, "train/fruit/1.txt": "a"}, r"all denote the train split.*data\.splits="),
        ({"train.csv": TRAIN, "dev.csv": TEST, "eval.csv": TEST}, r"all denote the val split.*val: \[dev\.csv, eval"),
        ({"test.csv": TEST, "reviews.csv": TRAIN}, r"test\.csv, but no training texts\..*train: reviews\.csv, test: t"),
        ({"test.csv": TEST}, r"no training texts.*'data\.splits=\{train: test\.csv\}'"),
        ({"train.csv": TRAIN, "validation_matched.csv": TEST},
         r"validation_matched\.csv may denote a val split.*val: validation_matched\.csv\}'.*\{train: train\.csv\}'"),
        ({"data.csv": TRAIN, **class_files()}, r"data\.csv and folders of \.txt files.*train: data\.csv.*n: \."),
        (class_files("2019") | class_files("2020"), r"2020 contain the same subfolders: fruit, metal.*train: \[.*2019"),
        (class_files("train", "a") | class_files("train", "b") | class_files("test"),
         r"b contain the same sub.*train: \[\"?train/a\"?, \"?train/b\"?\], test: test.*train: train, test: test"),
        (class_files() | class_files("more", classes=("stone", "wood")), r"depths: directly in fruit, metal, and in"),
        (class_files("en", "train") | class_files("de", "train"), r"separate splits.*data\.root=.*/de\."),
        ({"x/train.csv": TRAIN, "x/test.csv": TEST}, r"is x, which contains test\.csv, train\.csv\. Set data\.root="),
        ({"x/train.csv": TRAIN, "docs/readme.md": "a"}, r"are in the folder x: train\.csv\. Set data\.root=.*/x\."),
        (class_files("x", "train") | class_files("x", "test"), r"x, which contains test, train\. Set data\.root=.*/x"),
        (class_files("train", "train") | class_files("test", "test"),
         r"only folder, train.*'data\.splits=\{train: \"?train/train\"?, test: \"?test/test\"?\}'"),
        ({"train/1.txt": "a", "train/2.txt": "b", "test/3.txt": "c"}, r"2 \.txt files, but no class folders"),
        (class_files() | {"stone/a.pdf": "x"}, r"folders without \.txt files: stone\."),
        ({"train.txt": "__label__a x"}, r"no texts in class folders. Found: train\.txt"),
        ({"train.parquet": b"PAR1"}, r"Found: train\.parquet\..* a file of rows \(\.csv, \.tsv or \.jsonl\)"),
        ({"train.csv": TRAIN, "test.csv": "text\na\n"}, r"test\.csv: the column 'label'.*splits=\{train: train\.csv"),
        ({"train.csv": TRAIN, "test.csv": ""}, r"test\.csv contains no rows"),
        ({"train/a.csv": TRAIN, "train/b.csv": TRAIN}, r"several files: a\.csv, b\.csv.*data\.splits="),
    ],
)  # fmt: skip
def test_unclear_layouts_are_refused_with_their_readings(tmp_path: Path, files: dict[str, Any], message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_set(write_all(tmp_path, files))


def test_a_choice_between_readings_is_followed(tmp_path: Path) -> None:
    write_all(tmp_path, class_files("2019") | class_files("2020"))
    inner = open_set(tmp_path, splits={"train": ["2019", "2020"]})
    assert (inner.class_names, sum(inner.splits.values())) == (["fruit", "metal"], 12)
    assert open_set(tmp_path, splits={"train": "."}).class_names == ["2019", "2020"]


def test_unlabeled_folders_and_loose_files_are_left_out(tmp_path: Path) -> None:
    files = class_files("train", count=5) | class_files("test") | class_files("train", classes=["unsup"])
    data = open_set(write_all(tmp_path, files | {"train/urls.txt": "x", "train/fruit/x.feat": "1", "vocab": "y"}))
    assert data.class_names == ["fruit", "metal"]
    text = printed(data)
    for reason in ("unlabeled (unsup/) (3)", "outside of class folders in train (.txt) (1)", "not .txt (.feat) (1)"):
        assert reason in text


def test_files_without_extension_are_texts_and_inner_folders_belong_to_their_class(tmp_path: Path) -> None:
    files = {
        f"20news-{split}/{name}/{k}": f"{name} {k}" for split in ("train", "test") for name in "ab" for k in range(4)
    }
    data = open_set(write_all(tmp_path / "news", files))
    assert data.splits == {"train": 6, "val": 2, "test": 8}
    assert "Files without an extension" in printed(data)
    files = class_files("rec", classes=["autos"]) | class_files("sci", classes=["space"])
    data = open_set(write_all(tmp_path / "tree", files))
    assert data.class_names == ["rec", "sci"]
    assert "Texts in subfolders of the class folders (for example, autos) belong to these classes" in printed(data)
    data = open_set(write_all(tmp_path / "mixed", class_files() | {"fruit/sour/1.txt": "lemon"}))
    assert "Texts in subfolders of fruit (for example, sour) belong to the class of the outer folder" in printed(data)


def test_a_test_file_next_to_the_file_that_is_read_is_noted(tmp_path: Path) -> None:
    write_all(tmp_path, {"train.csv": TRAIN, "test.csv": TEST})
    assert f"Files next to train.csv are not used: test.csv. To use all files, set data.root={tmp_path}." in printed(
        open_set(tmp_path / "train.csv")
    )


def test_links_that_lead_nowhere_are_left_out_and_pipes_are_refused(tmp_path: Path) -> None:
    import os

    write_all(tmp_path, {"train.csv": TRAIN})
    (tmp_path / "test.csv").symlink_to("gone.csv")
    assert "broken links (test.csv) (1)" in printed(open_set(tmp_path))
    os.mkfifo(tmp_path / "pipe.csv")
    with pytest.raises(UserError, match="neither a file nor a folder"):
        open_set(tmp_path / "pipe.csv")


def test_folders_named_like_parts_of_a_data_set_are_no_classes_without_a_setting(tmp_path: Path) -> None:
    root = write_all(tmp_path, class_files(classes=("trainA", "testB"), count=4))
    with pytest.raises(UserError, match=r"the folders testB, trainA. These folders look like parts of a data") as error:
        open_set(root)
    assert "'data.splits={train: .}'" in str(error.value)
    assert open_set(root, splits={"train": "."}).class_names == ["testB", "trainA"]
