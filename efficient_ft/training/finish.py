"""Finish a run: evaluate the best weights, report the cost, and write figures and results.json."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from efficient_ft.core.allocator import allocator_in_use
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_metric
from efficient_ft.core.process_memory import lifetime_peak_bytes, release_freed_memory
from efficient_ft.core.terminal import shown_path
from efficient_ft.core.text import spelled
from efficient_ft.cost import Prediction
from efficient_ft.methods.base import Applied
from efficient_ft.models import factory
from efficient_ft.optim import SteppedInBackward
from efficient_ft.record.environment import environment
from efficient_ft.record.formats import FORMAT
from efficient_ft.record.predictions import read_predictions
from efficient_ft.record.results import Accuracy, AppliedReport, Results, write_results
from efficient_ft.training.callbacks.recorder import Recorder
from efficient_ft.training.costs import cost_report
from efficient_ft.training.datamodule import run_length
from efficient_ft.training.evaluate import data_report
from efficient_ft.training.features.prefix import features_hint
from efficient_ft.training.kinds.base import Sample, only
from efficient_ft.training.memory.measured import accumulated_gradients
from efficient_ft.training.memory.watch import budget_of
from efficient_ft.training.output import export
from efficient_ft.training.output.class_table import final_split
from efficient_ft.training.output.console import results_text, say
from efficient_ft.training.output.extremes import extreme_samples
from efficient_ft.training.output.loggers import write_summary
from efficient_ft.training.train import Fitted, Training

#: Time limit for timing steps: this fraction of the training time, but at least this number of seconds.
COST_SHARE, COST_SECONDS = 0.1, 2.0


def finish(run: Training, fitted: Fitted, arguments: Sequence[str], predicted: Prediction | None) -> dict[str, Any]:
    """Evaluate the run, measure its cost, and write and return its results (`record.results.Results`).

    Processes other than the first one return only the accuracy.

    Raises:
        UserError: If no epoch was finished, or if the network's outputs are not finite.
    """
    trainer, folder, config = fitted.trainer, run.held.path, run.config
    accuracy, taken = _accuracy(fitted.recorder), fitted.totals.values()
    if not trainer.is_global_zero:
        return {"accuracy": accuracy}
    device = trainer.strategy.root_device
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, SteppedInBackward):
            optimizer.remove()
    trainer.optimizers = []  # the optimizer state must be freed before the cost is measured
    fitted.module.model.zero_grad(set_to_none=True)
    sizes = [(p.numel(), p.requires_grad) for p in run.network.parameters()]
    release_freed_memory()
    data = data_report(config, folder, run.data, device)
    data["summary"] = {task: one.record() for task, one in run.understood.items()}
    release_freed_memory()
    seconds, largest = max(COST_SECONDS, COST_SHARE * taken["seconds"]), run.kind.largest_batch(run.data)
    classes, steps = run.data.num_classes, config.cost.steps
    cost = cost_report(config, run.network, run.methods, classes, device, steps, seconds, largest)
    if run.kind.task.metric != "accuracy":
        accuracy["metric"] = run.kind.task.metric
    results: Results = {
        "format": FORMAT,
        "accuracy": {**accuracy, "test": data["accuracy"].get("test")},
        "cost": cost,
        "totals": taken,
        "trainable_parameters": sum(size for size, trains in sizes if trains),
        "total_parameters": sum(size for size, _ in sizes),
        "methods": {m.name: _applied_report(m.applied) for m in run.methods if m.applied is not None},
        "data": data,
        "seed": config.seed,
        "arguments": list(arguments),
        "changed": config.changed(),
        "config": config.model_dump(mode="json"),
        "environment": environment(
            device,
            packages=("torch", "timm", "lightning"),
            allocator=allocator_in_use(),
            precision=config.trainer.precision,
        ),
    }
    _add_parts(results, run, fitted)
    _add_memory(results, run, fitted, predicted)
    release_freed_memory()
    run.kind.write_figures(folder, run.data, device)
    if "memory" in results:
        results["memory"]["peak_bytes"] = lifetime_peak_bytes()
    _write(results, run, fitted, device)
    if run.kind.supports("prefix") and not config.tasks:
        images, epochs = only(run.data), run_length(config, run.data, trainer.world_size)[0]
        hint = features_hint(config, images, run.network, run.methods, epochs, taken["seconds"])
        if hint is not None:
            say(hint)
    return dict(results)


def paused(run: Training, fitted: Fitted) -> dict[str, Any]:
    """Print and return the state of a run that was paused.

    Returns:
        A dict with the number of optimizer steps so far (`step`), the planned numbers of steps (`steps`) and epochs
        (`epochs`), the metric (`metric`), its value (`value`) and the loss (`loss`) in the last evaluation, the split
        of this evaluation (`split`), the training time including evaluations (`seconds`) and the time of the last
        evaluation (`evaluation_seconds`) in seconds, and the peak memory of the process or, on a GPU, the peak of the
        reserved memory (`peak_bytes`).
    """
    row, split, metric = fitted.recorder.row, fitted.recorder.split, fitted.module.task.metric
    steps, value = fitted.trainer.global_step, row[f"{split}_{metric}"]
    device = fitted.trainer.strategy.root_device
    epochs, total = run_length(run.config, run.data, fitted.trainer.world_size)
    say(
        f"The run was paused after step {steps} of {total}: {split} {spelled(metric)}"
        f" {format_metric(value, metric)}. The same command without pause_at continues the run in"
        f" {shown_path(run.held.path)}."
    )
    return {
        "step": steps,
        "steps": total,
        "epochs": epochs,
        "metric": metric,
        "split": split,
        "value": value,
        "loss": row[f"{split}_loss"],
        "seconds": fitted.totals.values()["seconds"],
        "evaluation_seconds": fitted.recorder.evaluation_seconds,
        "peak_bytes": torch.cuda.max_memory_reserved(device) if device.type == "cuda" else lifetime_peak_bytes(),
    }


def _add_parts(results: Results, run: Training, fitted: Fitted) -> None:
    if (loaded := factory.loading_report(run.network)) is not None:
        results["weights"] = loaded.as_dict()
    if (stopped := fitted.recorder.stopped) is not None:
        assert run.config.trainer.patience is not None
        planned = run_length(run.config, run.data, fitted.trainer.world_size)[0]
        results["stopped"] = {"epoch": stopped, "epochs": planned, "patience": run.config.trainer.patience}
    if fitted.module.warnings:
        results["warnings"] = fitted.module.warnings
    features = fitted.features
    if features is not None and features.features is not None:
        results["features"] = features.features.report()
    if features is not None and features.prefix is not None:
        results["prefix"] = features.prefix
    if fitted.compilation is not None and fitted.compilation.blocks is not None:
        blocks = fitted.compilation.blocks
        results["compiled"] = {"blocks": blocks.compiled, "eager": blocks.eager}


def _add_memory(results: Results, run: Training, fitted: Fitted, predicted: Prediction | None) -> None:
    gradients = accumulated_gradients(run.network, run.config.trainer.grad_accum_steps)
    measured = fitted.memory.report(results["cost"]["executed"]["step_peak_bytes"], gradients)
    if measured is None:
        return
    results["memory"] = measured
    if predicted is not None:
        measured["predicted_peak_bytes"] = predicted.peak_bytes
        if (budget := budget_of(run.config)) is not None:
            measured["budget_bytes"] = budget


def _write(results: Results, run: Training, fitted: Fitted, device: torch.device) -> None:
    """Write the results to results.json and to the loggers, and print them."""
    folder, plain = run.held.path, dict(results)
    text = results_text(plain, folder)
    write_results(folder, results)
    samples = _samples(run, device) if fitted.loggers else {}
    write_summary(fitted.loggers, results, text, fitted.trainer.global_step, samples)
    say(text)


def _samples(run: Training, device: torch.device) -> dict[str, list[Sample]]:
    """Return samples of each data set for loggers, grouped by selection.

    The samples of the selection ``samples`` are predicted with the weights in model.safetensors. The other selections
    (`training.output.extremes`) show recorded predictions for the split of the final results.
    """
    found: dict[str, list[Sample]] = {}
    recorded = read_predictions(run.held.path)
    for name, part in run.data.parts.items():
        trained, splits = export.load(run.held.path, name or None), recorded.get(name, {})
        groups = {"samples": run.kind.samples(trained, part, device)}
        if (split := final_split(splits)) is not None:
            for selection, chosen in extreme_samples(part, trained.input, split, splits[split]).items():
                groups[selection] = [Sample(one.content, one.caption) for one in chosen]
        for selection, samples in groups.items():
            named = [one._replace(caption=f"{name}: {one.caption}") for one in samples] if name else samples
            found.setdefault(selection, []).extend(named)
    return found


def _accuracy(recorder: Recorder) -> Accuracy:
    if recorder.best is None or recorder.last is None:
        raise UserError("No epoch was finished, so there is no result. Run the same command again to continue the run.")
    accuracy: Accuracy = {"best": recorder.best, "last": recorder.last, "split": recorder.split, "test": None}
    if recorder.best_tasks:
        accuracy["tasks"] = {
            task: {"best": best, "last": recorder.last_tasks[task]} for task, best in recorder.best_tasks.items()
        }
    return accuracy


def _applied_report(applied: Applied) -> AppliedReport:
    return {
        "summary": str(applied).partition(": ")[2],
        "touched": list(applied.touched),
        "skipped": {name: str(why) for name, why in applied.skipped.items()},
        "notes": list(applied.notes),
    }
