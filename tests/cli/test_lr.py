"""Tests of ``efficient-ft lr``: the learning rate range test, its files and its errors."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from efficient_ft.cli.commands import lr as command
from efficient_ft.cli.hydra.compose import configured
from efficient_ft.config import check
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.selection.per_step import LISA
from efficient_ft.record.lr_test import read_suggestion
from efficient_ft.training import lr_test
from efficient_ft.training.lr_test import range_test
from tests.training.runs import plain_config


@pytest.fixture(autouse=True)
def here(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(command, "use_allocator", lambda choice: None)  # keeps the allocator of the test process
    monkeypatch.setattr(command, "restart_with", lambda choice: None)
    monkeypatch.chdir(tmp_path)


def rates_of(monkeypatch: pytest.MonkeyPatch, **changes: Any) -> tuple[lr_test.RangeTest, list[list[float]]]:
    """Run a short test, and return its result and the learning rates of the parameter groups in each step."""
    used: list[list[float]] = []
    before = lr_test._TestModule.on_before_optimizer_step

    def watched(self: Any, optimizer: Any) -> None:
        used.append([group["lr"] for group in optimizer.param_groups])
        before(self, optimizer)

    monkeypatch.setattr(lr_test._TestModule, "on_before_optimizer_step", watched)
    return range_test(check(plain_config(**changes)), 8, 1e-5, 1e-2), used


def test_the_rates_grow_exponentially_with_the_factors_of_the_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    found, used = rates_of(monkeypatch, optim__head_lr_mult=10.0, optim__lr=0.5)
    assert found.rates == pytest.approx([1e-5 * 10 ** (3 * i / 7) for i in range(8)])
    assert [min(rates) for rates in used] == pytest.approx(found.rates)
    assert [max(rates) for rates in used] == pytest.approx([10 * rate for rate in found.rates])


def test_the_loss_has_the_class_weights_of_the_run(monkeypatch: pytest.MonkeyPatch) -> None:
    weights = {str(digit): 10.0 if digit == 3 else 0.5 for digit in range(10)}
    plain, _ = rates_of(monkeypatch)
    weighted, _ = rates_of(monkeypatch, optim__class_weights=weights)
    assert weighted.losses[-1] != pytest.approx(plain.losses[-1], rel=1e-3)


@pytest.mark.slow
def test_a_step_accumulates_batches_and_methods_begin_and_end_each_step(monkeypatch: pytest.MonkeyPatch) -> None:
    begun: list[int] = []
    begin = LISA.step_begin
    monkeypatch.setattr(LISA, "step_begin", lambda self, step: (begun.append(step), begin(self, step))[1])
    lisa = {"method": {"lisa": {"num_layers": 1}}}
    found, used = rates_of(monkeypatch, trainer__grad_accum_steps=3, **lisa)
    assert (len(found.losses), len(used)) == (8, 8)
    assert sorted(set(begun)) == list(range(8))


@pytest.mark.slow
def test_the_test_is_reproducible_and_restores_the_random_state() -> None:
    config, state = check(plain_config(optim__lr=1.0)), torch.get_rng_state()
    first = range_test(config, 6, 1e-4, 1e-2)
    assert torch.equal(torch.get_rng_state(), state)
    other = range_test(check(plain_config(optim__lr=1e-3, optim__schedule="constant")), 6, 1e-4, 1e-2)
    assert first.losses == pytest.approx(other.losses, rel=1e-5), "optim.lr and the schedule have no effect"
    assert not list(Path().iterdir()), "the test itself writes no file"


def test_a_loss_that_is_not_finite_ends_the_test(monkeypatch: pytest.MonkeyPatch) -> None:
    step = lr_test._TestModule.training_step

    def training_step(self: Any, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = step(self, batch, batch_idx)
        return loss * math.nan if len(self.losses) == self.stops else loss

    monkeypatch.setattr(lr_test._TestModule, "training_step", training_step)
    monkeypatch.setattr(lr_test._TestModule, "stops", 4, raising=False)
    found = range_test(check(plain_config()), 8, 1e-5, 1e-2)
    assert (len(found.losses), found.ended) == (4, "The loss was nan at a learning rate of 0.00052.")
    monkeypatch.setattr(lr_test._TestModule, "stops", 0)
    with pytest.raises(UserError, match="No loss was finite, so no learning rate can be suggested"):
        range_test(check(plain_config()), 8, 1e-5, 1e-2)


@pytest.mark.slow
def test_the_command_prints_a_run_and_writes_its_files(capsys: pytest.CaptureFixture[str]) -> None:
    small = "model.kwargs={depth: 2, embed_dim: 16, num_heads: 2}"
    words = ["method=full", f"+{small}", "data.batch_size=32", "trainer.precision=fp32"]
    command.main([*words, "--steps", "60", "--from", "1e-5", "--out", "found"])
    printed = capsys.readouterr().out
    suggested = read_suggestion(Path("found"))
    assert suggested is not None
    assert 1e-4 <= suggested <= 3e-1
    assert f"Suggested learning rate: {suggested:g}" in printed
    assert f"optim.lr={suggested:g}\n" in printed
    record = json.loads(Path("found/lr_test.json").read_text())
    assert len(record["rates"]) == len(record["losses"]) == len(record["smoothed"])
    assert Path("found/lr_test.png").stat().st_size > 1000
    assert Path("found/lr_test.csv").read_text().startswith("panel,series,x,y")
    assert not Path("outputs/digits").exists(), "there is no run folder"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--from", "1e-3", "--to", "1e-2"], r"--to must be at least 100 times --from=0.001, got 0.01"),
        (["deit_small"], r"^deit_small: settings must have the form KEY=VALUE"),
        (["optim.lr=high"], r"optim.lr must be a number >= 1e-12, got high"),
        (["trainer.devices=2"], r"trainer.devices must be 1 with efficient-ft lr, got 2. The test runs in one process"),
        (["cost_only=true"], r"cost_only must be left out with efficient-ft lr, got true"),
        (["--out", "file"], r"--out must be a folder, got the file file"),
    ],
)
def test_a_mistake_gets_one_message(words: list[str], message: str) -> None:
    Path("file").write_text("")
    with pytest.raises(UserError, match=message):
        command.main(words)
    assert [path.name for path in Path().iterdir()] == ["file"]


def test_other_commands_reject_an_automatic_batch_size() -> None:
    with pytest.raises(SettingError, match=r"data.batch_size must be an integer with this command, got auto"):
        configured(["data.batch_size=auto"])
    assert configured(["data.batch_size=auto"], automatic=True).data.automatic
    with pytest.raises(
        SettingError, match=r"data.batch_size_selected must be left out, got true. A run writes this setting"
    ):
        configured(["+data.batch_size_selected=true"])
