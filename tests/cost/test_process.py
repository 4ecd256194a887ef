"""Tests of the process memory of steps: the counted parts and the counted steps."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch import nn

from efficient_ft.core import allocator
from efficient_ft.cost import (
    StepMemory,
    StepSpec,
    TrainingStep,
    executed,
    optimizer_state_bytes,
    predicted_growth,
    process,
)
from efficient_ft.cost.predict import _GROWTH
from efficient_ft.planning import planner
from tests.conftest import REPOSITORY


def test_the_counted_peak_of_a_step_has_neither_model_nor_batch():
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 7))
    counted = executed(model, 5, (8, 8))
    assert counted.batch_bytes == 5 * 3 * 8 * 8 * 4 + 5 * 8
    assert counted.model_bytes == (3 * 8 * 8 * 7 + 7) * 4
    assert counted.step_peak_bytes == counted.peak_bytes - counted.model_bytes - counted.batch_bytes
    # The weight gradient is the largest tensor of a step.
    assert 3 * 8 * 8 * 7 * 4 < counted.step_peak_bytes < 2 * 3 * 8 * 8 * 7 * 4


@pytest.mark.parametrize(("build", "moments"), [(torch.optim.AdamW, 2), (torch.optim.SGD, 0)])
def test_the_state_of_an_optimizer_has_its_moments(build: type[torch.optim.Optimizer], moments: int):
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 7))
    trained = sum(p.numel() for p in model.parameters())
    step = TrainingStep(
        model,
        [],
        StepSpec(2, (8, 8)),
        build_optimizer=lambda m: build(m.parameters(), lr=1e-3),  # type: ignore[call-arg]
    )
    assert step.optimizer_bytes == 0
    step()
    counters = 4 * len(list(model.parameters())) if moments else 0  # Adam stores a step count per parameter
    assert step.optimizer_bytes == moments * 4 * trained + counters


def test_the_first_step_returns_freed_memory_to_the_system(monkeypatch: pytest.MonkeyPatch):
    released: list[int] = []
    step = TrainingStep(nn.Sequential(nn.Flatten(), nn.Linear(3 * 8 * 8, 7)), [], StepSpec(2, (8, 8)), first_step=3)
    monkeypatch.setattr("efficient_ft.cost.step.release_freed_memory", lambda: released.append(step.optimizer_bytes))
    for _ in range(3):
        step()
    assert released == [0]  # once, before the optimizer state is created


def test_the_state_of_a_tensor_subclass_is_that_of_its_parts():
    from torch.testing._internal.two_tensor import TwoTensor

    parameter = nn.Parameter(torch.zeros(3))
    optimizer = torch.optim.SGD([parameter])
    optimizer.state[parameter]["moment"] = TwoTensor(torch.zeros(100), torch.zeros(100))
    assert optimizer_state_bytes(optimizer) == 2 * 400


class _Mark:
    """A high-water mark with given peaks."""

    source = "given"

    def __init__(self) -> None:
        self.peaks, self.peak_bytes = iter([900, 700, 800, 750]), 0

    def start(self) -> None: ...

    def stop(self) -> None:
        self.peak_bytes = next(self.peaks)


def test_steps_after_the_warm_up_count_above_the_size_before_the_first(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(process, "HighWaterMark", _Mark)
    monkeypatch.setattr(process, "resident_bytes", lambda: 500)
    memory = StepMemory(present_bytes=100)
    assert memory.measured(0) is None
    for _ in range(4):
        with memory:
            pass
    steady = memory.measured(1)
    assert steady is not None
    assert (steady.before_bytes, steady.peak_bytes, steady.growth_bytes) == (400, 800, 400)
    assert (steady.first_step, steady.steps, steady.source, steady.device) == (1, 3, "given", None)
    last = memory.measured(10)
    assert last is not None
    assert (last.peak_bytes, last.first_step, last.steps) == (750, 3, 1)


def test_on_cuda_growth_is_what_is_reserved_above_what_was_allocated_before(monkeypatch: pytest.MonkeyPatch):
    """The CUDA statistics are replaced, so the test requires no GPU."""
    resets: list[torch.device] = []
    monkeypatch.setattr(torch.cuda, "memory_allocated", lambda _: 100)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", resets.append)
    allocated, reserved = iter([900, 500, 600]), iter([1000, 800, 700])
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda _: next(allocated))
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda _: next(reserved))
    memory = StepMemory("cuda:1", present_bytes=30)
    for _ in range(3):
        with memory:
            pass
    steady = memory.measured(1)
    assert steady is not None
    assert steady.device == process.DeviceMemory(before_bytes=70, allocated_bytes=600, reserved_bytes=800)
    assert steady.growth_bytes == 730
    assert resets == [torch.device("cuda:1")] * 3


def test_growth_is_predicted_for_every_allocator_that_a_process_can_have():
    counted, largest = 300 * 2**20, 20 * 2**20
    predicted = {name: predicted_growth(counted, largest, name) for name in (*allocator._PRELOADED, "system")}
    assert all(counted < size < 2 * counted for size in predicted.values())
    assert predicted["tcmalloc"] < predicted["mimalloc"]
    assert predicted_growth(counted, largest, allocator.KEEPING) > 3 * counted
    assert allocator.allocator_in_use() in _GROWTH


@pytest.mark.exhaustive
@pytest.mark.skipif(not allocator._glibc(), reason="the predictions were found with allocators of Linux")
def test_a_process_grows_by_what_is_predicted(tmp_path: Path):
    file = tmp_path / "memory.json"
    words = ["bench", "memory", "full", "low_bit", "--model", "deit_tiny", "--batch", "16", "--json", str(file)]
    subprocess.run([sys.executable, "-m", "efficient_ft", *words], cwd=REPOSITORY, check=True, capture_output=True)
    report = json.loads(file.read_text())
    used = report["environment"]["allocator"]
    assert used in allocator._PRELOADED, "no allocator could be preloaded"
    for recipe in report["recipes"].values():
        predicted = predicted_growth(recipe["counted_bytes"], recipe["executed"]["largest_bytes"], used)
        assert 0.75 * predicted < recipe["memory"]["growth_bytes"] < planner.MARGIN * predicted


@pytest.mark.gpu
def test_a_step_on_a_gpu_takes_what_is_counted_for_it():
    spec, width = StepSpec(64, (64, 64)), 4096
    model = nn.Sequential(nn.Flatten(), nn.Linear(3 * 64 * 64, width), nn.GELU(), nn.Linear(width, 10))
    counted = executed(model, spec.batch_size, spec.input_size)
    step = TrainingStep(model, [], spec, device="cuda")
    memory = StepMemory("cuda")
    for _ in range(4):
        with memory:
            step()
    steady = memory.measured(2)
    assert steady is not None
    assert steady.device is not None
    expected = counted.step_peak_bytes + step.optimizer_bytes
    assert steady.device.allocated_bytes - steady.device.before_bytes == pytest.approx(expected, rel=0.3)
    assert steady.device.allocated_bytes <= steady.device.reserved_bytes
