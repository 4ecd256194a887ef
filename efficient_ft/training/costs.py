"""The cost of a run's training step, compared with a training step of the baseline."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from efficient_ft import cost
from efficient_ft.config import Config
from efficient_ft.core.process_memory import release_freed_memory, resident_bytes
from efficient_ft.core.text import table
from efficient_ft.cost import StepSpec
from efficient_ft.methods.base import Method
from efficient_ft.methods.build import baseline_methods, build_methods
from efficient_ft.models import factory
from efficient_ft.models.tasks import tasks_of
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.record.results import BaselineCost, CostReport, ExecutedCost, StepCost
from efficient_ft.training.callbacks.ema import RunOptimizer
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.watch import budget_of
from efficient_ft.training.output.console import cost_rows, say


def step_spec(config: Config) -> StepSpec:
    """Return the settings that determine a training step of the run."""
    spec = factory.input_of(config.model)
    return StepSpec(
        config.data.batch_size,
        spec.size,
        config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        in_chans=len(spec.mean),
        frozen_bn=config.model.frozen_bn,
        grad_clip_norm=config.optim.grad_clip_norm,
        task=kind_of(config).task_of(config),
    )


def cost_only(config: Config) -> dict[str, Any]:
    """Print and return the cost of a training step of the run and the cost of a training step of the baseline.

    The costs are counted without loading data or pretrained weights.

    Raises:
        UserError: If the model or a method cannot be built, or if a method cannot be applied to the model.
    """
    kind = kind_of(config)
    classes, spec = kind.classes(config), factory.input_of(config.model)
    network = store_weights(kind.random_network(config.model, classes), config.trainer.weight_dtype)
    methods = build_methods(config)
    kind.refuse_methods(methods)
    report = cost_report(config, network, methods, classes, torch.device("cpu"))
    shown = classes if isinstance(classes, int) else "+".join(map(str, classes.values()))
    say(
        f"{config.model.name}, {spec}, {shown} classes, batch size {config.data.batch_size},"
        f" {config.trainer.precision}. The costs are counted, not timed.\n\n"
        + table(cost_rows(dict(report), "+".join(config.method), config.data.batch_size, kind.task.sample))
    )
    return dict(report)


def cost_report(
    config: Config,
    network: nn.Module,
    methods: Sequence[Method],
    classes: int | Mapping[str, int],
    device: torch.device,
    steps: int = 0,
    max_seconds: float | None = None,
    largest_batch: int | None = None,
) -> CostReport:
    """Return the cost of a training step with `methods` and the cost of a training step of the baseline.

    The setting `cost.baseline` names the baseline. If there are several tasks, a step of the first task is counted.

    Args:
        config: the configuration of the run.
        network: the network of the run.
        methods: the methods of the run, which may already be applied to `network`.
        classes: number of classes, or a mapping from tasks to numbers of classes.
        device: the device on which the steps run.
        steps: number of timed steps, or 0 to count the costs without timing.
        max_seconds: time in seconds after which no further step is timed, or None for no limit.
        largest_batch: maximum number of samples per batch (size of the training split), or None for no limit.

    Raises:
        SettingError: If `cost.baseline` does not name a method that selects the trained parameters.
        UserError: If the baseline cannot be applied to the model.
    """
    switch, spec = tasks_of(network), step_spec(config)
    spec = replace(spec, batch_size=min(spec.batch_size, largest_batch or spec.batch_size))
    if switch is not None:
        switch.active = switch.names[0]
    selection = baseline_methods(config)
    # The optimizer of the baseline uses no memory-saving options, and its weights are stored in fp32.
    plain = config.optim.model_copy(update={"state_bits": 32, "in_backward": False})
    keys = [None if of is None else [m.state_key for m in of] for of in (selection, methods)]
    wide = config.trainer.weight_dtype == "fp32"
    is_baseline = keys[0] == keys[1] and config.optim == plain and wide  # if True, only one step is measured
    optimizer, of_baseline = RunOptimizer(config), RunOptimizer(config, plain)
    found = cost.compare(
        network,
        methods,
        None if selection is None or is_baseline else lambda: kind_of(config).random_network(config.model, classes),
        baseline_methods=selection or (),
        steps=steps,
        max_seconds=max_seconds,
        device=device,
        build_optimizer=optimizer,
        baseline_optimizer=of_baseline,
        room=None if budget_of(config) is None else lambda: _room(config),
        **vars(spec),
    )
    for name, one in found.items():
        if one.note:
            step = config.cost.baseline if name == "baseline" else "+".join(config.method)
            say(f"The training step of {step} was {one.note}.")
    if steps and config.trainer.compile:
        say("The training steps in the cost report were timed without compilation.")
    whole = found["method"] if is_baseline else found.get("baseline")
    baseline: BaselineCost | None = None
    if whole is not None:
        averages = (optimizer if is_baseline else of_baseline).average_bytes
        baseline = {"name": config.cost.baseline, **_step_cost(whole, not wide, averages)}
    return {**_step_cost(found["method"], not wide, optimizer.average_bytes), "baseline": baseline}


def _room(config: Config) -> int:
    """Return how many bytes of the run's memory budget remain."""
    release_freed_memory()
    return max(0, (budget_of(config) or 0) - resident_bytes())


def _step_cost(found: cost.Cost, with_weights: bool, average_bytes: int) -> StepCost:
    counted, measured = found.executed, found.measured
    executed: ExecutedCost = {
        "forward_flops": counted.forward_flops,
        "backward_flops": counted.backward_flops,
        "saved_bytes": counted.saved_bytes,
        "step_peak_bytes": counted.step_peak_bytes,
    }
    if with_weights:
        executed["model_bytes"] = counted.model_bytes
    if counted.optimizer_bytes is not None:
        executed["optimizer_bytes"] = counted.optimizer_bytes
    if average_bytes:
        executed["ema_bytes"] = average_bytes
    return {
        "executed": executed,
        "measured": {
            "step_seconds": None if measured is None else measured.step_seconds,
            "peak_bytes": counted.peak_bytes if measured is None else measured.peak_bytes,
        },
    }
