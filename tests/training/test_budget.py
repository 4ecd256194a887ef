"""The memory budget of a run: refused before the first step, or stopped where it is passed all the same."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.training import budget
from efficient_ft.training.budget import within_budget
from efficient_ft.training.run import run
from tests.planning.test_planner import SETTINGS, configure


def of_run(*settings: str, memory: str) -> Config:
    return configure([*SETTINGS, "method=full", "trainer.progress=false", *settings, f"memory={memory}"])


@pytest.mark.parametrize("wrong", ["4", "4.5", "fourGB", "0GB"])
def test_a_budget_needs_a_unit(wrong: str) -> None:
    with pytest.raises(SettingError, match=rf"memory must be a number with a unit: .* got {wrong}\."):
        of_run(memory=wrong)


def test_a_run_above_its_budget_is_refused_before_it_trains(tmp_path: Path) -> None:
    with pytest.raises(
        UserError, match=r"memory=200MB \(191 MiB\): the run would take about .* No recipe of this model fits"
    ):
        run(of_run(memory="200MB"), tmp_path / "run")
    assert not (tmp_path / "run" / "metrics.jsonl").exists()


def test_the_refusal_names_the_batch_that_would_fit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    sizes: list[int] = []

    def predicted(config: Config, *rest: object) -> int:
        parts = rest[-1]
        assert isinstance(parts, int)
        sizes.append(parts)
        return 8 * 10**12 // parts

    monkeypatch.setattr(budget, "_predicted", predicted)
    monkeypatch.setattr(budget, "memory_limit_bytes", lambda: 10**15)
    with pytest.raises(UserError) as error:
        run(of_run(memory="2TB"), tmp_path / "run")
    assert sizes == [1, 2, 4]
    assert "data.batch_size=8 trainer.grad_accum_steps=4 would fit; or efficient-ft plan" in str(error.value)


@pytest.mark.slow
def test_a_smaller_part_of_the_batch_is_predicted_to_take_less(tmp_path: Path) -> None:
    config = of_run("data.batch_size=512", memory="1TB")
    from efficient_ft.methods.build import build_methods
    from efficient_ft.models import factory

    network, cpu = factory.random_model(config.model, 10), torch.device("cpu")
    sizes = [budget._predicted(config, network, build_methods(config), 0, cpu, parts) for parts in (1, 2, 4)]
    gradients = sum(p.numel() * 4 for p in network.parameters())
    assert sizes[0] > sizes[1] > sizes[2] > gradients


def test_a_run_is_stopped_when_it_passes_its_budget(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(budget, "_predicted", lambda *arguments: 0)
    with pytest.raises(
        UserError, match=r"memory=100MB \(95\.4 MiB\): stopped, since .* [MG]iB were taken by the process"
    ):
        run(of_run(memory="100MB"), tmp_path / "run")


def test_the_guard_stops_between_two_operations_and_leaves_nothing_behind() -> None:
    import signal
    import threading

    before = signal.getsignal(budget._SIGNAL)
    config = of_run(memory="1MB")

    def work() -> None:
        with within_budget(config, torch.device("cpu")):
            for _ in range(1000):
                time.sleep(0.01)

    with pytest.raises(UserError, match="memory=1MB"):
        work()
    assert signal.getsignal(budget._SIGNAL) is before
    assert not any(thread.name == "memory budget" for thread in threading.enumerate())


@pytest.mark.parametrize(("live", "stopped"), [(90, False), (98, False), (105, True)])
def test_freed_memory_is_given_back_before_a_run_is_stopped(
    monkeypatch: pytest.MonkeyPatch, live: int, stopped: bool
) -> None:
    held, released = [8], []

    class Process:
        def memory_info(self) -> Any:
            return SimpleNamespace(rss=(live + held[0]) * 10**6)

    def release() -> None:
        released.append(held[0])
        held[0] = 0

    monkeypatch.setattr(budget.psutil, "Process", Process)
    monkeypatch.setattr(budget, "release_freed_memory", release)
    expected = pytest.raises(UserError, match="taken by the process") if stopped else nullcontext()
    with expected, within_budget(of_run(memory="100MB"), torch.device("cpu")):
        time.sleep(0.3)
    assert released == [8]


def _plain(settings: Sequence[str]) -> Config:
    return configure([*SETTINGS, *settings])


def test_without_a_budget_nothing_is_watched() -> None:
    import threading

    with within_budget(_plain(["method=full"]), torch.device("cpu")):
        assert not any(thread.name == "memory budget" for thread in threading.enumerate())
