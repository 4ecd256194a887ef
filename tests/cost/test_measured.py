"""Tests of alternating timings and of cost probes, which do not change the run. No test compares durations."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import timm
import torch
from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.cost import StepSpec, TrainingStep, compare, executed, measured, time_steps
from efficient_ft.methods import LBPWHT, LastStage
from efficient_ft.methods.base import Method, apply_methods

SHAPE: dict[str, Any] = {"batch_size": 2, "input_size": (64, 64)}


def small_vit() -> nn.Module:
    return timm.create_model("vit_tiny_patch16_224", img_size=64, depth=4, embed_dim=48, num_classes=10)


@pytest.fixture
def run() -> tuple[nn.Module, list[Method]]:
    model = small_vit()
    methods: list[Method] = [LastStage(), LBPWHT(order=2)]
    apply_methods(model, methods)
    return model, methods


def test_recipes_take_turns_and_the_warm_up_is_not_timed():
    calls: list[str] = []

    def record(name: str) -> Callable[[], None]:
        return lambda: calls.append(name)

    seconds = time_steps({"a": record("a"), "b": record("b")}, steps=3, warmup=2)
    assert calls == ["a", "b"] * 5
    assert {name: len(values) for name, values in seconds.items()} == {"a": 3, "b": 3}
    assert all(value >= 0 for values in seconds.values() for value in values)
    with pytest.raises(UserError, match="steps must be an integer >= 1, got 0"):
        time_steps({}, steps=0)


def test_a_training_step_trains_what_the_methods_left_trainable(run: tuple[nn.Module, list[Method]]):
    model, methods = run
    before = copy.deepcopy(model.state_dict())
    step = TrainingStep(model, methods, StepSpec(**SHAPE, grad_clip_norm=1.0))
    step()
    step()
    changed = {name for name, value in model.state_dict().items() if not torch.equal(value, before[name])}
    assert changed
    assert changed <= {name for name, p in model.named_parameters() if p.requires_grad}
    assert step.steps == 2


def test_methods_do_their_work_around_each_step():
    calls: list[Any] = []

    class Listening(LastStage):
        def step_begin(self, step: int) -> None:
            calls.append(step)

        def step_end(self) -> None:
            calls.append("end")

    model, method = small_vit(), Listening()
    method.apply(model)
    step = TrainingStep(model, [method], StepSpec(**SHAPE), first_step=7)
    step()
    step()
    assert calls == [7, "end", 8, "end"]


@pytest.mark.slow
def test_both_groups_for_the_method_and_for_full_fine_tuning(run: tuple[nn.Module, list[Method]]):
    model, methods = run
    costs = compare(model, methods, small_vit, **SHAPE, steps=3)
    assert list(costs) == ["method", "baseline"]
    assert costs["method"].executed == executed(model, 2, (64, 64), methods=methods)
    assert costs["baseline"].executed == executed(small_vit(), 2, (64, 64))
    assert costs["method"].executed.backward_flops < costs["baseline"].executed.backward_flops / 4
    for cost in costs.values():
        assert cost.measured is not None
        assert len(cost.measured.seconds) == 3
        assert min(cost.measured.seconds) <= cost.measured.step_seconds <= max(cost.measured.seconds)
        assert cost.measured.peak_bytes == cost.executed.peak_bytes  # equal on the CPU
        assert set(cost.as_dict()) == {"executed", "measured"}


def test_a_probe_leaves_the_run_alone(run: tuple[nn.Module, list[Method]]):
    model, methods = run
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    model(torch.randn(2, 3, 64, 64)).sum().backward()
    optimizer.step()
    model.blocks[0].eval()
    values = copy.deepcopy(model.state_dict())
    gradients = {n: p.grad for n, p in model.named_parameters()}
    state = copy.deepcopy(optimizer.state_dict())
    flags = [m.training for m in model.modules()]
    random = torch.get_rng_state()

    compare(model, methods, None, **SHAPE, steps=1)

    assert torch.equal(torch.get_rng_state(), random)
    assert all(torch.equal(v, values[n]) for n, v in model.state_dict().items())
    assert all(p.grad is gradients[n] for n, p in model.named_parameters())
    assert [m.training for m in model.modules()] == flags
    after = optimizer.state_dict()["state"]
    assert all(torch.equal(after[k][n], v) for k, s in state["state"].items() for n, v in s.items())


def test_zero_steps_count_and_do_not_time(run: tuple[nn.Module, list[Method]]):
    costs = compare(*run, small_vit, **SHAPE, steps=0)
    assert all(cost.measured is None and not cost.note for cost in costs.values())


@pytest.mark.slow
def test_what_does_not_fit_is_counted_and_not_timed(
    run: tuple[nn.Module, list[Method]], monkeypatch: pytest.MonkeyPatch
):
    model, methods = run
    need = executed(model, 2, (64, 64), methods=methods)
    room = need.peak_bytes + 2 * need.model_bytes
    monkeypatch.setattr(measured, "_free_bytes", lambda device: room)
    costs = compare(model, methods, small_vit, **SHAPE, steps=1)
    assert costs["method"].measured is not None
    assert costs["baseline"].measured is None
    assert costs["baseline"].note.startswith("not timed: the step needs about")
    assert costs["baseline"].as_dict()["note"] == costs["baseline"].note


def test_out_of_memory_is_a_note(run: tuple[nn.Module, list[Method]]):
    class Large(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head = nn.Linear(3, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if type(x) is torch.Tensor:  # not a fake tensor
                raise torch.OutOfMemoryError("out of memory: tried to allocate 80 GiB\nmore lines")
            return self.head(x.mean((2, 3)))

    costs = compare(*run, Large, **SHAPE, steps=1)
    assert costs["baseline"].note == "not timed: out of memory: tried to allocate 80 GiB"
    assert costs["method"].measured is not None


@pytest.mark.slow
def test_timing_ends_in_time(run: tuple[nn.Module, list[Method]]):
    """Without time, only the method is timed. With little time, each candidate has at least one step."""
    costs = compare(*run, small_vit, **SHAPE, steps=1000, max_seconds=0.0)
    assert costs["method"].measured is not None
    assert costs["baseline"].note == "not timed: the time limit of 0 s was reached"
    costs = compare(*run, small_vit, **SHAPE, steps=100_000, max_seconds=8.0)
    counts = {len(cost.measured.seconds) for cost in costs.values() if cost.measured is not None}
    assert len(counts) == 1
    assert 1 <= counts.pop() < 100_000


def test_the_runs_own_optimizer_is_built_on_the_copy(run: tuple[nn.Module, list[Method]]):
    model, methods = run
    given: list[nn.Module] = []

    def build(network: nn.Module) -> torch.optim.Optimizer:
        given.append(network)
        return torch.optim.SGD((p for p in network.parameters() if p.requires_grad), lr=0.1)

    compare(model, methods, None, **SHAPE, steps=1, build_optimizer=build)
    assert len(given) == 2, "once to be counted, once to be timed"
    assert all(network is not model for network in given)


@pytest.mark.gpu
def test_the_peak_on_a_gpu_is_close_to_the_executed_one():
    model = timm.create_model("vit_small_patch16_224", num_classes=10)
    costs = compare(model, [], None, batch_size=32, input_size=(224, 224), device="cuda", steps=1)
    assert costs["method"].measured is not None
    assert costs["method"].measured.peak_bytes == pytest.approx(costs["method"].executed.peak_bytes, rel=0.1)
