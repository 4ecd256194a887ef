"""wandb and TensorBoard, next to the CSV and JSONL files that every run writes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lightning.pytorch.loggers import Logger

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.record.results import flatten


def start_loggers(config: Config, folder: Path, run_id: str) -> list[Logger]:
    """The chosen logger, started before training, so that a mistake in its settings shows at once.

    Args:
        config: the run's configuration; `config.logger` chooses.
        folder: the run folder.
        run_id: the same for a resumed run.

    Raises:
        UserError: the logger's package is not installed, or it cannot start.
    """
    options = config.logger
    if options.name == "none":
        return []
    folder = folder.resolve()
    plain = config.model_dump(mode="json")
    try:
        if options.name == "tensorboard":
            from lightning.pytorch.loggers import TensorBoardLogger

            board = TensorBoardLogger(save_dir=folder, name="", version="tensorboard")
            board.log_hyperparams(flatten(plain))
            return [board]
        from lightning.pytorch.loggers import WandbLogger

        logger = WandbLogger(
            project=options.project,
            group=options.group or folder.parent.name,
            name=folder.name,
            id=run_id,
            resume="allow",
            save_dir=folder,
            offline=options.mode == "offline",
            log_model=False,
            config=plain,
        )
        _ = logger.experiment
    except ModuleNotFoundError as error:
        raise UserError(
            f"logger={options.name} needs a package that is not installed. Install it: pip install {options.name}"
        ) from error
    except Exception as error:  # wandb's own errors derive from several bases
        raise UserError(
            f"logger={options.name} cannot start: {(str(error).splitlines() or [''])[0]}"
            " Use logger.mode=offline, or log in first (wandb login)."
        ) from error
    return [logger]


def write_summary(loggers: Sequence[Logger], results: Mapping[str, Any]) -> None:
    """Write accuracy and cost to wandb's summary, where runs are compared, and close the loggers."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "summary"):
            shown = {k: results[k] for k in ("accuracy", "cost", "trainable_parameters", "total_parameters")}
            experiment.summary.update(flatten(shown))
    close_loggers(loggers, failed=False)


def close_loggers(loggers: Sequence[Logger], failed: bool) -> None:
    """Finish wandb runs, with exit code 1 if `failed`."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "finish"):
            experiment.finish(exit_code=int(failed))
