"""Execute one run with a checked configuration: train, evaluate, or count the cost.

The run folder contains `config.yaml`, `metrics.jsonl` (the primary record), `metrics.csv`, `step_stats.jsonl`,
`checkpoint.ckpt`, the previous checkpoint, and `model.safetensors`. With ``trainer.precision=auto``, `precision.json`
contains the selected precision. The folder of a finished run also contains `results.json`.

`model.safetensors` contains the weights of the epoch with the highest accuracy on the split `data.select_best_on`,
because LBP-WHT and BSR are reported to select that epoch. With several tasks, epochs are compared by their mean
accuracy. The checkpoint contains the most recent weights.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from efficient_ft.config import Config, data_configs, image_folders, refuse_automatic
from efficient_ft.config.class_weights import missing_weights_file
from efficient_ft.core.errors import MemoryLimitError, single_values
from efficient_ft.cost import Prediction
from efficient_ft.data import read_data
from efficient_ft.models import factory
from efficient_ft.record import config_file
from efficient_ft.record import results as results_file
from efficient_ft.record.results import read_results
from efficient_ft.training.costs import cost_only
from efficient_ft.training.datamodule import refuse_missing_files, run_contents
from efficient_ft.training.evaluate import evaluate
from efficient_ft.training.finish import finish, paused
from efficient_ft.training.kinds.base import RunData
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.batch_size import (
    provisional,
    with_effective_batch_size,
    with_selected_batch_size,
)
from efficient_ft.training.memory.budget import Predictor, measured_predictor, require_within_budget
from efficient_ft.training.memory.out_of_memory import out_of_memory
from efficient_ft.training.memory.watch import budget_of, stop_from_now_on, within_budget
from efficient_ft.training.output.console import quiet_lightning, rank, results_text, say
from efficient_ft.training.output.faults import faults_of_the_system
from efficient_ft.training.output.folder import (
    CONTENTS,
    IMAGES,
    RunFolder,
    locked,
    refuse_another_run,
    refuse_changed_contents,
    refuse_other_images,
    refuse_split_run,
)
from efficient_ft.training.precision import in_bf16, resolve_precision
from efficient_ft.training.processes import connect
from efficient_ft.training.train import fit, prepare
from efficient_ft.training.trainer import on_device


def run(
    config: Config, folder: Path, arguments: Sequence[str] = (), begun: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Execute the run that `config` describes, and print its results.

    Args:
        config: the checked configuration. With `evaluate`, the configuration is RUN/config.yaml with the changes that
            `training.evaluate.evaluate` allows.
        folder: the run folder. The folder is not used with `evaluate` or `cost_only`.
        arguments: settings given on the command line, which are stored with the run.
        begun: function that writes further files into the run folder. The first process calls this function as soon as
            the folder belongs to this run.

    Returns:
        The contents of results.json (`record.results.Results`). If the run was paused, its state (`finish.paused`).
        With `evaluate`, the metrics of each split. With `cost_only`, the costs (`record.results.CostReport`).

    Raises:
        UserError: If the user must fix a problem, e.g. if weights or data are missing, if the folder contains another
            run or a run of another version, or if the loss is not finite.
    """
    quiet_lightning()
    connect(config)
    trains = not config.cost_only and config.evaluate is None
    with within_budget(config, on_device(config), armed=not trains):
        return _run(config, folder, arguments, begun)


def _run(config: Config, folder: Path, arguments: Sequence[str], begun: Callable[[], None]) -> dict[str, Any]:
    if config.cost_only:
        refuse_automatic(config, "efficient-ft cost")
        with single_values():
            return cost_only(resolve_precision(config, on_device(config)))
    if config.evaluate is not None:
        return dict(evaluate(Path(config.evaluate), config))

    refuse_split_run(folder)
    refuse_another_run(config, folder)
    if (folder / results_file.NAME).is_file() and config.resume == "auto":
        results = dict(read_results(folder))
        noted = [(folder / name).is_file() for name in (IMAGES, CONTENTS)]
        if any(noted) and not kind_of(config).missing(config) and factory.missing_weights(config.model) is None:
            refuse_changed_contents(folder, run_contents(config))
            if image_folders(config_file.read_config(folder)) != image_folders(config):
                digests = (read_data(data).digest() for data in data_configs(config))
                refuse_other_images(config, folder, "+".join(digests))
        say("This run has already finished. To train again, set resume=never. The results of the run:")
        say(results_text(results, folder))
        return results
    refuse_missing_files(config, missing_weights_file(config.optim.class_weights))
    # With resume=never, the first process moves an earlier run out of the folder before other processes start.
    kept = folder if config.resume == "auto" or rank() > 0 else None
    config = resolve_precision(provisional(config, kept), on_device(config), kept)
    config = with_effective_batch_size(config)
    with faults_of_the_system(folder, lambda: False), single_values():
        data, predicted = None, None
        if config.memory is not None or config.data.automatic:
            with out_of_memory(config):
                data = kind_of(config).open(config, factory.input_of(config.model))
                config, predicted, predictor = with_selected_batch_size(config, data, kept)
                if config.memory is not None:
                    config, predicted = _within_budget(config, data, folder, predictor, kept)
                del predictor
                stop_from_now_on(config)
        with locked(folder) as held, faults_of_the_system(folder, lambda: held.begun), out_of_memory(config):
            return _train(config, held, arguments, begun, data, predicted)


def _within_budget(
    config: Config, data: RunData, folder: Path, predictor: Predictor | None, kept: Path | None
) -> tuple[Config, Prediction]:
    """Return the configuration with which a run fits into its memory budget, and the predicted memory.

    The configuration is `config` or, if only bf16 fits, its copy in bf16 (`in_bf16`).

    Raises:
        UserError: If the run does not fit into its budget.
    """
    predictor = predictor or measured_predictor(config, data, folder)
    try:
        return config, require_within_budget(config, predictor)
    except MemoryLimitError:
        other = in_bf16(config, on_device(config), kept)
        if other is None or predictor(other).peak_bytes > (budget_of(config) or 0):
            raise
    say("Precision: bf16, because the run does not fit into its memory budget in fp32.")
    return other, require_within_budget(other, predictor)


def _train(
    config: Config,
    held: RunFolder,
    arguments: Sequence[str],
    begun: Callable[[], None],
    data: RunData | None,
    predicted: Prediction | None,
) -> dict[str, Any]:
    """Train and finish a run.

    The `Training` object is a local variable, so that `out_of_memory` can free this object after an error.
    """
    training = prepare(config, held, begun, data)
    fitted = fit(training, arguments)
    if fitted.paused:
        return {"paused": paused(training, fitted)}
    return finish(training, fitted, arguments, predicted)
