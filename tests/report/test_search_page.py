"""Tests of the page of a search."""

from __future__ import annotations

from pathlib import Path

import pytest

from efficient_ft.cli.commands.report import main
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_metric
from efficient_ft.report.page import PAGE
from efficient_ft.report.search_page import write_search_page
from efficient_ft.search.state import read_state, write_state
from tests.report.test_report import Page
from tests.search.test_search import KilledError, Machine, search


def test_the_page_shows_the_result_and_all_recipes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    state = search(tmp_path / "found", Machine()).run()
    assert state.final is not None
    main([str(tmp_path / "found")])
    file = tmp_path / "found/report" / PAGE
    assert str(file) in capsys.readouterr().out
    text = file.read_text(encoding="utf-8")
    assert Page(text)
    assert format_metric(state.final.test or 0, "accuracy") in text
    assert "standard error" in text
    assert f"trainer.max_steps={state.final.steps}" in text
    assert all(arm.recipe in text for arm in state.arms)
    assert "bsr: needs memory=3GB" in text
    assert "With a constant learning rate, the validation metric of the best recipe changed from" in text
    assert "not finished" not in text
    assert text.count("<svg") == 1  # all processes used the same memory, so there is no Pareto front


def test_an_unfinished_search_has_a_page(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        search(tmp_path, Machine(kill=4)).run()
    (file,) = write_search_page(tmp_path, tmp_path / "out")
    text = file.read_text(encoding="utf-8")
    assert "The search is not finished. Repeat the command of the search to continue." in text
    assert "on the val split so far" in text


def test_a_search_without_a_finished_slice_has_no_page(tmp_path: Path) -> None:
    with pytest.raises(KilledError):
        search(tmp_path, Machine(kill=0)).run()
    with pytest.raises(UserError, match="has not trained a recipe yet"):
        write_search_page(tmp_path, tmp_path / "out")


def test_names_are_escaped(tmp_path: Path) -> None:
    state = search(tmp_path, Machine()).run()
    found = read_state(tmp_path)
    assert found == state
    found.arms[0].recipe = found.arms[0].source = "</script><b>"
    write_state(tmp_path, found)
    (file,) = write_search_page(tmp_path, tmp_path / "out")
    assert "<b>" not in file.read_text(encoding="utf-8")
