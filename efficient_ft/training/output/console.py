"""Print the messages of a run in the first process, and format the tables that are printed at the end of a run."""

from __future__ import annotations

import logging
import warnings
from pathlib import Path
from typing import Any

from lightning.pytorch.utilities import rank_zero_only

from efficient_ft.core.format import (
    format_bytes,
    format_metric,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from efficient_ft.core.terminal import show, shown_path
from efficient_ft.core.text import spelled, table
from efficient_ft.task import TASKS
from efficient_ft.training.output.class_table import class_lines, class_names


def rank() -> int:
    """Return the rank of this process. If there is no Trainer, the rank is read from environment variables."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


@rank_zero_only
def say(text: str) -> None:
    """Wrap `text`, and print the result in the first process. On a terminal, a leading ``warning:`` is colored."""
    show(text)


def quiet_lightning() -> None:
    """Silence messages that do not apply to the loaders, checkpoints and frozen BatchNorm layers of this package."""
    logging.raiseExceptions = False  # a log file on a full disk must not cause a traceback
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "timm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    logging.getLogger("torch.utils._pytree").setLevel(logging.ERROR)  # concerns other libraries
    for message in (
        ".*does not have many workers.*",
        ".*module\\(s\\) in eval mode at the start of training.*",
        ".*your dataloader is not resumable.*",
        ".*is smaller than the logging interval.*",
        ".*Checkpoint directory.*",
        ".*GPU available but not used.*",
        ".*`srun` command is available.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
    ):
        warnings.filterwarnings("ignore", message=message)


_COSTS = (
    ("executed", "forward_flops", "forward FLOPs / {sample}", format_number),
    ("executed", "backward_flops", "backward FLOPs / {sample}", format_number),
    ("executed", "saved_bytes", "saved for the backward pass / {sample}", format_bytes),
    ("measured", "peak_bytes", "peak memory (batch size {batch})", format_bytes),
    ("executed", "model_bytes", "weights and buffers", format_bytes),
    ("executed", "optimizer_bytes", "optimizer state", format_bytes),
    ("executed", "ema_bytes", "averaged weights", format_bytes),
    ("measured", "step_seconds", "step time (median)", format_seconds),
)


def cost_rows(cost: dict[str, Any], method: str, batch: int, sample: str = "image") -> list[list[str]]:
    """Return a table of FLOPs, saved bytes, peak memory and step time, with columns for the baseline and the ratio.

    `cost` is a `record.results.CostReport`. `method` is the header of the column with the costs of the run. `sample` is
    the noun for a sample: image or text.
    """
    baseline = cost.get("baseline")
    if baseline and all(baseline[group] == cost[group] for group in ("executed", "measured")):
        baseline = None  # a baseline with equal costs is not shown
    rows = [["cost", method, *([baseline["name"], "ratio"] if baseline else [])]]
    for group, key, title, form in _COSTS:
        value = cost[group].get(key)
        if value is None:
            continue
        row = [title.format(batch=batch, sample=sample), form(value)]
        if baseline and baseline[group].get(key):
            row += [form(baseline[group][key]), format_ratio(value / baseline[group][key])]
        rows.append(row)
    return rows


def memory_rows(memory: dict[str, Any], batch: int) -> list[list[str]]:
    """Return a table of the process memory before and during training, and of the tensors in a training step."""
    growth, counted, device = memory["growth_bytes"], memory["counted_bytes"], memory["device"]
    rows = [
        ["memory", ""],
        ["process memory before the model was built", format_bytes(memory["before_model_bytes"])],
        ["process memory before training", format_bytes(memory["before_steps_bytes"])],
    ]
    if device:
        rows.append(["peak memory of all tensors on the GPU", format_bytes(device["allocated_bytes"])])
        rows.append(["peak reserved memory on the GPU", format_bytes(device["reserved_bytes"])])
    used = format_bytes(growth) if growth > 0 else "no increase"
    rows.append([f"used by training (batch size {batch})", used])
    if counted:
        rows.append(["tensors of a training step", format_bytes(counted)])
    return rows


def results_text(results: dict[str, Any], folder: Path) -> str:
    """Return the text that is printed at the end of a run. `results` is a `record.results.Results`."""
    config, accuracy, data = results["config"], results["accuracy"], results["data"]
    method = "+".join(config["method"])
    sample = TASKS[config.get("task", "classification")].sample
    tasks = accuracy.get("tasks", {})
    source = f"{', '.join(tasks)} in turn" if tasks else config["data"]["name"]
    batch = min(config["data"]["batch_size"], data.get("splits", {}).get("train", float("inf")))
    split = accuracy["split"]
    chosen = "\n(the best epoch was chosen on the test split: data.select_best_on=test)" if split == "test" else ""
    if stopped := results.get("stopped"):
        chosen += "\n(training stopped after epoch {epoch} of {epochs}: trainer.patience={patience})".format(**stopped)
    trained, total = results["trainable_parameters"], results["total_parameters"]
    share = f"{'all' if trained == total else f'{format_number(trained)} of'} {format_number(total)}"
    lines = ["", f"{config['model']['name']} on {source} with {method}: {share} parameters were trained"]
    if (limit := config["trainer"].get("limit_eval_batches")) is not None:
        chosen += _seen(limit, config["data"], data, sample)
    if not config["model"]["pretrained"] and config["model"]["weights"] is None:
        lines.append("  started from random weights (model.pretrained=false)")
    if skipped := data.get("skipped", 0):
        lines.append(f"  {skipped} unusable samples were left out (data.on_corrupt=skip)")
    classes = class_lines(data, class_names(data) if "classes" in data else (), sample)
    lines += [
        "",
        table(_accuracy_rows(accuracy, data, config.get("published"))) + chosen,
        "",
        *(["\n".join(classes), ""] if classes else []),
        table(cost_rows(results["cost"], method, batch, sample)),
        "",
        *([table(memory_rows(results["memory"], batch)), ""] if "memory" in results else []),
        f"Results: {shown_path(folder)} (model.safetensors contains the weights of"
        f" the {'epoch with the best mean' if tasks else 'best epoch'})",
    ]
    return "\n".join(lines)


def _seen(limit: int, settings: dict[str, Any], data: dict[str, Any], sample: str) -> str:
    """Return a note that states how many samples were evaluated with `trainer.limit_eval_batches`."""
    size = limit * (settings["eval_batch_size"] or settings["batch_size"])
    splits = {split: count for split, count in data.get("splits", {}).items() if split != "train"}
    each = [f"{min(size, count)} of {count} {split} {sample}s" for split, count in splits.items()]
    return f"\n(on {', '.join(each) or f'{limit} batches of each task'}: trainer.limit_eval_batches={limit})"


def _accuracy_rows(accuracy: dict[str, Any], data: dict[str, Any], published: float | None) -> list[list[str]]:
    """Return table rows with the best, last and published accuracies and the test accuracy of the best weights."""
    tasks, split = accuracy.get("tasks", {}), accuracy["split"]
    metric = accuracy.get("metric", "accuracy")
    rows = [[spelled(metric), "best", "last"]]
    rows += [
        [f"{task}, {split}", format_metric(of["best"], metric), format_metric(of["last"], metric)]
        for task, of in tasks.items()
    ]
    best, last = (format_metric(accuracy[key], metric) for key in ("best", "last"))
    rows.append([f"{'mean, ' if tasks else ''}{split}", best, last])
    tested = data["accuracy"].get("test")
    if split != "test" and tested is not None:
        each = data.get("tasks", {})
        rows += [[f"{task}, test", format_metric(of["accuracy"]["test"], metric), ""] for task, of in each.items()]
        rows.append([f"{'mean, ' if tasks else ''}test", format_metric(tested, metric), ""])
    rows += _further_rows(data.get("scores", {}))
    if published is not None:
        rows.append(["published", format_metric(published, metric), ""])
    return rows


def _further_rows(scores: dict[str, dict[str, Any]]) -> list[list[str]]:
    """Return rows with F1 or with errors on the test images, or on the validation images without test images."""
    split = "test" if "test" in scores else next(iter(scores), "")
    rows = []
    for name, value in scores.get(split, {}).items():
        if name.startswith(("f1_", "mae", "rmse")):
            shown = format_percent(value) if name.startswith("f1_") else f"{value:.4g}"
            rows.append([f"{split} {spelled(name)}", shown, ""])
    return rows
