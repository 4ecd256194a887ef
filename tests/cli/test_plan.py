"""Tests of ``efficient-ft plan``: its output, its files and its errors."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from efficient_ft.cli.commands import plan as command
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.planning import planner
from tests.planning.common import SETTINGS, few


@pytest.fixture(autouse=True)
def one_candidate(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(planner, "candidates", few(["full"]))
    monkeypatch.setattr(command, "use_allocator", lambda choice: None)  # keeps the allocator of the test process
    monkeypatch.chdir(tmp_path)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["memory=4"], r"^memory must be a number with one of the units .* got 4\. For example, use memory=4GB"),
        (["memory=4GB", "time=2"], r"^time must be a number with one of the units .* got 2\. For example, use time=2h"),
        (["memory=4GB", "loss=little"], r"^loss must be a number of percentage points >= 0, got little\."),
        (["memory=4GB", "split=maybe"], r"^split must be one of true, false, got maybe\."),
        ([], r"^The memory budget is missing\. Pass memory=SIZE"),
        (["memory=4GB", "deit_small"], r"^deit_small: settings must have the form KEY=VALUE"),
        (["memory=4GB", "model=no_such"], r"no_such"),
        (["memory=4GB", "--planning-time", "5x"], r"^--planning-time must be a number with one of .* got 5x\."),
        (
            ["memory=4GB", "--figure", "."],
            r"^--figure must be the path of a file, got \.\. Example: --figure plan",
        ),
        (["memory=4GB", "--figure", "a/.."], r"^--figure must be the path of a file, got a/\.\.\."),
        (["memory=1MB"], r"^memory must be at least .*GiB, got 977 KiB\. Before the first step, the interpreter"),
    ],
)
def test_a_mistake_gets_one_message(words: list[str], message: str) -> None:
    with pytest.raises(UserError, match=message):
        command.main([*SETTINGS, *words])


@pytest.mark.slow
def test_the_plan_is_printed_written_and_recorded(capsys: pytest.CaptureFixture[str]) -> None:
    command.main([*SETTINGS, "memory=900GB", "--all", "--json", "plan.json", "--figure", "plan.png"])
    printed = capsys.readouterr().out
    assert "\n1/1 " in printed, "the recipe is printed when it is examined"
    assert "Recommended: full\n  efficient-ft model=vit_digits" in printed
    assert "The recommendation is based on one recipe: only 1 was examined." in printed
    written = json.loads(Path("plan.json").read_text())
    assert [option["name"] for option in written["options"]] == ["full"]
    assert Path("outputs/plans.jsonl").is_file()
    assert Path("plan.png").stat().st_size > 1000
    assert "exact" in Path("plan.csv").read_text()
    with pytest.raises(UserError, match="None of the planned runs has finished"):
        command.main(["--calibration", "outputs"])


@pytest.mark.parametrize(
    ("given", "stem"), [("plan", "plan"), ("plan.png", "plan"), ("a/plan.CSV", "a/plan"), ("plan.v2", "plan.v2")]
)
def test_only_the_extensions_of_the_figure_are_removed(given: str, stem: str) -> None:
    assert command._figure_path(Path(given)) == Path(stem)


def test_the_exit_status_says_that_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(planner.Planner, "fits", lambda self, option: False)
    with pytest.raises(SystemExit) as leaving:
        command.main([*SETTINGS, "memory=900GB"])
    assert leaving.value.code == 1
    assert "No recipe fits. The smallest sufficient budget is" in capsys.readouterr().out


def test_settings_of_a_plan_are_checked_before_anything_is_loaded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "plan", lambda *settings, **options: pytest.fail("planned"))
    with pytest.raises(SettingError):
        command.main([*SETTINGS, "memory=4"])
