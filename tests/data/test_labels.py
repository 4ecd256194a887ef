"""Tests of label files: formats, columns, splits, classes, several labels and numbers."""

from __future__ import annotations

import csv
import json
import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from efficient_ft.config import DataConfig
from efficient_ft.config.schema import LabelsConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data import ImageData, class_count, open_data
from efficient_ft.data.label_forms import FORMS
from efficient_ft.data.listing import Listing
from tests.data.label_files import Write, config_of, labels_of, read, rows_of
from tests.data.pictures import SPEC, epoch_of, picture, save


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels.jsonl"])
def test_a_table_in_each_format(write: Write, name: str) -> None:
    root = write(rows_of({"dog": 10, "cat": 5}), name)
    found = read(root, file=name)
    assert found.class_names == ["cat", "dog"]
    assert (len(found.train), found.val, len(found.test or ())) == (12, None, 3)
    assert labels_of(found) == {**{f"dog_{i}.jpg": 1 for i in range(10)}, **{f"cat_{i}.jpg": 0 for i in range(5)}}
    assert found.notes == [f"Columns of {name}: images in 'file', labels in 'label' (data.labels)."]
    assert class_count(config_of(root, file=name)) == 2


def test_parquet_requires_pyarrow(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(rows_of({"dog": 4, "cat": 4}))
    (root / "labels.parquet").write_bytes(b"PAR1")
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UserError, match=r"is a Parquet file, which requires pyarrow .* or save the table as \.csv"):
        read(root, file="labels.parquet")


@pytest.fixture
def write_parquet(write: Write) -> Callable[..., Path]:
    """Write eight images and a Parquet file with the given columns, and return the folder."""
    pyarrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    files = [f"{i}.jpg" for i in range(8)]

    def make(**columns: Any) -> Path:
        root = write([[file, "a"] for file in files])
        table = pyarrow.table({"file": files, **columns})
        parquet.write_table(table, root / "labels.parquet")
        return root

    return make


def test_the_types_of_parquet_columns(write_parquet: Callable[..., Path]) -> None:
    pyarrow = pytest.importorskip("pyarrow")
    root = write_parquet(
        label=[["a"], ["a", "b"]] * 4,
        n=range(8),
        tiny=[i * 2.0**-70 for i in range(8)],
        kind=pyarrow.array(list("aabbaabb")).dictionary_encode(),
        flag=[True, False] * 4,
        day=pyarrow.array(range(8), pyarrow.timestamp("ns")),
        __index_level_0__=range(8),
    )
    file = "labels.parquet"
    assert labels_of(read(root, "multilabel", file=file))["3.jpg"] == [1, 1]
    assert labels_of(read(root, "regression", file=file, label="n"))["3.jpg"] == [3.0]
    assert labels_of(read(root, "regression", file=file, label="tiny"))["3.jpg"] == [3 * 2.0**-70]
    assert labels_of(read(root, file=file, label="kind"))["3.jpg"] == 1
    assert read(root, file=file, label="flag").class_names == ["False", "True"]
    (note,) = read(root, file=file, label="kind").notes
    assert note.endswith("not used: 'label', 'n', 'tiny', 'flag' and 1 more (data.labels).")


def test_parquet_columns_with_image_data_are_not_read(write_parquet: Callable[..., Path]) -> None:
    root = write_parquet(image=[{"bytes": b"x", "path": "0.jpg"}] * 8, label=list("ab") * 4, raw=[b"\xff"] * 8)
    found = read(root, file="labels.parquet", image="file")
    assert [note.partition(".")[0] for note in found.notes[:2]] == [
        "The column 'image' (struct<bytes: binary, path: string>) is not read",
        "The column 'raw' (binary) is not read",
    ]
    with pytest.raises(UserError, match=r"'image' .* does not exist\. The columns are file, label\..*separate files"):
        read(root, file="labels.parquet", image="image")


def test_missing_values_and_damage_in_parquet_files(write_parquet: Callable[..., Path]) -> None:
    root = write_parquet(label=[1, None, 2, 1, 2, 1, 2, float("nan")])
    with pytest.raises(UserError, match=r"labels\.parquet, row 2: no label in column 'label'"):
        read(root, file="labels.parquet")
    with pytest.raises(UserError, match=r"labels\.parquet, row 2: no target in column 'label'"):
        read(root, "regression", file="labels.parquet")
    found = read(root, file="labels.parquet", on_corrupt="skip")
    assert found.class_names == ["1", "2"]
    assert found.left_out == {}  # the label file lists the two images without a label
    (root / "labels.parquet").write_bytes((root / "labels.parquet").read_bytes()[:-9])
    with pytest.raises(UserError, match=r"cannot be read as Parquet .* Copy it again"):
        read(root, file="labels.parquet")


def test_the_same_batches_as_class_folders(
    folders: Callable[..., Path], data_config: Callable[..., DataConfig]
) -> None:
    root = folders(train={"cat": 10, "dog": 7, "eel": 4}, test={"cat": 3, "dog": 2, "eel": 1})
    files = sorted(root.rglob("*.jpg"), key=lambda path: path.name)  # a different order than the folders
    with open(root / "labels.csv", "w", newline="") as file:
        rows = [[path.relative_to(root), path.parent.name, path.parts[-3]] for path in files]
        csv.writer(file).writerows([["image_path", "species", "split"], *rows])
    pair = open_data(data_config("folder", root=str(root)), SPEC, 3), open_data(config_of(root), SPEC, 3)
    assert isinstance(pair[0], ImageData)
    assert isinstance(pair[1], ImageData)
    assert pair[0].class_names == pair[1].class_names
    assert pair[0].splits == pair[1].splits
    assert pair[0].report()["digest"] == pair[1].report()["digest"]
    for epoch in (0, 1):
        (images, labels), (others, same) = (epoch_of(one, epoch) for one in pair)
        assert torch.equal(images, others)
        assert torch.equal(labels, same)
    for split in ("val", "test"):
        for (images, labels), (others, same) in zip(*(one.eval_loader(split) for one in pair), strict=True):  # type: ignore[arg-type]
            assert torch.equal(images, others)
            assert torch.equal(torch.as_tensor(labels), torch.as_tensor(same))


def test_ids_without_extensions_in_a_subfolder(write: Write) -> None:
    rows = [[f"id{i}", "ab"[i % 2]] for i in range(10)]
    root = write(rows, header=["id", "breed"], folder="train", extension=".jpg")
    found = read(root, folder="train")
    assert labels_of(found)["id3.jpg"] == 1
    with pytest.raises(UserError, match=r"labels\.csv, line 2: the image id0 does not exist .*10 such rows.*=train"):
        read(root)
    save(root / "train" / "id0.png", 0)
    with pytest.raises(UserError, match=r"id0 could be id0\.jpg, id0\.png\. Add the file extension"):
        read(root, folder="train")


def test_images_that_are_not_listed_are_counted(write: Write) -> None:
    root = write(rows_of({"a": 4, "b": 4}))
    save(root / "extra.jpg", 99)
    assert read(root).left_out == {"images that the label file does not list": 1}


def test_splits_by_name_by_value_and_without_a_column(write: Write) -> None:
    rows = [[f"{i}.jpg", "ab"[i % 2], ("train", "Valid", "test_set")[i // 4]] for i in range(12)]
    root = write(rows, header=["file", "label", "set"])
    found = read(root)
    assert [len(part or ()) for part in (found.train, found.val, found.test)] == [4, 4, 4]
    assert len(read(root, split="none").train) == 10
    write([[*row[:2], i // 3] for i, row in enumerate(rows)], header=["file", "label", "fold"])
    found = read(root)
    assert any("column 'fold'" in note and "is not used" in note for note in found.notes)
    found = read(root, splits={"train": ["0", "1"], "test": "2"})
    assert (len(found.train), found.val, len(found.test or ())) == (6, None, 3)
    assert "3 rows are left out: data.splits does not list their split (3)." in found.notes
    with pytest.raises(UserError, match=r"line 2: the split '0' in column 'fold' .* is unknown\. Use the names train"):
        read(root, split="fold")
    with pytest.raises(SettingError, match=r"data\.splits must be a mapping to values of column 'fold'.*, got 7\."):
        read(root, splits={"train": "7"})
    with pytest.raises(UserError, match=r"lists no training images, but val images"):
        read(write([[*row[:2], "val"] for row in rows], header=["file", "label", "split"]))


def test_one_label_file_for_each_split(write: Write) -> None:
    root = write(rows_of({"a": 3, "b": 3}), "train.csv")
    write([["v0.jpg", "a"], ["v1.jpg", "b"]], "val.csv")
    found = read(root, file={"train": "train.csv", "val": "val.csv"})
    assert (len(found.train), len(found.val or ())) == (6, 2)
    write([["a_0.jpg", "a"]], "val.csv")
    with pytest.raises(UserError, match=r"val\.csv, line 2: the image a_0\.jpg is in the val split, but in the train"):
        read(root, file={"train": "train.csv", "val": "val.csv"})


def test_classes_from_a_list_a_file_and_ids(write: Write) -> None:
    root = write(rows_of({"1": 3, "0": 3}))
    assert read(root, classes=["cat", "dog"]).class_names == ["cat", "dog"]
    (root / "classes.txt").write_text("dog\ncat\n")
    found = read(root, classes="classes.txt")
    assert found.class_names == ["dog", "cat"]
    assert labels_of(found)["1_0.jpg"] == 1
    assert "The labels are read as ids of the class list (data.labels.classes)." in found.notes
    root = write(rows_of({"dog": 3, "cat": 3}))
    assert read(root, classes="classes.txt").class_names == ["dog", "cat"]
    with pytest.raises(SettingError, match=r"data\.labels\.classes must be a list of names, or a file .* no file"):
        read(root, classes="none.txt")


def test_several_labels_in_each_form(write: Write) -> None:
    expected = {"0.jpg": [1, 0, 1], "1.jpg": [0, 1, 0], "2.jpg": [0, 0, 0], "3.jpg": [1, 1, 0]}
    texts = ["big dog|owl", "cat", "", "big dog|cat"]

    def matrix(root: Path, **settings: Any) -> dict[str, Any]:
        found = read(root, "multilabel", **settings)
        assert found.train.labels.dtype == np.float32
        wanted = [found.class_names.index(name) for name in ("big dog", "cat", "owl")]
        return {name: [row[i] for i in wanted] for name, row in labels_of(found).items()}

    def rows(cells: Sequence[Any]) -> list[list[Any]]:
        return [[f"{i}.jpg", cell, "train" if i < 3 else "val"] for i, cell in enumerate(cells)]

    header = ["file", "tags", "split"]
    for separator in ("|", ";", ","):
        assert matrix(write(rows([text.replace("|", separator) for text in texts]), header=header)) == expected
    lists = [text.split("|") if text else [] for text in texts]
    assert matrix(write(rows(lists), "labels.jsonl", header), file="labels.jsonl") == expected
    assert matrix(write(rows([json.dumps(one) for one in lists]), header=header)) == expected
    assert matrix(write(rows([repr(one) for one in lists]), header=header)) == expected
    each = [[f"{i}.jpg", label, "train" if i < 3 else "val"] for i, one in enumerate(lists) for label in one or [""]]
    assert matrix(write(each, header=header)) == expected
    flags = [[f"{i}.jpg", "train" if i < 3 else "val", *expected[f"{i}.jpg"]] for i in range(4)]
    assert matrix(write(flags, header=["file", "split", "big dog", "cat", "owl"])) == expected


def cells_of(write: Write, *cells: str, **settings: Any) -> Listing:
    """Read a label file with two rows for each cell."""
    rows = [[f"{i}.jpg", text] for i, text in enumerate([*cells, *cells])]
    return read(write(rows, header=["image_name", "tags"]), "multilabel", **settings)


@pytest.mark.parametrize(
    "cells",
    [
        ["haze primary", "primary water", "haze water", "haze", "primary", "water"],
        ["animal water outdoor", "animal water", "bodypart", "metal indoor"],
        ["polar bear", "brown bear", "polar fox"],
    ],
)
def test_a_space_separates_labels_only_if_this_is_set(write: Write, cells: list[str]) -> None:
    with pytest.raises(
        UserError,
        match=rf"labels\.csv, column 'tags': '{cells[0]}' could be one label, or [23] labels separated by spaces\. If"
        r" each cell contains one label, set data\.labels\.separator=none\. If .* set data\.labels\.separator=space\.",
    ):
        cells_of(write, *cells)
    assert cells_of(write, *cells, separator="none").class_names == sorted(cells)
    words = sorted({word for cell in cells for word in cell.split()})
    for separator in ("space", " "):
        found = cells_of(write, *cells, separator=separator)
        assert found.class_names == words
        note = f"The labels of an image are separated by ' ', as in {cells[0]!r} (data.labels.separator)."
        assert note in found.notes


def test_the_run_prints_how_cells_are_read(write: Write) -> None:
    def note(*cells: str, **settings: Any) -> str:
        return cells_of(write, *cells, **settings).notes[0]

    each = "Each cell of column 'tags' contains one label, for example"
    assert note("bear", "sea lion") == f"{each} 'sea lion'. If spaces separate labels, set data.labels.separator=space."
    assert note("bear", "lion") == f"{each} 'bear'."
    assert note("a|b", "a", separator=";") == f"No cell contains data.labels.separator=';'. {each} 'a|b'."
    assert note("a", "a; b") == "The labels of an image are separated by ';', as in 'a; b' (data.labels.separator)."
    assert note("['a', 'b']", "['a']") == "Each cell of column 'tags' contains a list of labels."
    root = write([[f"{i}.jpg", i % 2, 1] for i in range(4)], header=["file", "a", "b"])
    assert read(root, "multilabel").notes[0] == "Each label has a column with the values 0 and 1."


def test_different_separators_are_rejected(write: Write) -> None:
    with pytest.raises(
        UserError,
        match=r"column 'tags': the cells contain several separators: '\|' in 2 rows \('a\|b'\), ';' in 4 rows"
        r" \('a;b'\)\. Write all labels with one separator\. If .* set data\.labels\.separator to the separator\.",
    ):
        cells_of(write, "a|b", "a;b", "b;a")
    assert cells_of(write, "a|b", "a;b", separator="|").class_names == ["a", "a;b", "b"]
    with pytest.raises(
        UserError, match=r"""separated by '\|', but 'a b' could be one label, or 2 labels .* set '.*="\|"'\."""
    ):
        cells_of(write, "a|b", "a b")
    assert cells_of(write, "a|b", "a b", separator="|").class_names == ["a", "a b", "b"]
    assert cells_of(write, "big dog|cat", "dog").class_names == ["big dog", "cat", "dog"]


def test_targets_are_numbers(write: Write) -> None:
    root = write([[f"{i}.jpg", i / 2, -i] for i in range(10)], header=["file", "width", "height"])
    found = read(root, "regression", label=["width", "height"])
    assert found.class_names == ["width", "height"]
    assert labels_of(found)["3.jpg"] == [1.5, -3.0]
    assert found.train.labels.dtype == np.float64
    root = write([[f"{i}.jpg", i / 2] for i in range(10)], header=["file", "weight"])
    assert read(root, "regression").class_names == ["weight"]


def test_targets_are_reported_with_enough_digits(write: Write) -> None:
    root = write([[f"{i}.jpg", 1e9 + i] for i in range(20)], header=["file", "weight"])
    for i in range(4):  # re-encoded copies of the same scene, which have different targets
        picture(0, 90, 120).save(root / f"{i}.jpg", quality=95 - 5 * i)
    summary = open_data(config_of(root, "regression"), SPEC, 3).summary(thorough=True)
    assert f"data: {root}, regression, 1 target: weight" in summary.lines()
    (line,) = (line for line in summary.lines() if "targets in 'weight': 10000000" in line)
    assert len(set(re.findall(r"10000000[\d.]+", line))) == 3
    assert summary.inspection.facts["near_duplicates"]["images"] == 4
    assert not any("with different labels" in warning for warning in summary.warnings)


def test_images_are_held_out_of_each_group() -> None:
    labels = np.array([[1, 0], [1, 1], [1, 0], [0, 0], [1, 0]], dtype=np.float32)
    settings = LabelsConfig(file="labels.csv")
    assert FORMS["multilabel"](settings).groups(labels).tolist() == [0, 1, 0, 2, 0]
    groups = FORMS["regression"](settings).groups(np.arange(40.0)[::-1, None])
    assert np.bincount(groups).tolist() == [4] * 10
    assert groups[0] == 9
