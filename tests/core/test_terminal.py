"""Tests of prose on a terminal and in a pipe."""

from __future__ import annotations

import io
import logging
import sys
from pathlib import Path

import pytest
from tqdm import tqdm

from efficient_ft.core.terminal import ConsoleHandler, show, shown_path, wrapped
from efficient_ft.core.text import WITHOUT_TERMINAL, terminal_width

LONG = "note: " + "some words of prose, " * 10


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture(autouse=True)
def _no_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("COLUMNS", raising=False)
    monkeypatch.delenv("NO_COLOR", raising=False)
    monkeypatch.setenv("TERM", "xterm")


@pytest.mark.parametrize("width", [40, 80, 100])
def test_a_long_line_is_continued_below_it(width: int) -> None:
    first, *others = wrapped(f"  {LONG}", width).splitlines()
    assert first.startswith("  note: some")
    assert others
    assert all(line.startswith("    ") for line in others)
    assert max(map(len, [first, *others])) <= width
    assert " ".join(f"{first} {' '.join(others)}".split()) == LONG.strip()


def test_lines_that_fit_stay_as_they_are() -> None:
    table = "accuracy    best\n────────────────\nval       71.72%\n"
    assert wrapped(table, 20) == table


def test_a_path_is_never_broken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "my own images-of cats" / ("x" * 60)
    text = wrapped(f"Results: {shown_path(folder)} (model.safetensors holds the best epoch)", 40)
    assert str(folder) in text.splitlines()[1]
    folder.mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    assert wrapped(shown_path(folder), 10) == f"my own images-of cats/{'x' * 60}"
    assert shown_path(tmp_path.parent) == str(tmp_path.parent), "not below the current folder"


def test_the_width_is_that_of_the_terminal_or_a_hundred(monkeypatch: pytest.MonkeyPatch) -> None:
    assert terminal_width(io.StringIO()) == WITHOUT_TERMINAL == 100
    monkeypatch.setenv("COLUMNS", "66")
    assert terminal_width(io.StringIO(), least=1) == 66


@pytest.mark.parametrize("variable", [None, "NO_COLOR", "TERM"])
def test_warnings_are_yellow_on_a_terminal_only(monkeypatch: pytest.MonkeyPatch, variable: str | None) -> None:
    if variable is not None:
        monkeypatch.setenv(variable, "dumb")
    screen, pipe = Terminal(), io.StringIO()
    show("warning: hot", screen)
    show("warning: hot", pipe)
    assert screen.getvalue() == ("\x1b[33mwarning:\x1b[0m hot\n" if variable is None else "warning: hot\n")
    assert pipe.getvalue() == "warning: hot\n"


def test_a_line_goes_above_the_bar(monkeypatch: pytest.MonkeyPatch) -> None:
    screen = Terminal()
    monkeypatch.setattr(sys, "stdout", screen)
    monkeypatch.setattr(sys, "stderr", screen)
    with tqdm(total=10, file=screen, ncols=40) as bar:
        bar.update(3)
        bar.refresh()
        show("warning: hot")
    lines = screen.getvalue().replace("\r", "\n").splitlines()
    assert "\x1b[33mwarning:\x1b[0m hot" in lines, "the bar was cleared first"


def test_records_of_other_libraries_are_shown_from_warnings_on() -> None:
    screen = io.StringIO()
    handler = ConsoleHandler(screen)
    for name, level in (
        ("matplotlib.font_manager", logging.INFO),
        ("timm", logging.WARNING),
        ("efficient_ft.x", logging.INFO),
    ):
        handler.handle(logging.LogRecord(name, level, "", 0, f"of {name}", None, None))
    assert screen.getvalue() == "warning: of timm\nof efficient_ft.x\n"
    assert handler.level == logging.INFO, "details are for the file, and for verbose=true"


def test_a_quoted_setting_is_not_broken() -> None:
    setting = "'data.splits={train: 2019, test: 2020}'"
    assert setting in wrapped(f"Choose one of the readings of this folder: {setting}; or move the images.", 60)
