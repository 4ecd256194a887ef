"""Tests of text file formats: quotes, delimiters, column names, encodings, compression and JSON lines."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.data.tables import read_text
from tests.data.text_sets import json_lines, open_set, printed, table, write_all
from tests.models.text_models import sentences

PLAIN = table(20)
LONE = [('"I love the apple', "fruit"), ("the pear", "fruit"), ("zinc", "metal"), ('the grape"', "fruit")]


def size(data: Any) -> int:
    return sum(data.splits.values())


def test_a_lone_quote_swallows_no_rows_of_a_tsv(tmp_path: Path) -> None:
    data = open_set(write_all(tmp_path, {"a.tsv": table([*sentences(20), *LONE], "\t")}))
    assert size(data) == 24
    assert ('"I love the apple',) in [text for part in data._parts.values() for text in part.texts]


def test_a_lone_quote_in_a_csv_is_refused_with_its_lines(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": table([*sentences(20), *LONE])})
    with pytest.raises(UserError, match=r"lines 22–25: a quote that opens .*4 lines .*quotes=false\. .*quotes=true"):
        open_set(tmp_path)
    assert size(open_set(tmp_path, quotes=False)) == 24
    assert size(open_set(tmp_path, quotes=True)) == 21
    write_all(tmp_path, {"a.csv": table([*sentences(20), *LONE[:2]])})
    with pytest.raises(UserError, match=r"line 22: the table cannot be read .*data\.text\.quotes=false"):
        open_set(tmp_path)


def test_cells_over_several_lines_are_noted(tmp_path: Path) -> None:
    data = open_set(write_all(tmp_path, {"a.csv": PLAIN + '"Dear all,\nthe apple, or\r\npear",fruit\n'}))
    assert size(data) == 21
    text = printed(data)
    assert "quoted cells span several lines in 1 row (for example, lines 22–24)." in text
    assert "a.csv (21 rows in 24 lines)" in text


def test_quotes_of_a_tsv_are_noted_and_can_enclose(tmp_path: Path) -> None:
    rows = [(f'"{text}"', label) for text, label in sentences(12)]
    write_all(tmp_path, {"a.tsv": table(rows, "\t")})
    assert "quotes around cells are part of the texts in 12 rows (data.text.quotes)" in printed(open_set(tmp_path))
    assert open_set(tmp_path, quotes=True)._parts["train"].texts[0][0][0] != '"'
    write_all(tmp_path, {"a.tsv": '"text"\t"label"\n"a"\t"fruit"\n'})
    with pytest.raises(UserError, match=r"the column 'text'.*Set data\.text\.quotes=true"):
        open_set(tmp_path)


@pytest.mark.parametrize(
    ("name", "text", "note"),
    [
        ("a.csv", table(12, ";"), "the delimiter is detected as semicolon (data.text.delimiter)"),
        ("a.csv", table(12, "\t"), "the delimiter is detected as tab (data.text.delimiter)"),
        ("a.csv", table(12, "|"), "the delimiter is detected as pipe (data.text.delimiter)"),
        ("a.csv", "sep=;\n" + table(12, ";"), ""),
        ("a.tsv", table([(f'"{text}, {text}"', label) for text, label in sentences(12)]), "detected as comma"),
        ("a.csv", table([(f'"{text}, x"', f' "{label}"') for text, label in sentences(12)]), ""),
        ("a.csv", table(12).replace("\n", "\r"), ""),
        ("a.csv", table(12).replace("\n", ",\n"), ""),
        ("a.csv", "," + table((f"{k},{text}", label) for k, (text, label) in enumerate(sentences(12))), ""),
        ("a.csv", "\ufeff" + table(12), ""),
        ("a.ndjson", json_lines({"text": text, "label": of} for text, of in sentences(12)).replace("\n", "\r"), ""),
    ],
)  # fmt: skip
def test_tables_of_other_programs_are_read(tmp_path: Path, name: str, text: str, note: str) -> None:
    data = open_set(write_all(tmp_path, {name: text}))
    assert (data.class_names, size(data)) == (["fruit", "metal"], 12)
    assert note in printed(data)


def test_a_given_delimiter_is_used(tmp_path: Path) -> None:
    rows = ["text;label|kind", *(f"{text};{label}|{label}" for text, label in sentences(12))]
    write_all(tmp_path, {"a.csv": "\n".join(rows)})
    data = open_set(tmp_path, delimiter="pipe", columns=["text;label"], label="kind")
    assert data._parts["train"].texts[0][0].count(";") == 1


def test_a_table_without_names_is_refused_or_named(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.tsv": "".join(f"{label}\t{text}\n" for text, label in sentences(20))})
    with pytest.raises(UserError, match=r"The columns are fruit, .* read as column names.*names=\[label,text\]"):
        open_set(tmp_path)
    assert size(open_set(tmp_path, names=["label", "text"])) == 20
    with pytest.raises(SettingError, match=r"data\.text\.names must be 2 names, one for each cell of line 1"):
        open_set(tmp_path, names=["label", "text", "more"])
    write_all(tmp_path, {"a.tsv": table(20, "\t")})
    with pytest.raises(SettingError, match=r"data\.text\.names must be null, .* is a header"):
        open_set(tmp_path, names=["text", "label"])


def test_columns_without_names_are_read_and_their_content_is_noted(tmp_path: Path) -> None:
    rows = "".join(
        f'{label},"{text}, \u2019",{"more" if k < 2 else ""},,\r\n' for k, (text, label) in enumerate(sentences(12))
    )
    write_all(tmp_path, {"spam.csv": ("v1,v2,,,\r\n" + rows).encode("cp1252")})
    data = open_set(tmp_path, encoding="cp1252", columns=["v2"], label="v1")
    assert size(data) == 12
    assert "columns without a name contain values in 2 rows" in printed(data)


def test_rows_with_other_numbers_of_cells_are_counted(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": PLAIN + "a,b,c\nd\n"})
    with pytest.raises(UserError, match=r"2 of 22 texts cannot be used: 3 cells for .* ×1, 1 cell .* line 22"):
        open_set(tmp_path)
    assert size(open_set(tmp_path, on_corrupt="skip")) == 20


ACCENTS = PLAIN + "caf\u00e9 \u2019apple\u2019,fruit\n"


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (ACCENTS.encode("cp1252"), r"a\.csv, line 22: the text is not valid UTF-8 .*may be cp1252\. Set data\."),
        (ACCENTS.encode("utf-16-le"), r"like utf-16-le without a byte order mark\. Set data\.text\.encoding=utf-16-le"),
        (ACCENTS.encode("utf-16-be"), r"Set data\.text\.encoding=utf-16-be"),
        ((PLAIN + "中文字 很好 apple,fruit\n").encode("gb18030"), r"line 22: .* not valid UTF-8 .*gb18030 \(Chinese\)"),
        ("text,label\nпривет,да\n".encode("cp1251"), r"line 2: .* not valid UTF-8 .*for example cp1251"),
        (ACCENTS.encode() + b"\xff,fruit\n", r"line 23: .* mixes encodings: 3 non-ASCII characters .* 1 is not"),
        ((PLAIN + "a\0b,fruit\n").encode(), r"line 22: the text contains 1 NUL character"),
        (gzip.compress(PLAIN.encode(), mtime=0)[:60], r"is a damaged gzip file"),
        (b"PK\x03\x04....", r"is a ZIP archive.*save the sheet as \.csv"),
        (b"PAR1....", r"is a Parquet file\. Convert the file"),
        (b"version https://git-lfs.github.com/spec/v1\n", r"is a Git LFS pointer"),
        (b"\n<!DOCTYPE html><html></html>", r"is a web page instead of a file of rows"),
        (PLAIN.replace("text,label", "TEXT,LABEL").encode(), r"the column 'text'.* Did you mean 'TEXT'\?"),
    ],
)  # fmt: skip
def test_files_that_are_not_utf8_are_refused_with_a_guess(tmp_path: Path, content: bytes, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_set(write_all(tmp_path, {"a.csv": content}))


@pytest.mark.parametrize("encoding", ["cp1252", "utf-16-le", "utf-16-be", "utf-32-be"])
def test_a_given_encoding_or_a_byte_order_mark_is_used(tmp_path: Path, encoding: str) -> None:
    write_all(tmp_path, {"a.csv": ACCENTS.encode(encoding)})
    assert ("caf\u00e9 \u2019apple\u2019",) in all_texts(open_set(tmp_path, encoding=encoding))
    if encoding != "cp1252":
        write_all(tmp_path, {"a.csv": ("\ufeff" + ACCENTS).encode(encoding)})
        data = open_set(tmp_path)
        assert ("caf\u00e9 \u2019apple\u2019",) in all_texts(data)
        assert f"is read as {encoding} (byte order mark)" in printed(data)


def all_texts(data: Any) -> list[tuple[str, ...]]:
    return [text for part in data._parts.values() for text in part.texts]


def test_a_wrong_encoding_is_noted_or_refused(tmp_path: Path) -> None:
    write_all(tmp_path, {"a.csv": ACCENTS})
    assert "is valid UTF-8, but is read as latin-1" in printed(open_set(tmp_path, encoding="latin-1"))
    with pytest.raises(UserError, match=r"line 22: the text is not valid ascii .* Set data\.text\.encoding to"):
        open_set(tmp_path, encoding="ascii")
    for name in ("utf-81", "base64", "rot13"):
        with pytest.raises(SettingError, match=r"data\.text\.encoding must be a Python encoding"):
            open_set(tmp_path, encoding=name)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (json_lines([{"text": "a", "label": ["x"]}]), r"line 1: 'label' is a list instead of a text"),
        (json_lines([{"text": "a", "label": "x"}, {"text": {"b": 1}, "label": "x"}]), r"line 2: 'text' is an object"),
        ('{"text": "a", "text": "b", "label": 1}\n', r"line 1: a key occurs twice"),
        (json.dumps([{"text": "a", "label": 1}], indent=1), r"line 1: .* is not valid JSON .*one object per line"),
        (json_lines([{"text": "a", "kind": 1}]), r"the column 'label' .* The columns are text, kind"),
    ],
)
def test_json_that_is_no_row_is_refused_with_its_line(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        open_set(write_all(tmp_path, {"a.jsonl": text}))


def test_numbers_as_texts_are_noted(tmp_path: Path) -> None:
    data = open_set(write_all(tmp_path, {"a.jsonl": json_lines({"text": k, "label": k % 2} for k in range(12))}))
    assert "numbers and booleans in column 'text' are converted to text in 12 rows" in printed(data)


def test_the_columns_of_a_file_without_a_header_are_suggested_by_its_first_row(tmp_path: Path) -> None:
    rows = "".join(f"{k % 2},title,apple and zinc {k}\n" for k in range(20))
    write_all(tmp_path, {"a.csv": rows})
    with pytest.raises(UserError, match=r"data\.text\.names=\[label,other1,text\]"):
        open_set(tmp_path)
    assert size(open_set(tmp_path, names=["label", "other1", "text"])) == 20


def test_a_file_that_does_not_fit_into_memory_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write_all(tmp_path, {"huge.csv": "text,label\n"})

    def no_memory(path: Path) -> bytes:
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", no_memory)
    with pytest.raises(UserError, match=r"huge\.csv does not fit into memory\. Split the file into several files\."):
        read_text(tmp_path / "huge.csv", None)
