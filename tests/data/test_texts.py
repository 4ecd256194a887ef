"""Tests of reading texts: files of rows, class folders, splits and all errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_ft.config.schema import DataConfig, TextConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data import TextData, class_count, missing_data, open_texts, read_data
from efficient_ft.data.published import TEXT_SETS
from efficient_ft.data.texts import TextListing, read_texts
from tests.models.text_models import tokenizer, write_texts

PLAIN = TextConfig()


def settings(root: Path, **changes: Any) -> DataConfig:
    return DataConfig(**{"name": "text_folder", "root": str(root), "num_workers": 0, "text": PLAIN, **changes})


def opened(root: Path, max_length: int = 32, **changes: Any) -> TextData:
    ours = Tokenizer(tokenizer().backend_tokenizer, ("input_ids", "attention_mask", "token_type_ids"), (0, "[PAD]"))
    return open_texts(settings(root, **changes), ours, max_length, seed=1)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def rows_of(listing: TextListing) -> list[tuple[str, str]]:
    """Return all pairs of text and class, sorted."""
    parts = [part for part in (listing.train, listing.val, listing.test) if part is not None]
    return sorted(
        (" | ".join(text), listing.class_names[label])
        for part in parts
        for text, label in zip(part.texts, part.labels, strict=True)
    )


ROWS = [(f"text, number {k}" if k % 3 else f'"{k}"', "odd" if k % 2 else "even") for k in range(20)]


@pytest.mark.parametrize("form", ["csv", "tsv", "jsonl", "folders"])
def test_every_form_holds_the_same_texts(tmp_path: Path, form: str) -> None:
    if form == "folders":
        root = tmp_path / "texts"
        for k, (text, label) in enumerate(ROWS):
            write(root / label / f"{k}.txt", text)
    elif form == "jsonl":
        lines = [json.dumps({"text": text, "label": label}) for text, label in ROWS]
        root = write(tmp_path / "texts.jsonl", "\n".join(lines))
    else:
        separator = {"csv": ",", "tsv": "\t"}[form]
        cells = [(text if form == "tsv" else '"' + text.replace('"', '""') + '"', label) for text, label in ROWS]
        lines = [separator.join(row) for row in [("text", "label"), *cells]]
        root = write(tmp_path / f"texts.{form}", "\n".join(lines))
    listing = read_texts(root, PLAIN)
    assert listing.class_names == ["even", "odd"]
    assert rows_of(listing) == sorted(ROWS)
    assert listing.test is not None
    assert len(listing.test) == 4, "a fifth of every class"
    assert listing.notes[0] == "4 of 20 texts are held out for testing. The held-out texts are the same for every seed."
    assert len(listing.notes) == (2 if form == "tsv" else 1), "in .tsv quotes are part of a text, which is noted"
    assert listing.origins["test"] == f"held out of {'class folders' if form == 'folders' else root.name}"
    assert class_count(settings(root)) == 2


def test_splits_are_those_of_the_files(tmp_path: Path) -> None:
    write_texts(tmp_path / "train.csv", 12)
    write(tmp_path / "dev.jsonl", '{"label": "fruit", "text": "a plum"}\n')
    write(tmp_path / "test" / "metal" / "1.txt", "zinc")
    listing = read_texts(tmp_path, PLAIN)
    assert [len(part) for part in (listing.train, listing.val, listing.test) if part] == [12, 1, 1]
    assert listing.val is not None
    assert listing.val.texts == [("a plum",)]
    data = opened(tmp_path)
    assert data.splits == {"train": 12, "val": 1, "test": 1}
    assert data.columns == 1


def test_pairs_and_other_columns(tmp_path: Path) -> None:
    text = "first,second,gold\n" + "".join(f"a{k},b{k},{k % 3}\n" for k in range(15))
    file = write(tmp_path / "pairs.csv", text)
    listing = read_texts(file, TextConfig(columns=["first", "second"], label="gold"))
    assert listing.class_names == ["0", "1", "2"]
    assert ("a4 | b4", "1") in rows_of(listing)
    data = opened(file, text=TextConfig(columns=["first", "second"], label="gold"))
    assert data.columns == 2
    inputs, _ = next(iter(data.eval_loader("test")))
    assert (inputs["token_type_ids"].amax(1) == 1).all(), "the second text of a pair has type 1"


def test_classes_that_are_numbers_are_in_their_order(tmp_path: Path) -> None:
    text = "text,label\n" + "".join(f"t{k},{k % 11}\n" for k in range(44))
    assert read_texts(write(tmp_path / "a.csv", text), PLAIN).class_names == [str(k) for k in range(11)]
    text = "text,label\n" + "".join(f"t{k},{('b', '2', 'inf', '10', 'a')[k % 5]}\n" for k in range(10))
    assert read_texts(write(tmp_path / "b.csv", text), PLAIN).class_names == ["2", "10", "a", "b", "inf"]


def test_training_is_shuffled_by_epoch_and_seed_alone(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts.csv", 60)

    def order(**changes: Any) -> list[list[int]]:
        loader = opened(file, batch_size=8, **changes).train_loader()
        found = []
        for epoch in range(2):
            loader.sampler.set_epoch(epoch)  # type: ignore[attr-defined]
            found.append([int(i) for inputs, _ in loader for i in inputs["input_ids"].sum(1)])
        return found

    first, second = order()
    assert order(num_workers=2) == [first, second]
    assert first != second


def test_long_texts_are_cut_and_said(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts.csv", 40)
    data = opened(file, max_length=8)
    assert "are truncated at model.max_length=8" in data.inspect().lines[0]
    assert "max_length" not in opened(file, max_length=32).inspect().lines[0]
    assert max(inputs["input_ids"].shape[1] for inputs, _ in data.train_loader()) == 8


def test_blank_lines_and_spaces_around_names_play_no_part(tmp_path: Path) -> None:
    file = write(tmp_path / "a.csv", "\n\n text , label\r\nx,1\r\n\r\ny,2\r\nz,1\r\nu,2\r\n")
    assert rows_of(read_texts(file, PLAIN)) == [("u", "2"), ("x", "1"), ("y", "2"), ("z", "1")]


def test_folders_hold_no_pairs(tmp_path: Path) -> None:
    write(tmp_path / "one" / "1.txt", "a")
    with pytest.raises(SettingError, match=r"data\.text\.columns must be a single column"):
        read_texts(tmp_path, TextConfig(columns=["a", "b"]))


def test_rows_that_cannot_be_used_stop_the_run_or_are_left_out(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts.csv", 20)
    with file.open("a") as opened_file:
        opened_file.write('" ",fruit\nan apple,\n')
    with pytest.raises(
        UserError, match=r"2 of 22 texts .*: an empty text ×1, no label ×1\. .* line 22: .*corrupt=skip"
    ):
        opened(file)
    data = opened(file, on_corrupt="skip")
    report = data.report()
    assert report["skipped_count"] == 2
    assert set(report["skipped"].values()) == {f"{file}, line 22: an empty text.", f"{file}, line 23: no label."}
    assert sum(data.splits.values()) == 20


def test_any_change_changes_the_digest(tmp_path: Path) -> None:
    file = write_texts(tmp_path / "texts.csv", 20)
    before = read_texts(file, PLAIN)
    file.write_text(file.read_text().replace("apple", "pear", 1))
    after = read_texts(file, PLAIN)
    assert before.digest() != after.digest()
    assert before.digest() == read_texts(write_texts(tmp_path / "again.csv", 20), PLAIN).digest()


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("a.csv", "text,class\nx,y\n", r"a\.csv: the column 'label' \(data\.text\.label\) .* are text, class"),
        ("a.csv", "texts,label\nx,y\n", r"the column 'text' \(data\.text\.columns\).* Did you mean 'texts'\?"),
        ("a.csv", "text,label\nx,y,z\n", r"line 2: 3 cells for 2 columns"),
        ("a.csv", "text,label\nx\n", r"line 2: 1 cell for 2 columns"),
        ("a.csv", 'text,label\na,b\n"x,y\n', r"line 3: the table cannot be read .* Quotes inside such a cell must"),
        ("a.csv", "text,label,label\nx,y,y\n", r"contains two columns 'label'\. Rename one"),
        ("a.jsonl", "[" * 100_000, r"line 1: the line is not valid JSON"),
        ("a.jsonl", '{"text": "a\\ud800", "label": 1}', r"no usable text for the train .*line 1: not valid Unicode"),
        ("a.csv", "text,label\n", r"contains no rows"),
        ("a.csv", "", r"contains no rows"),
        ("a.csv", "text,label\nx,one\ny,one\n", r"contains only one class, 'one'"),
        ("a.jsonl", '{"text": "x", "label": 1}\n{"text": ', r"line 2: the line is not valid JSON"),
        ("a.jsonl", "[1]\n", r"each line must be an object"),
        ("a.xml", "x", r"must be one of \.csv \.tsv \.jsonl"),
    ],
)
def test_mistakes_in_files_are_named_with_their_line(tmp_path: Path, name: str, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        read_texts(write(tmp_path / name, text), PLAIN)


def test_mistakes_in_folders(tmp_path: Path) -> None:
    assert "the file or folder does not exist" in str(missing_data(settings(tmp_path / "none")))
    empty = tmp_path / "empty"
    empty.mkdir()
    with pytest.raises(UserError, match="contains no texts"):
        read_texts(empty, PLAIN)
    both = tmp_path / "both"
    write_texts(write(both / "train.csv", ""), 4)
    write(both / "train.jsonl", "{}")
    with pytest.raises(UserError, match=r"train\.csv, train\.jsonl all denote the train split"):
        read_texts(both, PLAIN)
    write_texts(write(tmp_path / "only" / "test.csv", ""), 4)
    with pytest.raises(UserError, match="but no training texts"):
        read_texts(tmp_path / "only", PLAIN)
    other = tmp_path / "other"
    write_texts(write(other / "train.csv", ""), 4)
    write(other / "test.csv", "text,label\na stone,stone\n")
    with pytest.raises(UserError, match=r"test\.csv, line 2: the class 'stone' \(1 test text\) is unknown"):
        read_texts(other, PLAIN)
    write(tmp_path / "linked" / "a" / "1.txt", "zinc")
    write(tmp_path / "linked" / "b" / "2.txt", "plum")
    (tmp_path / "linked" / "b" / "3.txt").symlink_to("../a/1.txt")
    with pytest.raises(UserError, match=r"already part of the data set are not counted: .*b/3\.txt"):
        read_texts(tmp_path / "linked", PLAIN)
    with pytest.raises(SettingError, match=r"data\.val_fraction"):
        opened(write_texts(tmp_path / "texts.csv", 20), val_fraction=0.0)


def test_a_file_in_another_encoding_is_refused(tmp_path: Path) -> None:
    file = tmp_path / "a.csv"
    file.write_bytes("text,label\nKäse,a\n".encode("latin-1"))
    with pytest.raises(UserError, match=r"a\.csv, line 2: the text is not valid UTF-8 \(byte 0xe4\)"):
        read_texts(file, PLAIN)
    file.write_bytes("\ufefftext,label\nKäse,a\nBrot,b\nQuark,a\nBrötchen,b\n".encode())
    assert read_texts(file, PLAIN).class_names == ["a", "b"]


def _write_rte(root: Path, train: int = 2490) -> None:
    for name, count in (("train", train), ("dev", 277)):
        rows = [f'{k}\tHe said "no.\tHe said {k}.\t{"not_" * (k % 2)}entailment' for k in range(count)]
        write(root / "RTE" / f"{name}.tsv", "\n".join(["index\tsentence1\tsentence2\tlabel", *rows]) + "\n")


def test_rte_is_read_from_its_files(tmp_path: Path) -> None:
    _write_rte(tmp_path)
    config = settings(tmp_path, name="rte", text=TextConfig(columns=["sentence1", "sentence2"]))
    assert missing_data(config) is None
    assert class_count(config) == 2
    listing = read_data(config)
    assert isinstance(listing, TextListing)
    assert listing.class_names == ["entailment", "not_entailment"]
    assert listing.val is None
    assert listing.test is not None
    assert (len(listing.train), len(listing.test)) == (2490, 277)
    assert listing.train.texts[3] == ('He said "no.', "He said 3."), "a quote is part of the text"
    np.testing.assert_array_equal(listing.train.labels[:4], [0, 1, 0, 1])
    inside = settings(tmp_path / "RTE", name="rte", text=config.text)
    assert missing_data(inside) is None


def test_an_incomplete_rte_is_refused(tmp_path: Path) -> None:
    _write_rte(tmp_path, train=2000)
    config = settings(tmp_path, name="rte", text=TextConfig(columns=["sentence1", "sentence2"]))
    with pytest.raises(UserError, match=r"train\.tsv contains 2,000 rows instead of 2,490"):
        read_data(config)
    (tmp_path / "RTE" / "dev.tsv").unlink()
    assert "does not contain dev.tsv" in str(missing_data(config))
    nowhere = settings(tmp_path / "none", name="rte", download=False)
    message = str(missing_data(nowhere))
    assert TEXT_SETS["rte"].archives[0].url is not None
    assert "data.download=false" in message
    assert "text_folder" in message
