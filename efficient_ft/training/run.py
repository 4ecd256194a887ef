"""One run, from a checked configuration to its results: train, evaluate, or count the cost.

The run folder holds `config.yaml`, `metrics.jsonl` (the source of truth) and `metrics.csv`, `step_stats.jsonl` (with
`step_stats.interval`), `checkpoint.ckpt` (to continue an interrupted run) and the previous one, `model.safetensors`
(the best epoch, under timm's own names) and, once the run has finished, `results.json`.

`model.safetensors` holds the weights of the epoch with the best accuracy on the split that `data.select_best_on` names,
because the papers report that epoch; results.json has the accuracy of the best and of the last epoch, and the
checkpoint holds the last weights. With several tasks the best epoch has the highest mean of the tasks' accuracies.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import torch

from efficient_ft import __version__
from efficient_ft.config import Config, data_configs, image_folders
from efficient_ft.core import stopping
from efficient_ft.core.allocator import allocator_in_use
from efficient_ft.core.errors import UserError, single_values
from efficient_ft.core.process_memory import lifetime_peak_bytes, release_freed_memory, resident_bytes
from efficient_ft.core.terminal import shown_path
from efficient_ft.cost import Prediction
from efficient_ft.data import ImageData, RoundRobinData, SegmentationData, TextData, read_data
from efficient_ft.data.loader import refuse_killed_worker
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods.base import Applied, plain_state_dict
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.text import portable, require_fitting
from efficient_ft.optim import SteppedInBackward
from efficient_ft.record import config_file
from efficient_ft.record import results as results_file
from efficient_ft.record.environment import environment
from efficient_ft.record.files import json_text
from efficient_ft.record.formats import FORMAT
from efficient_ft.record.results import (
    Accuracy,
    AppliedReport,
    Results,
    images_digest,
    read_results,
    write_results,
)
from efficient_ft.training.callbacks.progress import ProgressBar
from efficient_ft.training.callbacks.recorder import Recorder, rows_every, stop_on_interrupt
from efficient_ft.training.callbacks.step_stats import StepStats
from efficient_ft.training.callbacks.totals import Totals
from efficient_ft.training.costs import cost_only, cost_report
from efficient_ft.training.datamodule import (
    RunData,
    RunDataModule,
    decodings,
    keep_decoded,
    missing_images,
    open_images,
    refuse_unusable,
    run_contents,
    run_length,
    summaries,
    summary_text,
)
from efficient_ft.training.evaluate import data_report, evaluate
from efficient_ft.training.features.prefix import FeatureCallback
from efficient_ft.training.memory.budget import require_within_budget
from efficient_ft.training.memory.measured import MemoryMeter, accumulated_gradients
from efficient_ft.training.memory.out_of_memory import out_of_memory
from efficient_ft.training.memory.watch import budget_of, stop_from_now_on, within_budget
from efficient_ft.training.module import FineTuner
from efficient_ft.training.optimizer import warmup_steps
from efficient_ft.training.output import checkpoint, export
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
    run_id,
)
from efficient_ft.training.output.loggers import close_loggers, start_loggers, write_summary
from efficient_ft.training.output.predict_masks import write_examples
from efficient_ft.training.output.samples import samples_of
from efficient_ft.training.processes import SameStart, connect, from_first, world_size
from efficient_ft.training.run_task import run_task
from efficient_ft.training.trainer import build_trainer, on_device, use_channels_last

#: The signal that Lightning has answered, by whether it is SIGTERM.
_LIGHTNINGS = {True: signal.SIGTERM, False: signal.SIGINT}
#: Steps of the cost report are timed for at most this share of the training time, or for these seconds.
COST_SHARE, COST_SECONDS = 0.1, 2.0


def run(
    config: Config, folder: Path, arguments: Sequence[str] = (), begun: Callable[[], None] = lambda: None
) -> dict[str, Any]:
    """Do what `config` asks, and print the outcome.

    Args:
        config: the checked configuration. With `evaluate` it is RUN/config.yaml and what evaluation may change: see
            `training.evaluate.evaluate`.
        folder: the run folder; not used with `evaluate` and `cost_only`.
        arguments: the settings given on the command line, for the record.
        begun: called in the first process when the folder belongs to this run: to write more into it.

    Returns:
        The contents of results.json (`record.results.Results`); with `evaluate`, accuracies by split; with `cost_only`,
        the costs (`record.results.CostReport`).

    Raises:
        UserError: a mistake or circumstance that the user can mend: weights or data are missing (both in one message),
            the folder holds another run or one of an earlier version, the loss is not finite, …
    """
    quiet_lightning()
    connect(config)
    trains = not config.cost_only and config.evaluate is None
    with within_budget(config, on_device(config), armed=not trains):
        return _run(config, folder, arguments, begun)


def _run(config: Config, folder: Path, arguments: Sequence[str], begun: Callable[[], None]) -> dict[str, Any]:
    if config.cost_only:
        with single_values():
            return cost_only(config)
    if config.evaluate is not None:
        return dict(evaluate(Path(config.evaluate), config))

    refuse_split_run(folder)
    refuse_another_run(config, folder)
    if (folder / results_file.NAME).is_file() and config.resume == "auto":
        results = dict(read_results(folder))
        noted = [(folder / name).is_file() for name in (IMAGES, CONTENTS)]
        if any(noted) and not missing_images(config) and factory.missing_weights(config.model) is None:
            refuse_changed_contents(folder, run_contents(config))
            if image_folders(config_file.read_config(folder)) != image_folders(config):
                digests = (read_data(data).digest() for data in data_configs(config))
                refuse_other_images(config, folder, "+".join(digests))
        say("This run has already finished; its results (to train again: resume=never):")
        say(results_text(results, folder))
        return results
    missing = [factory.missing_weights(config.model), *missing_images(config)]
    if any(missing):
        raise UserError("\n".join(message for message in missing if message is not None))
    with faults_of_the_system(folder, lambda: False), single_values():
        opened = _opened_within_budget(config, folder)
        with locked(folder) as held, faults_of_the_system(folder, lambda: held.begun), out_of_memory(config):
            return _train(config, held, arguments, begun, *opened)


def _opened_within_budget(config: Config, folder: Path) -> tuple[RunData | None, Prediction | None]:
    """The data of a run with a budget and the prediction of its memory, before anything is written; else None."""
    if config.memory is None:
        return None, None
    with out_of_memory(config):
        images = open_images(config, factory.input_of(config.model))
        predicted = require_within_budget(config, images, folder)
        stop_from_now_on(config)
        return images, predicted


def _train(
    config: Config,
    held: RunFolder,
    arguments: Sequence[str],
    begun: Callable[[], None],
    opened: RunData | None = None,
    predicted: Prediction | None = None,
) -> dict[str, Any]:
    folder = held.path
    L.seed_everything(config.seed, verbose=False)
    spec = factory.input_of(config.model)
    images = open_images(config, spec) if opened is None else opened
    keep_decoded(images, config.trainer.epochs)
    digest, contents = images_digest(images.report()), run_contents(config, images)
    if config.resume != "never":
        refuse_changed_contents(folder, contents)
        refuse_other_images(config, folder, digest)
    understood = summaries(images) if rank() == 0 else {}
    refuse_unusable(config, understood)
    say(summary_text(understood))
    release_freed_memory()  # of making the lists, which allocators keep: 75 MiB of a million images
    before_model = resident_bytes()
    network = factory.create_model(config.model, images.num_classes)
    if isinstance(images, TextData):
        require_fitting(images.tokenizer, network)
    methods = build_methods(config)
    names = images.class_names
    if isinstance(images, TextData):
        spec = replace(spec, tokenizer=images.tokenizer)

    def keep_best(module: L.LightningModule, epoch: int, accuracy: float) -> None:
        if module.global_rank == 0:
            notes: dict[str, Any] = {"epoch": epoch, "accuracy": accuracy, "split": images.best_split}
            if recorder.best_tasks:
                notes["task_accuracy"] = recorder.best_tasks
            if isinstance(images, SegmentationData):
                notes |= {"task": config.task, "metric": run_task(config).metric, "class_ids": list(images.classes.ids)}
                notes |= {"class_colors": images.classes.colors} if images.classes.colors else {}
            if isinstance(images, TextData):
                notes |= {"task": config.task, "columns": images.columns}
            notes |= decodings(images)
            weights = plain_state_dict(network, methods, copy_weights=False)
            model = portable(config.model, network)
            export.save(folder / export.NAME, weights, model, names, spec, notes, methods)

    held.begin(config, {IMAGES: digest, CONTENTS: json_text(contents.record())}, begun)
    from_first()  # before the others look into the folder, the first process has prepared it
    name = run_id(folder)
    epochs, total_steps = run_length(config, images, world_size(config))
    if warmup_steps(config.optim, total_steps) >= total_steps:
        say(
            f"warning: trainer.max_steps={config.trainer.max_steps} ends the run within its warm-up of"
            f" optim.warmup_steps={config.optim.warmup_steps}: the learning rate never reaches"
            f" optim.lr={config.optim.lr:g}."
        )
    totals = Totals(methods, total_steps * config.trainer.grad_accum_steps)
    extra = {"run_id": name, "version": __version__}
    every = rows_every(config.logger.every_n_steps, total_steps)
    of_classes = names if isinstance(names, list | tuple) else ()
    recorder = Recorder(folder, images.best_split, keep_best, extra, totals, every, of_classes)
    loggers = start_loggers(config, folder, name, arguments)
    memory = MemoryMeter(methods, before_model)
    callbacks: list[L.Callback] = [
        memory,
        held.started(),
        SameStart(),
        MethodCallback(methods, frozen_bn=config.model.frozen_bn),
    ]
    features = None
    uses_prefix = config.trainer.cache_features != "off" or config.trainer.prefix != "fp32"
    if uses_prefix and isinstance(images, ImageData):  # several tasks have none
        features = FeatureCallback(config, images, methods, epochs, folder)
        callbacks.append(features)
    if config.step_stats.interval:  # after the methods have decided the step, before a checkpoint is written
        callbacks.append(StepStats(folder, methods, config.step_stats.interval))
    callbacks += [totals, recorder]
    if config.trainer.progress:
        callbacks.append(ProgressBar(total_steps, epochs, recorder))
    trainer = build_trainer(config, folder, methods, callbacks, loggers, epochs)
    if use_channels_last(config, trainer.strategy.root_device):
        network.to(memory_format=torch.channels_last)
    module = FineTuner(network, config, images.num_classes, total_steps)

    state = folder / checkpoint.NAME
    resume = from_first(str(state) if checkpoint.exists(state) else None)
    if resume is not None:
        say(f"Continuing the run in {shown_path(folder)}.")
    with stop_on_interrupt(recorder):
        try:
            trainer.fit(module, datamodule=RunDataModule(images), ckpt_path=resume)
            if recorder.stop_requested is not None:  # in the last step: everything is trained and saved
                raise stopping.ending(recorder.stop_requested)
        except BaseException as error:
            close_loggers(loggers, failed=True)
            refuse_killed_worker(error)
            if isinstance(error, SystemExit) and trainer.interrupted:  # Lightning turns signals into exits of its own
                raise stopping.ending(recorder.stop_requested or _LIGHTNINGS[trainer.received_sigterm]) from None
            raise
    accuracy, taken = _accuracy(recorder), totals.values()
    if not trainer.is_global_zero:
        return {"accuracy": accuracy}

    # Optimizer state and gradients are no longer needed; free their memory for measuring the cost.
    device = trainer.strategy.root_device
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, SteppedInBackward):
            optimizer.remove()
    trainer.optimizers = []
    network.zero_grad(set_to_none=True)
    total, trainable = (
        sum(p.numel() for p in network.parameters() if p.requires_grad or everything) for everything in (True, False)
    )
    release_freed_memory()
    data = data_report(config, folder, images, device)
    data["summary"] = {task: one.record() for task, one in understood.items()}
    release_freed_memory()
    allowed = max(COST_SECONDS, COST_SHARE * taken["seconds"])
    most = images.splits["train"] if not isinstance(images, RoundRobinData) else None
    cost = cost_report(config, network, methods, spec, images.num_classes, device, config.cost.steps, allowed, most)
    gradients = accumulated_gradients(network, config.trainer.grad_accum_steps)
    felt = memory.report(cost["executed"]["step_peak_bytes"], gradients)
    if config.task == "segmentation":
        accuracy["metric"] = module.task.metric
    results: Results = {
        "format": FORMAT,
        "accuracy": {**accuracy, "test": data["accuracy"].get("test")},
        "cost": cost,
        "totals": taken,
        "trainable_parameters": trainable,
        "total_parameters": total,
        "methods": {m.name: _applied_report(m.applied) for m in methods if m.applied is not None},
        "data": data,
        "seed": config.seed,
        "arguments": list(arguments),
        "changed": config.changed(),
        "config": config.model_dump(mode="json"),
        "environment": environment(
            device,
            packages=("torch", "timm", "lightning"),
            allocator=allocator_in_use(),
        ),
    }
    if (loaded := factory.loading_report(network)) is not None:
        results["weights"] = loaded.as_dict()
    if module.warnings:
        results["warnings"] = module.warnings
    if features is not None and features.features is not None:
        results["features"] = features.features.report()
    if features is not None and features.prefix is not None:
        results["prefix"] = features.prefix
    if felt is not None:
        results["memory"] = felt
        budget = budget_of(config)
        if budget is not None and predicted is not None:
            felt["budget_bytes"], felt["predicted_peak_bytes"] = budget, predicted.peak_bytes
    if isinstance(images, SegmentationData):
        release_freed_memory()
        write_examples(folder, images, device)
    if felt is not None:
        felt["peak_bytes"] = lifetime_peak_bytes()
    text = results_text(dict(results), folder)
    write_results(folder, results)
    write_summary(loggers, results, text, trainer.global_step, samples_of(folder, images, device) if loggers else ())
    say(text)
    return dict(results)


def _accuracy(recorder: Recorder) -> Accuracy:
    """Best and last accuracy of a training that has ended."""
    if recorder.best is None or recorder.last is None:
        raise UserError("No epoch was finished, so there is no result. Run the same command again to continue.")
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
