"""Loggers (wandb and TensorBoard), in addition to the CSV and JSONL files that every run writes."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from lightning.pytorch.loggers import Logger

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.terminal import shown_path, unbroken
from efficient_ft.record.results import final_accuracy, flatten
from efficient_ft.training.kinds.base import Sample
from efficient_ft.training.output.class_table import class_names, final_split, matrix_picture, matrix_rows
from efficient_ft.training.output.console import say

#: Caption of the picture of a confusion matrix.
_MATRIX = "{}: rows are true classes, columns are predicted classes"


def start_loggers(config: Config, folder: Path, run_id: str, arguments: Sequence[str] = ()) -> list[Logger]:
    """Start the configured logger before training, so that mistakes in its settings are reported immediately.

    A resumed run keeps its `run_id`. By default, the wandb name of the run contains the command-line `arguments`.

    Raises:
        UserError: If the logger's package is not installed, or if the logger cannot start.
    """
    options = config.logger
    if options.name == "none":
        return []
    folder = folder.resolve()
    plain = config.model_dump(mode="json")
    try:
        if options.name == "tensorboard":
            from lightning.pytorch.loggers import TensorBoardLogger

            # Settings are written with the results at the end. By default, Lightning would log a constant hp_metric.
            return [TensorBoardLogger(save_dir=folder, name="", version="tensorboard", default_hp_metric=False)]
        import wandb
        from lightning.pytorch.loggers import WandbLogger

        _require_key(options.mode)
        logger = WandbLogger(
            project=options.project,
            entity=options.entity,
            group=options.group or folder.parent.name,
            name=options.run_name or run_name(folder.parent.name, arguments),
            tags=options.tags or None,
            job_type=options.job_type,
            id=run_id,
            resume="allow",
            save_dir=folder,
            # offline=True would set WANDB_MODE, which also affects later jobs of a sweep in this process.
            mode="offline" if options.mode == "offline" else None,
            log_model=False,
            config=plain,
            settings=wandb.Settings(silent=True),  # warnings are still shown
        )
        logger._wandb_init.pop("anonymous", None)  # Lightning passes this argument, which causes a warning
        define_metrics(logger.experiment)
        if not logger.experiment.offline:
            say(f"wandb: This run is shown at {logger.experiment.url}")
    except ModuleNotFoundError as error:
        raise UserError(
            f"logger={options.name} requires a package that is not installed. Run pip install {options.name}."
        ) from error
    except UserError:
        raise
    except Exception as error:  # the errors of wandb have no common base class
        raise UserError(
            f"logger={options.name}: the logger cannot start ({(str(error).splitlines() or [''])[0]}). Log in with"
            " wandb login, or set logger.mode=offline."
        ) from error
    return [logger]


def _require_key(mode: str) -> None:
    """Raise UserError if an online run has no API key. Without this check, wandb would wait 90 seconds for a key."""
    if mode != "online" or os.environ.get("WANDB_MODE", "online") not in ("online", "shared"):
        return
    import wandb

    try:
        found = wandb.login(prompt=False, verify=False)  # type: ignore[call-arg,unused-ignore]
    except TypeError:  # before wandb 0.31
        found = wandb.api.api_key is not None
    if not found:
        raise UserError(
            "logger=wandb requires an API key, but no key is configured. Log in with wandb login, set WANDB_API_KEY, or"
            " set logger.mode=offline."
        )


def run_name(methods: str, arguments: Sequence[str]) -> str:
    """Return a readable name that consists of the method names and the given settings.

    The prefixes of the settings are omitted. With the method ``lbp_wht``, ``method.lbp_wht.order=4 optim.lr=1e-3
    seed=1`` becomes ``lbp_wht order=4 lr=1e-3 seed=1``. Option groups and paths (``data=``, ``data.root=``) are
    omitted.
    """
    settings = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        group, _, below = key.lstrip("+~").partition(".")
        if key == "seed" or (below and group in ("method", "optim", "trainer", "model") and "/" not in value):
            settings.append(f"{key.rpartition('.')[2]}={value}")
    return " ".join([methods, *settings])[:120]


def define_metrics(experiment: Any) -> None:
    """Define the wandb summary of each metric: the highest accuracy, the lowest loss, or otherwise the last value."""
    for split in ("val", "test"):
        experiment.define_metric(f"{split}_accuracy*", summary="max")
        for name in ("mean_iou", "balanced_accuracy", "macro_f1", "mean_average_precision", "r2"):
            experiment.define_metric(f"{split}_{name}", summary="max")
        experiment.define_metric(f"{split}_loss*", summary="min")
    for name in ("train_loss", "flops", "seconds", "images", "joules"):
        experiment.define_metric(name, summary="last")


def summary_of(results: Mapping[str, Any]) -> dict[str, Any]:
    """Return the values by which runs are compared: accuracies (including the published accuracy), costs and totals."""
    keys = ("accuracy", "cost", "memory", "totals", "trainable_parameters", "total_parameters")
    summary = flatten({key: results[key] for key in keys if key in results})
    for split, scores in results["data"].get("scores", {}).items():
        summary |= {f"{split}.{name}": value for name, value in scores.items() if isinstance(value, int | float)}
    summary["accuracy.final"] = final_accuracy(results["accuracy"])
    published = results["config"].get("published")
    if published is not None:
        summary["accuracy.published"] = published
        summary["accuracy.minus_published"] = final_accuracy(results["accuracy"]) - published
    return summary


def write_summary(
    loggers: Sequence[Logger],
    results: Mapping[str, Any],
    text: str,
    step: int,
    samples: Mapping[str, Sequence[Sample]] = {},
) -> None:
    """Write the results of a run and the final summary `text` to the loggers, and close the loggers.

    The accuracy, the costs and the totals are written to the summary of wandb and to TensorBoard's table of
    hyperparameters. Both loggers receive the `samples` of each selection with their predictions, and a picture of the
    confusion matrix. wandb also receives the confusion matrix as a table, and TensorBoard also receives the text.
    """
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "summary"):
            import wandb

            media: dict[str, Any] = {}
            for selection, chosen in samples.items():
                texts = [[*one] for one in chosen if isinstance(one.content, str)]
                if texts:
                    media[selection] = wandb.Table(columns=["text", "classes"], data=texts)
                elif chosen:
                    media[selection] = [wandb.Image(one.content, caption=one.caption) for one in chosen]
            if (split := final_split(results["data"].get("classes", ()))) is not None:
                of_split, names = results["data"]["classes"][split], class_names(results["data"])
                columns: list[str | int] = ["true class", "predicted class", f"{split} samples"]
                media["confusion_matrix"] = wandb.Image(matrix_picture(of_split), caption=_MATRIX.format(split))
                media["confusions"] = wandb.Table(columns=columns, data=matrix_rows(of_split, names))
            if media:
                experiment.log(media)
            experiment.summary.update(summary_of(results))
            if experiment.offline:
                command = f"wandb sync {shown_path(experiment.settings.sync_dir)}"
                say(f"wandb: The command `{unbroken(command)}` uploads this run.")
        else:
            _write_board(logger, results, text, step, samples)
    close_loggers(loggers, failed=False)


def _write_board(
    board: Any, results: Mapping[str, Any], text: str, step: int, samples: Mapping[str, Sequence[Sample]]
) -> None:
    writer = board.experiment
    for selection, chosen in samples.items():
        for number, one in enumerate(chosen):
            if not isinstance(one.content, str):
                tag = f"{selection}/{number}: {one.caption}"
                writer.add_image(tag, np.asarray(one.content), step, dataformats="HWC")
        if texts := [f"- {one.content}: **{one.caption}**" for one in chosen if isinstance(one.content, str)]:
            writer.add_text(selection, "\n".join(texts), step)
    if (split := final_split(results["data"].get("classes", ()))) is not None:
        picture = np.asarray(matrix_picture(results["data"]["classes"][split]))
        writer.add_image(f"confusion_matrix/{_MATRIX.format(split)}", picture, step, dataformats="HWC")
    writer.add_text("results", "\n".join(f"    {line}" for line in text.splitlines()), step)
    numbers = {name: value for name, value in summary_of(results).items() if isinstance(value, int | float)}
    board.log_hyperparams(flatten(results["config"]), numbers)
    board.finalize("success")


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """Finish wandb runs with the exit code 1 if `failed` is True, and 0 otherwise."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "finish"):
            experiment.finish(exit_code=int(failed))
