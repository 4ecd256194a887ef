"""Tests of paused runs: they give the same bits as uninterrupted runs, even if their length is set later."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from efficient_ft.config import Config, check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.training.output import export
from efficient_ft.training.run import run
from tests.training.runs import plain_config, rows_of

pytestmark = pytest.mark.usefixtures("without_cost")

#: An epoch has 11 steps.
CONSTANT = {"optim__schedule": "constant", "optim__warmup_steps": 3}


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return dict(load_file(folder / export.NAME))


def metrics(folder: Path) -> list[dict[str, Any]]:
    """Return the rows of metrics.jsonl without the evaluations of pauses and without times."""
    rows = [row for row in rows_of(folder) if "train_loss" in row or "train_loss_epoch" in row]
    return [{k: v for k, v in row.items() if k not in ("seconds", "joules", "memory_bytes")} for row in rows]


def same(folder: Path, other: Path) -> None:
    first, second = weights(folder), weights(other)
    assert all(torch.equal(first[name], second[name]) for name in second)
    assert metrics(folder) == metrics(other)


@pytest.mark.slow
def test_a_paused_run_continues_bit_for_bit(
    tmp_path: Path, finished: tuple[Path, Config, dict[str, Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    for step in (4, 11, 14):  # in the first epoch, after the first epoch, in the second epoch
        paused = run(check(plain_config(pause_at=step)), folder)["paused"]
        assert (paused["step"], paused["steps"], paused["epochs"]) == (step, 22, 2)
        assert paused["value"] == [row for row in rows_of(folder) if row["step"] == step][-1]["val_accuracy"]
        assert not (folder / "results.json").exists()
        assert (folder / export.NAME).is_file()
    assert f"The run was paused after step {14} of 22: val accuracy" in capsys.readouterr().out
    again = run(check(plain_config(pause_at=14)), folder)["paused"]
    assert {key: again[key] for key in ("step", "value", "loss")} == {
        key: paused[key] for key in ("step", "value", "loss")
    }
    run(check(plain_config()), folder)
    same(folder, finished[0])


@pytest.mark.slow
def test_a_run_is_paused_after_a_time(tmp_path: Path, finished: tuple[Path, Config, dict[str, Any]]) -> None:
    paused = [run(check(plain_config(pause_at="0.01s")), tmp_path / "run")["paused"] for _ in "ab"]
    assert [one["step"] for one in paused] == [1, 2]
    run(check(plain_config()), tmp_path / "run")
    same(tmp_path / "run", finished[0])


@pytest.mark.slow
def test_a_pause_after_the_last_step_ends_the_run(tmp_path: Path) -> None:
    assert "paused" not in run(check(plain_config(pause_at=22, trainer__epochs=1)), tmp_path / "run")


@pytest.mark.slow
@pytest.mark.parametrize("method", ["full", "alast"])
def test_the_length_of_a_run_with_a_constant_rate_can_be_set_later(tmp_path: Path, method: str) -> None:
    settings: dict[str, Any] = {} if method == "full" else {"num_layers": 1, "budget_lr": 1e-4}
    changes = {**CONSTANT, "method": {method: settings}}
    end = {"trainer__max_steps": 26, "optim__decay_steps": 9, "trainer__epochs": 50}
    run(check(plain_config(**changes, trainer__epochs=50, pause_at=8)), tmp_path / "later")
    run(check(plain_config(**changes, trainer__epochs=50, pause_at=15)), tmp_path / "later")
    results = run(check(plain_config(**changes, **end)), tmp_path / "later")
    assert results["totals"]["steps"] == 26
    run(check(plain_config(**changes, **end)), tmp_path / "once")
    first, second = weights(tmp_path / "later"), weights(tmp_path / "once")
    assert all(torch.equal(first[name], second[name]) for name in second)


@pytest.mark.slow
@pytest.mark.parametrize(
    "end",
    [
        {"trainer__max_steps": 20, "optim__decay_steps": 8},  # the decay would have begun before step 15
        {"trainer__max_steps": 14},
        {"optim__decay_steps": 3},  # without max_steps, the begin of the decay is unknown
        {"trainer__max_steps": 30, "optim__lr": 1e-3},
        {"trainer__max_steps": 30, "optim__schedule": "cosine"},
    ],
)
def test_another_length_that_would_change_earlier_steps_is_refused(tmp_path: Path, end: dict[str, Any]) -> None:
    run(check(plain_config(**CONSTANT, trainer__epochs=50, pause_at=15)), tmp_path / "run")
    with pytest.raises(UserError, match="contains another run"):
        run(check(plain_config(**{**CONSTANT, "trainer__epochs": 50, **end})), tmp_path / "run")


@pytest.mark.slow
def test_a_finished_run_keeps_its_length(tmp_path: Path) -> None:
    run(check(plain_config(**CONSTANT, trainer__max_steps=8)), tmp_path / "run")
    with pytest.raises(UserError, match=r"trainer\.max_steps is 8 in that run and 16 in this run"):
        run(check(plain_config(**CONSTANT, trainer__max_steps=16)), tmp_path / "run")


@pytest.mark.parametrize("value", [0, -3, "soon", "30"])
def test_a_pause_is_a_number_of_steps_or_a_time(value: int | str) -> None:
    allowed = r"pause_at must be a number of optimizer steps >= 1, or a time \(for example, 30min\), got"
    with pytest.raises(SettingError, match=allowed):
        check(plain_config(pause_at=value))


def test_a_decay_requires_a_constant_schedule() -> None:
    with pytest.raises(SettingError, match=r"optim\.decay_steps must be null with optim\.schedule=cosine, got 5"):
        check(plain_config(optim__decay_steps=5))
