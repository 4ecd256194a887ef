"""Tests of label files: formats, columns, splits, classes, several labels, numbers, and all errors."""

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
from efficient_ft.data import ImageData, class_count, missing_data, open_data, read_data
from efficient_ft.data.label_forms import FORMS
from efficient_ft.data.listing import Listing
from tests.data.pictures import SPEC, epoch_of, picture, save

Write = Callable[..., Path]


@pytest.fixture
def write(tmp_path: Path) -> Write:
    """Write the images of the column `file` and a label file, and return the folder."""

    def make(rows: Sequence[Sequence[Any]], name: str = "labels.csv", header: Sequence[str] = (), **also: Any) -> Path:
        header = list(header) or ["file", "label"]
        at = header.index(also.get("image", header[0]))
        for seed, row in enumerate(rows):
            path = tmp_path / also.get("folder", "") / f"{row[at]}{also.get('extension', '')}"
            if str(row[at]) and not path.exists():
                save(path, seed)
        with open(tmp_path / name, "w", newline="", encoding="utf-8") as file:
            if name.endswith(".jsonl"):
                file.writelines(json.dumps(dict(zip(header, row, strict=True))) + "\n" for row in rows)
            else:
                delimiter = "\t" if name.endswith(".tsv") else also.get("delimiter", ",")
                csv.writer(file, delimiter=delimiter).writerows([header, *rows])
        return tmp_path

    return make


def config_of(root: Path, task: str = "classification", file: Any = "labels.csv", **settings: Any) -> DataConfig:
    of_data = {key: settings.pop(key) for key in ("splits", "on_corrupt", "follow_links") if key in settings}
    labels = LabelsConfig(file=file, **settings)
    labels._task = task
    return DataConfig(name="labels", root=str(root), labels=labels, num_workers=0, batch_size=4, **of_data)


def read(root: Path, task: str = "classification", **settings: Any) -> Listing:
    found = read_data(config_of(root, task, **settings))
    assert isinstance(found, Listing)
    return found


def rows_of(counts: dict[str, int], *more: Any) -> list[list[Any]]:
    return [[f"{name}_{i}.jpg", name, *more] for name, count in counts.items() for i in range(count)]


def labels_of(listing: Listing) -> dict[str, Any]:
    """Return the labels of all images, keyed by file name."""
    parts = [part for part in (listing.train, listing.val, listing.test) if part is not None]
    return {Path(str(p)).name: y.tolist() for one in parts for p, y in zip(one.images, one.labels, strict=True)}


@pytest.mark.parametrize("name", ["labels.csv", "labels.tsv", "labels.jsonl"])
def test_a_table_in_each_format(write: Write, name: str) -> None:
    root = write(rows_of({"dog": 10, "cat": 5}), name)
    found = read(root, file=name)
    assert found.class_names == ["cat", "dog"]
    assert (len(found.train), found.val, len(found.test or ())) == (12, None, 3)
    assert labels_of(found) == {
        **{f"dog_{i}.jpg": 1 for i in range(10)},
        **{f"cat_{i}.jpg": 0 for i in range(5)},
    }
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


ROWS = rows_of({"a": 3, "b": 3})


@pytest.mark.parametrize(
    ("task", "rows", "settings", "message"),
    [
        ("classification", [*ROWS, ["a_0.jpg", "b"]], {}, r"line 8: .* a_0\.jpg has the label 'b', but the label 'a' in"
         r" labels\.csv, line 2\. Keep one of the rows\. For several labels per image, set task=multilabel"),
        ("regression", [["0.jpg", 1], ["0.jpg", 2]], {}, r"line 3: .* has the label 2\.0, but the label 1\.0"),
        ("classification", [*ROWS, ["c.jpg", ""]], {}, r"line 8: no label in column 'label'\. Correct the row"),
        ("classification", [*ROWS, ["", "a"]], {}, r"line 8: no image in column 'file'"),
        ("classification", [*ROWS, ["c.jpg", "ab"]], {"classes": ["a", "b"]}, r"line 8: the label 'ab' is missing from"
         r" the class list \(data\.labels\.classes\), which contains a, b\..* Add the class to the list"),
        ("classification", ROWS, {"classes": ["a", "b", "c"]}, r"The train split has no image of the class 'c' \(1"),
        ("classification", [*ROWS, ["c.jpg", "c"]], {}, r"1 class has a single training image: c\. Each class needs"),
        ("classification", rows_of({"a": 3}), {}, r"contains only the class 'a'\. At least two are required"),
        ("classification", ROWS, {"label": "species"}, r"the column 'species' \(data\.labels\.label\) does not exist\."
         r" The columns are file, label\."),
        ("classification", ROWS, {"split": "part"}, r"the column 'part' \(data\.labels\.split\) does not exist\. The"),
        ("classification", ROWS, {"label": ["file", "label"]}, r"data\.labels\.label must be one column if each"
         r" image has one class, .* set task=multilabel"),
        ("classification", ROWS, {"separator": "|"}, r"data\.labels\.separator must be null with one label"),
        ("regression", [["0.jpg", "tall"]], {"label": "label"}, r"line 2: the target in column 'label' must be a"
         r" number, got tall"),
        ("regression", [["0.jpg", "1e999"]], {"label": "label"}, r"line 2: the target .* must be finite, got inf"),
        ("regression", [["0.jpg", "nan"]], {"label": "label"}, r"line 2: no target in column 'label' \('nan'\)\. Corr"),
        ("classification", [["0.jpg", "NA"]], {}, r"no label in column 'label' \('NA'; data\.labels\.missing\)\. Corr"),
        ("regression", [["0.jpg", "1_0"]], {"label": "label"}, r"line 2: the target .* must be a number, got 1_0"),
        ("classification", ROWS, {"splits": {"train": "a"}}, r"data\.splits must be null without a split column"),
    ],
)  # fmt: skip
def test_errors(write: Write, task: str, rows: list[list[Any]], settings: dict[str, Any], message: str) -> None:
    root = write(rows)
    with pytest.raises(UserError, match=message):
        read(root, task, **settings)


def test_files_that_do_not_exist(write: Write) -> None:
    root = write(ROWS)
    with pytest.raises(UserError, match=r"data\.labels\.file must be a file .* contains labels\.csv\. Did you mean"):
        read(root, file="label.csv")
    assert "the folder that contains the label file" in str(missing_data(config_of(root / "nowhere")))
    (root / "a_1.jpg").unlink()
    with pytest.raises(UserError, match=r"line 3: the image a_1\.jpg does not exist in .*1 such row.*on_corrupt=skip"):
        read(root)
    found = read(root, on_corrupt="skip")
    assert "1 row is left out: the image does not exist." in found.notes
    (root / "sub").mkdir()
    (root / "sub" / "labels.csv").write_text("file,label\n../b_0.jpg,a\n")
    with pytest.raises(UserError, match="outside of this folder"):
        read(root / "sub")


def test_a_column_that_cannot_be_recognized(write: Write) -> None:
    root = write([["0.jpg", "a", "b"]], header=["photograph", "x", "z"], image="photograph")
    with pytest.raises(
        UserError, match=r"the column with the labels cannot be recognized\. The columns are photograph, x"
    ):
        read(root)
    root = write([["zero", "a"]], header=["w", "label"], extension=".jpg")
    with pytest.raises(UserError, match=r"the column with the image files cannot be recognized.*labels\.image=NAME"):
        read(root)


def test_a_file_without_a_header_is_rejected(write: Write) -> None:
    def headerless(rows: list[list[Any]], extension: str = ".jpg") -> Path:
        root = write(rows, extension=extension)
        lines = (root / "labels.csv").read_text().splitlines()[1:]
        (root / "labels.csv").write_text("\n".join(lines) + "\n")
        return root

    root = headerless(rows_of({"a": 3, "b": 3}, "train"), "")
    message = (
        r"first line is read as column names, but 'a_0\.jpg' is an image file\. If the first line contains data, set"
    )
    for label in (None, "label"):
        with pytest.raises(UserError, match=rf"{message} data\.labels\.names=\[file,label,split\]\."):
            read(root, label=label)
    assert len(read(root, names=["file", "label", "split"], split="none").train) == 4
    root = headerless([["photo", 0.5], ["id1", 1.5]])
    with pytest.raises(UserError, match=r"'0\.5' is a number\. If .* data\.labels\.names=\[file,label\]\."):
        read(root, "regression")
    root = headerless([[f"id{i}", i / 4] for i in range(8)])
    with pytest.raises(UserError, match=r"'id0' is the name of an image\. If .* data\.labels\.names=\[file,label\]\."):
        read(root, image="id0", label="0.0")
    with pytest.raises(UserError, match=r"image files cannot be recognized.* data\.labels\.names=\[file,label\]\."):
        read(root)
    with pytest.raises(
        UserError, match=r"'label' \(data\.labels\.label\) does not exist.* data\.labels\.names=\[file,"
    ):
        read(root, label="label")


def test_labels_that_differ_only_in_spelling_are_reported(write: Write) -> None:
    found = read(write(rows_of({"cat": 4, "Cat": 3, "dog": 2})))
    assert found.class_names == ["Cat", "cat", "dog"]
    assert found.warnings == [
        "Some labels differ only in case, quotes or zeros: 'Cat' (3) and 'cat' (4). Each of these labels is a separate"
        " class. If they are the same class, correct the label file."
    ]
    opened = open_data(config_of(write(rows_of({"cat": 4, "Cat": 3}))), SPEC, 3)
    assert opened.summary().warnings[0].startswith("Some labels differ only in case")
    assert read(write(rows_of({"cat": 4, "Cat": 3})), classes=["cat", "Cat"]).warnings == []
    assert read(write(rows_of({"5": 2, "05": 2}))).warnings


def test_whole_numbers_are_sorted_by_value(write: Write) -> None:
    root = write(rows_of({"10": 2, "9": 2, "-1": 2}))
    assert read(root).class_names == ["-1", "9", "10"]
    assert labels_of(read(root))["10_0.jpg"] == 2
    assert read(root, "multilabel").class_names == ["-1", "9", "10"]
    assert read(write(rows_of({"10": 2, "9": 2, "a": 2}))).class_names == ["10", "9", "a"]


def test_rows_with_too_few_cells_are_counted_before_their_split_is_read(write: Write) -> None:
    root = write(rows_of({"a": 3, "b": 3}, "train"), header=["file", "label", "split"])
    with open(root / "labels.csv", "a") as file:
        file.write("a_0.jpg\n")
    with pytest.raises(UserError, match=r"line 8: 1 cell for 3 columns\. Correct the row"):
        read(root)
    for splits in (None, {"train": "train"}):
        found = read(root, on_corrupt="skip", splits=splits)
        assert "1 row is left out: 1 cell for 3 columns." in found.notes


def test_absolute_paths_below_a_relative_root(write: Write, monkeypatch: pytest.MonkeyPatch) -> None:
    root = write(rows_of({"a": 3, "b": 3}), folder="set")
    rows = [[root / "set" / name, label] for name, label in rows_of({"a": 3, "b": 3})]
    table = "\n".join(f"{path},{label}" for path, label in [("file", "label"), *rows, ("a_0.jpg", "a")])
    (root / "set" / "labels.csv").write_text(table)
    (root / "link").symlink_to(root / "set")
    monkeypatch.chdir(root)
    for folder in ("set", "./set", "link"):
        found = read(Path(folder))
        assert len(labels_of(found)) == 6
        assert "1 row repeats an earlier row." in found.notes or folder == "link"
    (root / "set" / "labels.csv").write_text(table.replace(str(root / "set" / "b_0.jpg"), str(root / "x" / "b_0.jpg")))
    save(root / "x" / "b_0.jpg", 1)
    with pytest.raises(
        UserError, match=r"which is outside of this folder\. Remove the path from the lists, or set data"
    ):
        read(Path("set"))


def test_unused_columns_and_the_files_of_splits_are_named(write: Write) -> None:
    root = write([[f"{i}.jpg", "ab"[i % 2], i // 4] for i in range(8)], header=["file", "label", "fold"])
    assert read(root).notes[1] == "Columns of labels.csv: images in 'file', labels in 'label' (data.labels)."
    root = write([[f"{i}.jpg", "ab"[i % 2], i // 4] for i in range(8)], "v.csv", header=["file", "label", "is_train"])
    found = read(root, file={"train": "v.csv"}, image="file", label="label")
    note = "Columns of v.csv: images in 'file', labels in 'label', not used: 'is_train' (data.labels)."
    assert found.notes == [note]
    assert found.origins == {"train": "v.csv", "test": "a fifth of v.csv, held out"}
    root = write(rows_of({"a": 2, "b": 2}))
    write([["x.jpg", "a"], ["y.jpg", "b"]], "t.csv")
    assert read(root, file={"train": "labels.csv", "test": "t.csv"}).origins == {"train": "labels.csv", "test": "t.csv"}


def test_many_numbers_as_classes_are_reported(write: Write) -> None:
    with pytest.raises(UserError, match=r"a single training image: .* 8 different numbers, .* set task=regression\."):
        read(write([[f"{i}.jpg", i / 2] for i in range(8)]))
    root = write([[f"{i}.jpg", i // 2] for i in range(60)])
    assert any("30 different numbers, from 0 to 29, and each number is a class" in note for note in read(root).notes)
    root = write([[f"{i}.jpg", i % 10] for i in range(60)])
    assert not any("different numbers" in note for note in read(root).notes)


def test_flags_other_than_0_and_1(write: Write) -> None:
    root = write([["0.jpg", 1, 2], ["1.jpg", 0, 1]], header=["file", "a", "b"])
    with pytest.raises(UserError, match=r"line 2: column 'b' must contain 0 or 1, got 2\. Write 0 if"):
        read(root, "multilabel", label=["a", "b"])
    root = write([["0.jpg", 1, -1], ["1.jpg", 0, 1]], header=["file", "a", "b"])
    with pytest.raises(UserError, match=r"must contain 0 or 1, got -1\. Replace -1 with 0\."):
        read(root, "multilabel", label=["a", "b"])
    root = write([["0.jpg", 1, ""], ["1.jpg", 0, 1]], header=["file", "a", "b"])
    with pytest.raises(UserError, match=r"must contain 0 or 1, got an empty cell\."):
        read(root, "multilabel", label=["a", "b"])
