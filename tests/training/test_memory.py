"""Tests of the process memory that a run measures during its steps."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from efficient_ft.record.results import read_results, write_results
from efficient_ft.training.memory.measured import STEPS, WARMUP, MemoryMeter, accumulated_gradients
from efficient_ft.training.output.console import memory_rows, results_text
from efficient_ft.training.output.loggers import summary_of
from efficient_ft.training.run import run
from tests.training.runs import interrupted_at


def test_a_run_records_what_its_steps_take(finished: tuple[Path, Any, dict[str, Any]]):
    _, _, results = finished
    memory = results["memory"]
    assert 2**27 < memory["before_model_bytes"] <= memory["before_steps_bytes"] <= memory["peak_bytes"]
    assert memory["growth_bytes"] == memory["step_peak_bytes"] - memory["before_steps_bytes"]
    assert (memory["first_step"], memory["steps"], memory["device"]) == (WARMUP, STEPS, None)
    # AdamW stores two moments per parameter and a counter per tensor.
    assert memory["optimizer_bytes"] == pytest.approx(8 * results["trainable_parameters"], rel=0.1)
    above = results["cost"]["executed"]["step_peak_bytes"]
    assert memory["counted_bytes"] == above + memory["optimizer_bytes"]
    assert summary_of(results)["memory.growth_bytes"] == memory["growth_bytes"]


def test_old_results_have_no_memory_and_are_read(finished: tuple[Path, Any, dict[str, Any]], tmp_path: Path):
    results: Any = copy.deepcopy(finished[2])
    assert "process memory" in results_text(results, tmp_path)
    del results["memory"]
    for cost in (results["cost"], results["cost"]["baseline"]):
        del cost["executed"]["step_peak_bytes"]
    write_results(tmp_path, results)
    assert read_results(tmp_path) == results
    assert "process memory" not in results_text(results, tmp_path)
    assert not any(key.startswith("memory") for key in summary_of(results))


def test_the_table_names_process_memory_and_counted_bytes():
    memory: dict[str, Any] = {
        "before_model_bytes": 2**29,
        "before_steps_bytes": 2**30,
        "growth_bytes": 3 * 2**20,
        "counted_bytes": 2 * 2**20,
        "device": None,
    }
    shown = dict(memory_rows(memory, 4))
    assert shown["process memory before the model was built"] == "512 MiB"
    assert shown["process memory before training"] == "1.00 GiB"
    assert shown["used by training (batch size 4)"] == "3.00 MiB"
    assert shown["tensors of a training step"] == "2.00 MiB"
    assert ["used by training (batch size 4)", "no increase"] in memory_rows(memory | {"growth_bytes": -(2**20)}, 4)
    memory["device"] = {"before_bytes": 1, "allocated_bytes": 2**20, "reserved_bytes": 5 * 2**20}
    shown = dict(memory_rows(memory, 4))
    assert shown["peak memory of all tensors on the GPU"] == "1.00 MiB"
    assert shown["peak reserved memory on the GPU"] == "5.00 MiB"


@pytest.mark.slow
def test_a_resumed_run_keeps_what_was_measured(tmp_path: Path, configuration: Any, without_cost: None):
    """A run that is interrupted before the measurement measures after the resume; a later one keeps its result."""
    for at, first in ((WARMUP + STEPS + 1, WARMUP), (1, WARMUP)):
        config, folder = configuration(), tmp_path / str(at)
        interrupted_at(at, config, folder)
        saved = torch.load(folder / "checkpoint.ckpt", weights_only=False)["callbacks"].get("MemoryMeter")
        assert (saved is not None) == (at > 1)
        memory = run(config, folder)["memory"]
        if saved is not None:
            assert memory["peak_bytes"] >= saved.pop("peak_bytes")  # the peak includes the continued part of the run
            assert {key: memory[key] for key in saved} == saved
        assert (memory["first_step"], memory["steps"]) == (first, STEPS)


@pytest.mark.slow
def test_a_step_of_several_micro_batches_is_one_step(tmp_path: Path, configuration: Any, without_cost: None):
    config = configuration(trainer__grad_accum_steps=3, trainer__epochs=1)
    results = run(config, tmp_path / "run")
    memory = results["memory"]
    # The 11 batches form steps of 3, 3, 3 and 2 batches.
    assert (memory["first_step"], memory["steps"]) == (WARMUP, 2)
    assert memory["counted_bytes"] == 6 + memory["optimizer_bytes"] + 4 * results["trainable_parameters"]


@pytest.mark.slow
def test_the_first_step_of_a_run_returns_freed_memory_to_the_system(
    tmp_path: Path, configuration: Any, without_cost: None, monkeypatch: pytest.MonkeyPatch
):
    released: list[int] = []
    monkeypatch.setattr("efficient_ft.training.module.release_freed_memory", lambda: released.append(1), raising=True)
    run(configuration(trainer__grad_accum_steps=3, trainer__epochs=1), tmp_path / "run")
    assert released == [1]


def test_gradients_are_counted_where_they_outlive_a_micro_batch():
    network = nn.Sequential(nn.Linear(3, 5), nn.Linear(5, 2))
    network[0].requires_grad_(False)
    assert accumulated_gradients(network, 1) == 0
    assert accumulated_gradients(network, 2) == 4 * (5 * 2 + 2)


def test_nothing_is_reported_without_a_step():
    assert MemoryMeter([], 5).report(1, 0) is None
