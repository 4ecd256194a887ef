"""Tests of ``efficient-ft dashboard`` offline: wandb's files contain the recorded runs, and the panels are written."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from efficient_ft.cli.commands import run_command
from efficient_ft.report.dashboard import PANELS
from tests.report.test_runs import filled
from tests.training.wandb_files import offline_run

wandb = pytest.importorskip("wandb")


@pytest.mark.slow
def test_a_finished_run_is_written_as_it_was_recorded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs, out = filled(tmp_path / "runs"), tmp_path / "out"
    run_command("dashboard", [str(runs / "b"), "--offline", "--project", "mine", "--out", str(out), "--title", "Title"])
    assert "full seed=1" in capsys.readouterr().out
    found = offline_run(out)
    assert (found["run"].display_name, found["run"].run_group, found["run"].job_type) == (
        "full seed=1",
        "full",
        "train",
    )
    assert found["run"].project == "mine"
    assert len(found["history"]) == 300, "rows of the same step are one"
    assert found["history"][0]["train_loss"] == 3
    assert found["history"][-1]["val_accuracy"] == 0.6
    assert found["summary"]["accuracy.test"] == found["summary"]["accuracy.final"] == 0.7
    assert found["summary"]["totals.flops"] == 5e12
    assert found["metrics"]["val_accuracy*"].max
    assert found["metrics"]["val_loss*"].min
    panels = json.loads((out / "panels.json").read_text())
    assert {y for panel in panels["panels"] for y in panel["y"] if panel["kind"] == "points"} == {"accuracy.final"}
    assert panels["title"] == "Title"
    assert [panel["title"] for panel in panels["panels"]] == [title for title, *_ in PANELS]


@pytest.mark.slow
def test_the_mode_of_the_environment_is_followed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("WANDB_MODE", "offline")
    runs, out = filled(tmp_path / "runs"), tmp_path / "out"
    run_command("dashboard", [str(runs / "b"), "--project", "mine", "--out", str(out)])
    assert offline_run(out)["run"].project == "mine"
    printed = " ".join("".join(capfd.readouterr()).split())
    assert "(for `wandb sync`)" in printed
    assert "wandb:" not in printed, "no lines of wandb's own"


@pytest.mark.slow
def test_budgets_are_sent_with_the_metrics(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WANDB_SILENT", "true")
    runs, out = filled(tmp_path / "runs"), tmp_path / "out"
    run_command("dashboard", [str(runs / "c"), "--offline", "--project", "mine", "--out", str(out)])
    history = offline_run(out)["history"]
    assert len(history) == 300
    assert [row["budget/1"] for row in history[:3]] == [0.9, 0.8, 0.7]
    assert history[2]["train_loss"] == 1
    assert "budget/1" not in history[3]


def test_the_panels_are_wandb_s() -> None:
    wr = pytest.importorskip("wandb_workspaces.reports.v2")
    from efficient_ft.report.dashboard import _panels

    models = [panel._to_model() for panel in _panels()]
    assert len(models) == len(PANELS)
    assert {type(panel) for panel in _panels()} == {wr.ScatterPlot, wr.LinePlot}
