"""The cost of a run's training step, and that of its baseline."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from efficient_ft import cost
from efficient_ft.config import Config
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.process_memory import release_freed_memory, resident_bytes
from efficient_ft.data import class_count
from efficient_ft.methods.base import Method
from efficient_ft.methods.build import baseline_methods, build_methods
from efficient_ft.models import factory
from efficient_ft.models.tasks import tasks_of
from efficient_ft.record.results import CostReport, ExecutedCost, StepCost
from efficient_ft.task import TASKS
from efficient_ft.training.memory.watch import budget_of
from efficient_ft.training.optimizer import build_optimizer
from efficient_ft.training.output.console import cost_table, say
from efficient_ft.training.run_task import run_task

#: Number of classes for `cost_only` if the data set is not there to count them: that of ImageNet.
_UNKNOWN_CLASSES = 1000


def cost_only(config: Config) -> dict[str, Any]:
    """Count and print the cost of a training step, and that of the baseline; needs no data and no weights.

    Returns:
        A `record.results.CostReport`.

    Raises:
        UserError: the model or a method cannot be built, or a method cannot be applied to the model.
    """
    counts = {task: class_count(data) or _UNKNOWN_CLASSES for task, data in config.tasks.items()}
    classes = counts or class_count(config.data) or _UNKNOWN_CLASSES
    spec = factory.input_of(config.model)
    network = factory.random_model(config.model, classes)
    report = cost_report(config, network, build_methods(config), spec, classes, torch.device("cpu"), steps=0)
    shown = classes if isinstance(classes, int) else "+".join(map(str, classes.values()))
    say(
        f"{config.model.name}, {spec}, {shown} classes, batch {config.data.batch_size},"
        f" {config.trainer.precision}; counted, not timed\n\n"
        + cost_table(dict(report), "+".join(config.method), config.data.batch_size, TASKS[config.task].sample)
    )
    return dict(report)


def cost_report(
    config: Config,
    network: nn.Module,
    methods: Sequence[Method],
    spec: InputSpec,
    classes: int | Mapping[str, int],
    device: torch.device,
    steps: int,
    max_seconds: float | None = None,
    largest_batch: int | None = None,
) -> CostReport:
    """The cost of a training step of `network` with its methods, and that of the baseline (`cost.baseline`).

    Args:
        config: the run's configuration.
        network: the model; with several tasks the step is one of the first task.
        methods: the methods to apply, or applied, to it.
        spec: its input.
        classes: the number of classes, or that of each task.
        device: measures the step.
        steps: timed steps; 0: count only.
        max_seconds: no further step is timed after this time; None: all are.
        largest_batch: samples that a batch can have at most: those of the training split.

    Raises:
        SettingError: `cost.baseline` names no selection.
        UserError: the baseline's selection cannot be applied to the model.
    """
    switch = tasks_of(network)
    if switch is not None:
        switch.active = switch.names[0]
    selection = baseline_methods(config)
    plain = config.optim.model_copy(update={"state_bits": 32, "in_backward": False})  # the baseline saves nothing
    keys = [None if of is None else [m.state_key for m in of] for of in (selection, methods)]
    is_baseline = keys[0] == keys[1] and config.optim == plain  # the run's own step needs no comparison
    found = cost.compare(
        network,
        methods,
        None if selection is None or is_baseline else lambda: factory.random_model(config.model, classes),
        baseline_methods=selection or (),
        batch_size=min(config.data.batch_size, largest_batch or config.data.batch_size),
        input_size=spec.size,
        steps=steps,
        max_seconds=max_seconds,
        precision=config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        in_chans=len(spec.mean),
        task=run_task(config),
        frozen_bn=config.model.frozen_bn,
        device=device,
        grad_clip_norm=config.optim.grad_clip_norm,
        build_optimizer=lambda model: build_optimizer(model, config.optim, config.trainer.precision),
        baseline_optimizer=lambda model: build_optimizer(model, plain, config.trainer.precision),
        room=_room_of(config),
    )
    for name, one in found.items():
        if one.note:
            step = config.cost.baseline if name == "baseline" else "+".join(config.method)
            say(f"The step of {step} is {one.note}.")
    method = _step_cost(found["method"])
    if is_baseline:
        return {**method, "baseline": {"name": config.cost.baseline, **_step_cost(found["method"])}}
    if "baseline" not in found:
        return {**method, "baseline": None}
    return {**method, "baseline": {"name": config.cost.baseline, **_step_cost(found["baseline"])}}


def _room_of(config: Config) -> Callable[[], int] | None:
    """Return a function that gives the bytes left of the run's budget; None: it has none."""
    budget = budget_of(config)
    if budget is None:
        return None

    def room() -> int:
        release_freed_memory()
        return max(0, budget - resident_bytes())

    return room


def _step_cost(found: cost.Cost) -> StepCost:
    counted, measured = found.executed, found.measured
    executed: ExecutedCost = {
        "forward_flops": counted.forward_flops,
        "backward_flops": counted.backward_flops,
        "saved_bytes": counted.saved_bytes,
        "step_peak_bytes": counted.step_peak_bytes,
    }
    if counted.optimizer_bytes is not None:
        executed["optimizer_bytes"] = counted.optimizer_bytes
    return {
        "executed": executed,
        "measured": {
            "step_seconds": None if measured is None else measured.step_seconds,
            "peak_bytes": counted.peak_bytes if measured is None else measured.peak_bytes,
        },
    }
