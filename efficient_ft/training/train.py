"""Train a run: open the data, build the network and the callbacks, and run the training loop."""

from __future__ import annotations

import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import lightning.pytorch as L
import torch
from lightning.pytorch.loggers import Logger
from torch import Tensor, nn

from efficient_ft import __version__
from efficient_ft.config import Config
from efficient_ft.core import stopping
from efficient_ft.core.process_memory import release_freed_memory, release_library_pages, resident_bytes
from efficient_ft.core.terminal import shown_path
from efficient_ft.core.units import parse_seconds
from efficient_ft.data.inspection import Summary
from efficient_ft.data.loader import refuse_killed_worker
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods.base import Method, plain_state_dict
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.results import images_digest
from efficient_ft.training.balance import balance_classes
from efficient_ft.training.callbacks.compilation import CompileCallback
from efficient_ft.training.callbacks.ema import WeightAverage
from efficient_ft.training.callbacks.progress import ProgressBar
from efficient_ft.training.callbacks.recorder import Paused, Recorder, rows_every, stop_on_interrupt
from efficient_ft.training.callbacks.step_stats import StepStats
from efficient_ft.training.callbacks.totals import Totals
from efficient_ft.training.datamodule import (
    RunDataModule,
    refuse_unusable,
    run_contents,
    run_length,
    summaries,
    summary_text,
)
from efficient_ft.training.features.prefix import FeatureCallback
from efficient_ft.training.kinds.base import Kind, RunData, settings_of_task
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.measured import MemoryMeter
from efficient_ft.training.module import FineTuner
from efficient_ft.training.optimizer import warmup_steps
from efficient_ft.training.output import checkpoint, export
from efficient_ft.training.output.console import rank, say
from efficient_ft.training.output.folder import (
    CONTENTS,
    IMAGES,
    RunFolder,
    refuse_changed_contents,
    refuse_other_images,
    run_id,
)
from efficient_ft.training.output.loggers import close_loggers, start_loggers
from efficient_ft.training.precision import precision_note
from efficient_ft.training.processes import from_first, same_start, world_size
from efficient_ft.training.trainer import build_trainer, on_device, use_channels_last

#: Mapping from `Trainer.received_sigterm` to the signal that Lightning handled.
_LIGHTNINGS = {True: signal.SIGTERM, False: signal.SIGINT}


@dataclass(frozen=True)
class Training:
    """A run that is ready for its first training step.

    Attributes:
        config: the configuration of the run.
        held: the run folder, which the first process has locked.
        kind: the kind of task.
        data: the opened data.
        understood: mapping from tasks to summaries of their data. The mapping is empty except in the first process.
        network: the network with its weights. The methods are not applied yet.
        methods: the methods of the run.
        before_model: resident memory before the network was built, in bytes.
        class_weights: see `training.balance.balance_classes`.
    """

    config: Config
    held: RunFolder
    kind: Kind
    data: RunData
    understood: Mapping[str, Summary]
    network: nn.Module
    methods: Sequence[Method]
    before_model: int
    class_weights: Mapping[str, Tensor]


@dataclass(frozen=True)
class Fitted:
    """The Trainer, the module, the callbacks and the loggers after training has ended or has been paused."""

    trainer: L.Trainer
    module: FineTuner
    recorder: Recorder
    totals: Totals
    memory: MemoryMeter
    features: FeatureCallback | None
    compilation: CompileCallback | None
    loggers: list[Logger]
    paused: bool = False


def prepare(config: Config, held: RunFolder, begun: Callable[[], None], opened: RunData | None) -> Training:
    """Open the data, build the network and the methods, and prepare the run folder.

    Args:
        config: the configuration of the run.
        held: the run folder, which the first process has locked.
        begun: function that the first process calls as soon as the folder belongs to this run.
        opened: the data if they have already been opened, or None otherwise.

    Raises:
        UserError: If the data cannot be used, if they have changed since the run began, or if the network cannot be
            built or cannot process the data.
    """
    L.seed_everything(config.seed, verbose=False)
    kind, folder = kind_of(config), held.path
    data = kind.open(config, factory.input_of(config.model)) if opened is None else opened
    for task, part in data.parts.items():
        with settings_of_task(task):
            part.keep_decoded(config.trainer.epochs)
    digest, contents = images_digest(data.report()), run_contents(config, data)
    if config.resume != "never":
        refuse_changed_contents(folder, contents)
        refuse_other_images(config, folder, digest)
    balance_classes(config, kind.task, data, lambda line: None)  # rejects invalid settings before the inspection
    understood = summaries(data) if rank() == 0 else {}
    refuse_unusable(config, understood)
    say(summary_text(understood))
    weights = balance_classes(config, kind.task, data)
    release_freed_memory()  # reading a list of a million images leaves 75 MiB of unused memory
    release_library_pages()
    before_model = resident_bytes()
    network, methods = build_network(config, data)
    notes = {IMAGES: digest, CONTENTS: json_text(contents.record()), **precision_note(config, on_device(config))}
    held.begin(config, notes, begun)
    from_first()  # the other processes wait until the first one has prepared the folder
    return Training(config, held, kind, data, understood, network, methods, before_model, weights)


def build_network(config: Config, data: RunData) -> tuple[nn.Module, list[Method]]:
    """Build the network of a run with its weights, and the methods, which are not applied yet.

    Raises:
        UserError: If the network cannot be built or cannot process the data, or if the kind of task does not support a
            method.
    """
    kind = kind_of(config)
    network = store_weights(kind.network(config.model, data.num_classes), config.trainer.weight_dtype)
    kind.check_network(network, data)
    methods = build_methods(config)
    kind.refuse_methods(methods)
    return network, methods


def fit(run: Training, arguments: Sequence[str]) -> Fitted:
    """Train until the last step, starting from the last checkpoint if there is one.

    Raises:
        UserError: If a setting cannot be used on this machine or with these data.
        DivergedError: If the loss is not finite.
    """
    config, folder = run.config, run.held.path
    name = run_id(folder)
    epochs, total_steps = run_length(config, run.data, world_size(config))
    if warmup_steps(config.optim, total_steps) >= total_steps:
        say(
            f"warning: trainer.max_steps={config.trainer.max_steps} ends the run before the warm-up of"
            f" optim.warmup_steps={config.optim.warmup_steps} steps is complete. The learning rate never reaches"
            f" optim.lr={config.optim.lr:g}."
        )
    totals = Totals(run.methods, total_steps * config.trainer.grad_accum_steps)
    extra = {"run_id": name, "version": __version__}
    every = rows_every(config.logger.every_n_steps, total_steps)
    names = run.data.class_names
    of_classes = names if isinstance(names, list | tuple) else ()
    ema = None if config.trainer.ema is None else WeightAverage(config.trainer.ema)
    keep_best = partial(export_network, run, ema=ema)
    recorder = Recorder(
        folder, run.data.best_split, keep_best, extra, totals, every, of_classes, config.trainer.patience
    )
    if isinstance(config.pause_at, str):
        recorder.pause_seconds = parse_seconds("pause_at", config.pause_at)
    else:
        recorder.pause_at = config.pause_at
    loggers = start_loggers(config, folder, name, arguments)
    memory = MemoryMeter(run.methods, run.before_model)
    apply = MethodCallback(run.methods, frozen_bn=config.model.frozen_bn)
    callbacks: list[L.Callback] = [memory, run.held.started(), same_start(), apply, *([] if ema is None else [ema])]
    features = None
    stores = config.trainer.cache_features != "off" and run.kind.supports("cache_features")
    if stores or (config.trainer.frozen_prefix != "fp32" and run.kind.supports("prefix")):
        data: Any = run.data
        # A run with a constant rate can be lengthened later, so its length must not decide whether features are stored.
        planned = config.trainer.epochs if config.optim.schedule == "constant" else epochs
        features = FeatureCallback(config, data, run.methods, planned, folder)
        callbacks.append(features)
    compilation = CompileCallback(totals.counts_every) if config.trainer.compile else None
    if compilation is not None:
        callbacks.append(compilation)
    if config.step_stats.interval:  # StepStats runs after `apply` prepares the step and before checkpoints are saved
        callbacks.append(StepStats(folder, run.methods, config.step_stats.interval))
    callbacks += [totals, recorder]
    if config.trainer.progress:
        callbacks.append(ProgressBar(total_steps, epochs, recorder))
    trainer = build_trainer(config, folder, run.methods, callbacks, loggers, epochs)
    if use_channels_last(config, trainer.strategy.root_device):
        run.network.to(memory_format=torch.channels_last)
    task = run.kind.task_on(config, run.data)
    module = FineTuner(run.network, config, run.data.num_classes, total_steps, run.class_weights, task)
    fitted = Fitted(trainer, module, recorder, totals, memory, features, compilation, loggers)
    return replace(fitted, paused=_loop(run, fitted))


def _loop(run: Training, fitted: Fitted) -> bool:
    """Run Lightning's training loop. Convert signals and killed workers to error messages.

    Return True if the run was paused after ``pause_at`` steps.
    """
    trainer, recorder, state = fitted.trainer, fitted.recorder, run.held.path / checkpoint.NAME
    resume = from_first(str(state) if checkpoint.exists(state) else None)
    if resume is not None:
        say(f"Continuing the run in {shown_path(run.held.path)}.")
    with stop_on_interrupt(recorder):
        try:
            trainer.fit(fitted.module, datamodule=RunDataModule(run.data), ckpt_path=resume)
            if recorder.stop_requested is not None:  # the signal arrived in the last step, which was saved
                raise stopping.ending(recorder.stop_requested)
        except Paused:
            close_loggers(fitted.loggers, failed=False)
            return True
        except BaseException as error:
            close_loggers(fitted.loggers, failed=True)
            refuse_killed_worker(error)
            raise_signal(trainer, error, recorder.stop_requested)
            raise
    return False


def raise_signal(trainer: L.Trainer, error: BaseException, requested: int | None = None) -> None:
    """Raise the exception of a signal that interrupted Lightning's training loop. Other errors are ignored.

    Args:
        trainer: the Trainer whose loop raised `error`.
        error: the error. After a signal, Lightning raises SystemExit.
        requested: the signal that the run received, or None to use the signal that Lightning handled.
    """
    if isinstance(error, SystemExit) and trainer.interrupted:
        raise stopping.ending(requested or _LIGHTNINGS[trainer.received_sigterm]) from None


def export_network(run: Training, notes: dict[str, Any], ema: WeightAverage | None = None) -> None:
    """Write model.safetensors with the current weights, or with the averaged weights if `ema` is given.

    The metadata contain `notes` and the result of `Kind.notes`. If the weights alone define the network, also write the
    files of `Kind.companions`.
    """
    notes |= run.kind.notes(run.config, run.data)
    model = run.kind.portable(run.config, run.network)
    spec = run.kind.network_input(factory.input_of(run.config.model), run.data)
    with nullcontext() if ema is None else ema.applied():
        weights = plain_state_dict(run.network, run.methods, copy_weights=False)
        export.save(run.held.path / export.NAME, weights, model, run.data.class_names, spec, notes, run.methods)
    if all(method.merges for method in run.methods) and not run.config.tasks:
        for name, text in run.kind.companions(run.config, run.network, run.data).items():
            write_text_atomically(run.held.path / name, text)
