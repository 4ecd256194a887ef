"""Tests of tables and lines on a terminal: widths, wide characters and columns that do not fit."""

from __future__ import annotations

import csv
import io
import json

import pytest
from hydra.core.override_parser.overrides_parser import OverridesParser

from efficient_ft.core import text
from efficient_ft.core.errors import SettingError
from efficient_ft.core.sheet import FORMS, Column, Lines, render

LONG = "full+lora:rank=8+low_bit:bits=4+checkpointing:input_dtype=int4+tome:r=16"


def widest(shown: str) -> int:
    return max(map(text.display_width, shown.splitlines()))


@pytest.mark.parametrize(
    ("word", "columns"), [("abc", 3), ("猫", 2), ("e\u0301", 1), ("한국어", 6), ("ﾈｺ", 2), ("a\u200bb", 2), ("", 0)]
)
def test_wide_and_combining_characters_have_their_columns(word: str, columns: int) -> None:
    assert text.display_width(word) == columns
    assert text.display_width(text.padded(word, 8)) == text.display_width(text.padded(word, 8, left=False)) == 8
    assert text.display_width(text.shortened(word * 30, 9)) <= 9


def test_columns_are_aligned_by_what_a_terminal_shows() -> None:
    lines = text.table([["class", "n"], ["猫", "1"], ["étude", "22"], ["e\u0301tude", "3"]]).splitlines()
    assert {text.display_width(line) for line in lines} == {9}


@pytest.mark.parametrize("width", [60, 80, 100, 120])
@pytest.mark.parametrize("name", ["short", LONG, "猫" * 70, "no_place_to_break_" * 9])
def test_no_line_of_a_table_is_wider_than_the_terminal(name: str, width: int) -> None:
    rows = [["method", *[f"a number of column {i}" for i in range(12)]], [name, *["12345.6"] * 12], ["x", *["1"] * 12]]
    shown = text.table(rows, width=width)
    assert widest(shown) <= width
    assert shown.count("12345.6") == 12, "no column is lost"


def test_words_break_at_separators_and_numbers_never() -> None:
    assert text.wrapped("full+lora+checkpointing", 12) == ["full+lora+", "checkpointin", "g"]
    assert text.wrapped("a b c", 3) == ["a b", "c"]
    assert text.wrapped("one/two three", 8, "  ") == ["one/two", "  three"]
    assert text.paragraph("x " + "y" * 200).splitlines() == ["x", "y" * 200], "a path stays whole"


@pytest.mark.parametrize(("columns", "expected"), [("40", 80), ("100", 100), ("0", 100), ("", 100)])
def test_the_width_is_at_least_80_and_100_without_a_terminal(
    monkeypatch: pytest.MonkeyPatch, columns: str, expected: int
) -> None:
    monkeypatch.setenv("COLUMNS", columns)
    assert text.terminal_width() == expected


COLUMNS = {
    "method": Column(words=True),
    "accuracy %": Column(1, lambda value: f"{value:.1f} %", "accuracy"),
    **{f"extra {i}": Column(2 + i) for i in range(30)},
}
HEADER = ["method", *[f"extra {i}" for i in range(30)], "accuracy %"]
ROWS = [[name, *[i / 7 for i in range(30)], 12.3456] for name in ("full", LONG)]


@pytest.mark.parametrize("width", ["80", "100", "120"])
def test_the_columns_that_do_not_fit_are_named_and_can_be_chosen(monkeypatch: pytest.MonkeyPatch, width: str) -> None:
    monkeypatch.setenv("COLUMNS", width)
    shown = render(HEADER, ROWS, "text", columns=COLUMNS)
    assert widest(shown) <= int(width)
    header = shown.splitlines()[: next(i for i, line in enumerate(shown.splitlines()) if line.startswith("─"))]
    assert header[-1].startswith("method ")
    assert header[-1].split()[1] == "accuracy", "it comes before the columns of higher ranks"
    assert "12.3 %" in shown
    assert "Not shown: extra " in shown.splitlines()[-1]
    assert "--columns all" in shown.splitlines()[-1]
    every = render(HEADER, ROWS, "text", columns=COLUMNS, chosen=["all"])
    assert widest(every) <= int(width)
    assert all(f"extra {i}" in " ".join(every.split()) or f" {i} " in f" {' '.join(every.split())} " for i in range(30))
    two = render(HEADER, ROWS, "text", columns=COLUMNS, chosen=["accuracy", "extra 29"])
    assert f"{29 / 7:.6g}" in two
    assert two.count("%") == 2, "the first column, the accuracy and the last one"


def test_an_unknown_column_is_refused_with_all_names() -> None:
    with pytest.raises(SettingError, match=r"--columns must be one of all, method, accuracy, extra 0, .* got nope"):
        render(HEADER, ROWS, "text", columns=COLUMNS, chosen=["nope"])


def test_files_have_all_columns_and_all_digits(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    rows = json.loads(render(HEADER, ROWS, "json", columns=COLUMNS))
    assert list(rows[0]) == HEADER
    assert list(rows[0].values()) == ROWS[0]
    assert render(HEADER, ROWS, "csv", columns=COLUMNS).splitlines()[0].split(",") == HEADER


def test_rows_printed_one_by_one_are_those_of_the_table() -> None:
    lines = Lines(HEADER, ROWS, columns=COLUMNS)
    one_by_one = "\n".join([lines.head(), *map(lines.row, ROWS), *lines.foot()])
    assert one_by_one == render(HEADER, ROWS, "text", columns=COLUMNS)


def test_a_column_without_a_value_is_left_out_silently() -> None:
    shown = render(["a", "b", "c"], [["x", None, 1], ["y", None, 2]], "text", columns={"a": Column(), "b": Column(1)})
    assert shown.split("\n")[0].split() == ["a", "c"]
    assert "Not shown" not in shown


@pytest.mark.parametrize(
    "cell", ["=HYPERLINK(1)", "+1+cmd", "-2+3", "@SUM(1)", "\t=1", "\n=1", "\uff1d1", "-a", "=1", "+1/2"]
)
def test_a_formula_is_text_in_csv(cell: str) -> None:
    rows = list(csv.reader(io.StringIO(render([cell], [[cell]], "csv"))))
    assert rows == [[f"'{cell}"], [f"'{cell}"]]


@pytest.mark.parametrize("cell", ["-1", "+1.5", "-.5", "-1e-5", "-", "-inf", "1=2", "a", "lbp_wht+lora"])
def test_numbers_and_words_stay_as_they_are_in_csv(cell: str) -> None:
    assert render(["a"], [[cell]], "csv") == f"a\n{cell}"


def test_negative_numbers_stay_numbers() -> None:
    assert render(["a", "b"], [[-1, -1.5]], "csv") == "a,b\n-1,-1.5"


@pytest.mark.parametrize("form", FORMS)
def test_no_form_has_control_characters(form: str) -> None:
    odd = "\x1b[2J\x9b5n\u202e\x07\r"
    shown = render([f"a{odd}"], [[f"b{odd}"]], form)
    assert not set(shown) & set("\x1b\x9b\u202e\x07\r")
    if form == "json":
        assert json.loads(shown) == [{f"a{odd}": f"b{odd}"}]


def test_a_name_adds_no_cell_link_or_tag_to_markdown() -> None:
    shown = render(["run"], [["a|b\\|c\nd<script>&[x](javascript:1)![y](z)`code`"]], "markdown")
    assert shown.splitlines()[2:] == [
        r"| a\|b\\\|c\\x0ad&lt;script>&amp;\[x\](javascript:1)!\[y\](z)\`code\` |",
    ]


def test_a_name_is_no_command_of_latex() -> None:
    shown = render(["run"], [[r"\input{/etc/passwd}^~"]], "latex")
    assert r"\textbackslash{}input\{/etc/passwd\}\textasciicircum{}\textasciitilde{}" in shown


@pytest.mark.parametrize("folder", ["", "a,b=c d", r"a\b", r"a\\b", "a\\", "a\\\\", "it's", r"a\'b", "\\\\''\\"])
def test_hydra_reads_a_quoted_value_unchanged(folder: str) -> None:
    override = OverridesParser.create().parse_override(f"evaluate={text.hydra_quoted(folder)}")
    assert override.value() == folder
