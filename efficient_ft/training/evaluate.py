"""Evaluate the weights of a run at the end of training, or later with ``evaluate=RUN``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.utilities.exceptions import MisconfigurationException

from efficient_ft.config import Config, DataConfig, data_configs
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.format import format_metric
from efficient_ft.core.terminal import shown_path
from efficient_ft.core.text import spelled, table
from efficient_ft.record.config_file import read_config
from efficient_ft.record.formats import PASS_A_RUN, USE_ITS_VERSION
from efficient_ft.record.predictions import write_predictions
from efficient_ft.record.results import DataReport, flatten
from efficient_ft.training.datamodule import summaries, summary_text
from efficient_ft.training.kinds.base import Evaluated, RunData
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.output import export
from efficient_ft.training.output.class_table import class_lines
from efficient_ft.training.output.console import say
from efficient_ft.training.precision import resolve_precision
from efficient_ft.training.trainer import on_device


def evaluate(run: Path, config: Config | None = None) -> Evaluated:
    """Evaluate the best weights of a run on all splits except the training split, and print and return the metrics.

    RUN/config.yaml determines the data, splits, model and methods. With ``trainer.precision=auto``, the evaluation uses
    the precision of the run. `config` may change the image folder, the settings for loading images,
    `trainer.precision`, `trainer.accelerator` and `trainer.limit_eval_batches`. `config` may also name a different data
    set with the same classes. Settings that evaluation does not use (e.g. `optim`) are ignored.

    Args:
        run: the folder of a finished or interrupted run.
        config: a changed copy of the stored configuration, or None to use the stored configuration.

    Raises:
        OtherVersionError: If another version of this package wrote the run folder.
        UserError: If `run` is not a run folder, if `config` changes other settings, or if the images are missing or
            have classes that differ from those of the run.
    """
    stored = read_config(run, PASS_A_RUN, USE_ITS_VERSION)
    if config is None:
        config = stored
    _refuse_changes(run, stored, config)
    trained = export.load(run)
    kind = kind_of(config)
    if missing := kind.missing(config):
        raise UserError("\n".join(missing))
    images = kind.open(config, trained.input)
    if images.class_names != (trained.tasks or trained.class_names):
        roots = ", ".join(data.root for data in data_configs(config))
        raise UserError(
            f"evaluate={run}: the classes in {roots} differ from the classes of the run. Set data.root to a folder"
            " with images of the same classes."
        )
    say(summary_text(summaries(images)))
    config = resolve_precision(config, on_device(config), run)
    try:
        trainer = L.Trainer(accelerator=config.trainer.accelerator, devices=1, logger=False, enable_checkpointing=False)
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        do = f"{first_line(error)} To use the best device of this machine, set trainer.accelerator=auto."
        raise SettingError(
            "trainer.accelerator", config.trainer.accelerator, "available on this machine", do
        ) from error
    result = kind.evaluate(config, trained.model, images, trainer.strategy.root_device, trained.notes)
    metric = kind.task.metric
    rows = [[spelled(metric), "", f"{kind.task.sample}s"]]
    for task, one in _parts(result).items():
        of_task, sizes = f"{task} " if task else "", images.parts[task].splits
        for split, value in one["accuracy"].items():
            rows.append([of_task + split, format_metric(value, metric), str(sizes[split])])
    if "tasks" in result:
        rows += [[f"mean {split}", format_metric(value, metric), ""] for split, value in result["accuracy"].items()]
    say(f"{shown_path(run / export.NAME)} (epoch {trained.notes.get('epoch')}):\n{table(rows)}")
    if lines := class_lines(result, trained.class_names, kind.task.sample):
        say("\n" + "\n".join(lines))
    return result


def _parts(found: Evaluated) -> dict[str, Evaluated]:
    """Return the result of each task. A single data set has the task name ""."""
    return found.get("each", {"": found})


def _refuse_changes(run: Path, stored: Config, config: Config) -> None:
    """Raise UserError if the model, a method, a task or a split was changed.

    A changed split could contain images on which the run was trained.
    """
    had, got = ("+".join(one.method) for one in (stored, config))
    if had != got:
        raise UserError(
            f"evaluate={run}: method={got} (the run has {had}) cannot be used. An evaluation uses the methods of the"
            " run. Remove the method setting."
        )
    old, new = _fixed(stored, config), _fixed(config, stored)
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    if changed:
        values = ", ".join(f"{key}={new.get(key)} (the run has {old.get(key)})" for key in changed[:3])
        raise UserError(
            f"evaluate={run}: {values} cannot be used. An evaluation uses the model, methods and splits of the run."
            f" Remove the settings {', '.join(changed[:3])}."
        )


def _fixed(config: Config, other: Config) -> dict[str, Any]:
    """Return the settings of `config` that must be the same in an evaluation as in the run."""
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


def data_report(config: Config, folder: Path, data: RunData, device: torch.device) -> DataReport:
    """Return the split sizes, the number of skipped samples, and the metrics of the weights in model.safetensors.

    The predictions for individual samples are written to predictions.npz in `folder`.
    """
    trained = export.load(folder)
    found = kind_of(config).evaluate(config, trained.model, data, device, trained.notes)
    each: dict[str, Any] = {}
    parts: Any = _parts(found)
    write_predictions(folder, {task: one["samples"] for task, one in parts.items() if "samples" in one})
    for task, one in parts.items():
        report = data.parts[task].report()
        each[task] = {
            "splits": report["splits"],
            "skipped": report["skipped_count"],
            "digest": report["digest"],
            **{key: one[key] for key in ("accuracy", "scores", "classes", "labels") if key in one},
        }
    if "tasks" in found:
        skipped = sum(of["skipped"] for of in each.values())
        return {"skipped": skipped, "accuracy": found["accuracy"], "tasks": each}
    single: DataReport = each[""]
    if "correct" in found:
        single["correct"] = found["correct"]
    return single
