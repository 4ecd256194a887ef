"""Tests of label files: errors, and what a run reports about rows, columns and classes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.data import missing_data, open_data
from tests.data.label_files import Write, config_of, labels_of, read, rows_of
from tests.data.pictures import SPEC, save

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
