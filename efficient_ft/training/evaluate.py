"""Evaluate the weights of a run: at its end, and later with ``evaluate=RUN``."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NotRequired, TypedDict

import lightning.pytorch as L
import torch
from torch import nn
from torch.utils.data import DataLoader

from efficient_ft.config import Config, DataConfig, data_configs
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.terminal import shown_path
from efficient_ft.core.text import spelled, table
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.data import ImageData, RoundRobinData, SegmentationData, TextData
from efficient_ft.models.tasks import tasks_of
from efficient_ft.record.config_file import read_config
from efficient_ft.record.formats import PASS_A_RUN, USE_ITS_VERSION
from efficient_ft.record.results import DataReport, flatten
from efficient_ft.task import TASKS, Task, moved
from efficient_ft.training.datamodule import RunData, missing_images, open_images, summaries, summary_text
from efficient_ft.training.output import export
from efficient_ft.training.output.console import say
from efficient_ft.training.run_task import run_task
from efficient_ft.training.trainer import use_channels_last


class Evaluated(TypedDict):
    """Accuracy (or the task's metric) by split (with several data sets the mean), that of each, further measures."""

    accuracy: dict[str, float]
    scores: NotRequired[dict[str, dict[str, Any]]]
    tasks: NotRequired[dict[str, dict[str, float]]]


def evaluate(run: Path, config: Config | None = None) -> Evaluated:
    """Print and return the accuracy of a run's best weights (model.safetensors) on every split of its images.

    RUN/config.yaml says which data, splits, model and methods are meant. `config` may differ from it in where the
    images are and how they are loaded (or name another data set with the same classes), and in `trainer.precision`,
    `trainer.accelerator` and `trainer.limit_eval_batches`; it may not change model, methods or splits. Settings that
    evaluation does not use (`optim`, `cost`, …) are ignored.

    Args:
        run: the folder of a finished or interrupted run.
        config: RUN/config.yaml with changes; None: as stored.

    Raises:
        OtherVersionError: another version of this package wrote the run folder.
        UserError: `run` is not a run folder, `config` changes what it may not, or the images are missing or have other
            classes.
    """
    stored = read_config(run, PASS_A_RUN, USE_ITS_VERSION)
    if config is None:
        config = stored
    _refuse_changes(run, stored, config)
    trained = export.load(run)
    missing = missing_images(config)
    if missing:
        raise UserError("\n".join(missing))
    images = open_images(config, trained.input)
    if images.class_names != (trained.tasks or trained.class_names):
        roots = ", ".join(data.root for data in data_configs(config))
        raise UserError(
            f"evaluate={run}: the classes in {roots} must be those of the run, but they differ. Set data.root to images"
            " of the same classes."
        )
    say(summary_text(summaries(images)))
    trainer = L.Trainer(accelerator=config.trainer.accelerator, devices=1, logger=False, enable_checkpointing=False)
    device = trainer.strategy.root_device
    metric = run_task(config).metric
    rows = [[spelled(metric), "", f"{TASKS[config.task].sample}s"]]
    result: Evaluated
    if not isinstance(images, RoundRobinData):
        each = split_scores(config, trained.model, images, device)
        rows += [[split, format_percent(of[metric]), str(images.splits[split])] for split, of in each.items()]
        result = {"accuracy": {split: of[metric] for split, of in each.items()}}
        if config.task == "segmentation":
            result["scores"] = {split: named(of, images.class_names) for split, of in each.items()}
    else:
        found = accuracies(config, trained.model, images, device)
        for task, part in images.parts.items():
            rows += [[f"{task} {s}", format_percent(value), str(part.splits[s])] for s, value in found[task].items()]
        result = {"accuracy": mean_accuracies(found), "tasks": found}
        rows += [[f"mean {split}", format_percent(value), ""] for split, value in result["accuracy"].items()]
    say(f"{shown_path(run / export.NAME)} (epoch {trained.notes.get('epoch')}):\n{table(rows)}")
    return result


def _refuse_changes(run: Path, stored: Config, config: Config) -> None:
    """Refuse another model, methods or tasks, and splits that could evaluate on training images."""
    had, got = ("+".join(one.method) for one in (stored, config))
    if had != got:
        raise UserError(
            f"evaluate={run}: method={got} (the run has {had}): evaluation uses the methods of the run. Leave out"
            " method."
        )
    old, new = _fixed(stored, config), _fixed(config, stored)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        values = ", ".join(f"{key}={new.get(key)} (the run has {old.get(key)})" for key in changed[:3])
        raise UserError(
            f"evaluate={run}: {values}: evaluation uses the model, methods and splits of the run. Leave out"
            f" {', '.join(changed[:3])}."
        )


def _fixed(config: Config, other: Config) -> dict[str, Any]:
    """The settings of `config` that evaluation may not change."""
    plain = config.model_dump(mode="json", include={"model", "method", "seed"})

    def splits(data: DataConfig, other: DataConfig | None) -> dict[str, Any]:
        same = other is not None and data.name == other.name
        return {"val_fraction": data.val_fraction, "select_best_on": data.select_best_on} if same else {}

    if config.tasks:
        plain["tasks"] = {
            task: {"task": task, **splits(data, other.tasks.get(task))} for task, data in config.tasks.items()
        }
    elif not other.tasks:
        plain["data"] = splits(config.data, other.data)
    return flatten(plain)


@torch.inference_mode()
def scores(
    task: Task,
    model: nn.Module,
    loader: DataLoader,
    classes: int,
    device: torch.device,
    precision: str,
    limit: int | None = None,
) -> dict[str, float]:
    """The measures of a task, fractions.

    Args:
        task: of the run.
        model: moved to `device` and set to evaluation mode.
        loader: batches of (inputs, targets).
        classes: the number of classes.
        device: evaluates.
        precision: ``fp32``, or the type of autocast: ``bf16``, ``fp16``.
        limit: the number of batches; None: all.

    Raises:
        UserError: an output is not finite.
    """
    model.eval().to(device)
    found = task.scores(classes, local=True).to(device)  # other processes of the run may have ended
    dtype = AUTOCAST[precision]
    finite = torch.ones((), dtype=torch.bool, device=device)
    for number, (inputs, targets) in enumerate(loader):
        if number == limit:
            break
        with torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext():
            logits = task.evaluation_logits(model, moved(inputs, device))
        finite &= logits.isfinite().all()
        found.update(logits.float(), targets.to(device, non_blocking=True))
    if not finite:
        half = f" It was evaluated with trainer.precision={precision}: try fp32." if dtype is not None else ""
        raise UserError(f"The network's outputs are not finite: its weights are of no use.{half}")
    return found.compute()


def split_scores(
    config: Config, model: nn.Module, images: ImageData | SegmentationData | TextData, device: torch.device
) -> dict[str, dict[str, float]]:
    """The measures of one data set, by split.

    Args:
        config: its precision and number of batches count.
        model: the network.
        images: the data set.
        device: evaluates.
    """
    options = config.trainer
    if use_channels_last(config, device):  # as in the training
        model.to(memory_format=torch.channels_last)
    return {
        split: scores(
            run_task(config),
            model,
            images.eval_loader(split),
            images.num_classes,
            device,
            options.precision,
            options.limit_eval_batches,
        )
        for split in ("val", "test")
        if split in images.splits
    }


def accuracies(config: Config, model: nn.Module, images: RunData, device: torch.device) -> dict[str, Any]:
    """The task's metric by split, or by data set and split.

    Args:
        config, device: as for `split_scores`.
        model: the network; with several data sets it is switched to each.
        images: the data.
    """
    if not isinstance(images, RoundRobinData):
        metric = run_task(config).metric
        return {split: of[metric] for split, of in split_scores(config, model, images, device).items()}
    switch, found = tasks_of(model), {}
    assert switch is not None
    for task, part in images.parts.items():
        switch.active = task
        found[task] = accuracies(config, model, part, device)
    return found


def mean_accuracies(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The mean over the tasks, for the splits that all of them have."""
    splits = [s for s in ("val", "test") if all(s in of for of in found.values())]
    return {split: sum(of[split] for of in found.values()) / len(found) for split in splits}


def named(scores: dict[str, float], class_names: Sequence[str]) -> dict[str, Any]:
    """Measures of a segmentation, with the IoU of each class by its name."""
    each = {name: scores.get(f"iou_{k}") for k, name in enumerate(class_names)}
    return {**{k: v for k, v in scores.items() if not k.startswith("iou_")}, "iou": each}


def data_report(config: Config, folder: Path, images: RunData, device: torch.device) -> DataReport:
    """Sizes of the splits, corrupt images left out, and the accuracy of model.safetensors as written on every split."""
    trained = export.load(folder)
    report = images.report()
    if not isinstance(images, RoundRobinData):
        of_splits, metric = split_scores(config, trained.model, images, device), run_task(config).metric
        one: DataReport = {
            "splits": report["splits"],
            "skipped": report["skipped_count"],
            "digest": report["digest"],
            "accuracy": {split: of[metric] for split, of in of_splits.items()},
        }
        if config.task == "segmentation":
            one["scores"] = {split: named(of, images.class_names) for split, of in of_splits.items()}
        return one
    found = accuracies(config, trained.model, images, device)
    each: Any = {
        task: {
            "splits": of["splits"],
            "skipped": of["skipped_count"],
            "digest": of["digest"],
            "accuracy": found[task],
        }
        for task, of in report["tasks"].items()
    }
    return {"skipped": sum(of["skipped"] for of in each.values()), "accuracy": mean_accuracies(found), "tasks": each}
