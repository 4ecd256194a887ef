"""One run, from a checked configuration to results: train, evaluate, or only count the cost.

The folder of a run holds
`config.yaml`, `metrics.jsonl` (the source of truth) and `metrics.csv`, `step_stats.jsonl` (with `step_stats.interval`),
`checkpoint.ckpt` (to continue an interrupted run) and the one before it, `model.safetensors` (the best epoch, under
timm's own names) and, once the run has finished, `results.json`.

Best or last: `model.safetensors` holds the weights of the epoch with the best accuracy on the split that
`data.select_best_on` names, because that is the published protocol; results.json gives both accuracies, and the last
weights are in the checkpoint. With several tasks the best epoch is that of the best mean over the tasks of their
accuracies, each on its own images.
"""

from __future__ import annotations

import json
import logging
import os
import platform
import shutil
import signal
import threading
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import lightning.pytorch as L
import timm
import torch
import yaml
from filelock import FileLock, Timeout
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import nn
from torch.utils.data import DataLoader
from torchmetrics.classification import MulticlassAccuracy

from efficient_ft import __version__, cost
from efficient_ft.config import Config, check, fingerprint
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.data import ImageData, RoundRobinData, class_count, missing_data, open_data
from efficient_ft.integrations.lightning import MethodCallback
from efficient_ft.methods.base import Applied, Method, plain_state_dict
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.models.tasks import tasks_of
from efficient_ft.record.step_stats import StepStats
from efficient_ft.training import checkpoint, export, report
from efficient_ft.training.callbacks import Bar, Recorder
from efficient_ft.training.module import FineTuner, Images, build_optimizer

log = logging.getLogger(__name__)

RESULTS = "results.json"
CONFIG = "config.yaml"

#: Classes of a model whose data are not there, when only its cost is asked for: those of ImageNet.
_UNKNOWN_CLASSES = 1000
#: Held by the process that trains in a folder; the system lets go of it when that process ends, however it ends.
_LOCK = ".lock"

_PRECISION: dict[str, Any] = {"fp32": "32-true", "bf16": "bf16-mixed", "fp16": "16-mixed"}


def run(config: Config, folder: Path) -> dict[str, Any]:
    """Do what `config` asks, in `folder`; print the outcome.

    Returns:
        The contents of results.json; with `evaluate`, accuracies by split; with `cost_only`, the costs.

    Raises:
        UserError: whatever the user can mend: missing weights or data (both in one message), a folder of another
            run, a loss that is not finite …
    """
    _quiet_lightning()
    if config.cost_only:
        return _cost_only(config)
    if config.evaluate is not None:
        return _evaluate(Path(config.evaluate), config)

    _refuse_another_run(config, folder)
    finished = folder / RESULTS
    if finished.is_file() and config.resume == "auto":
        results = json.loads(finished.read_text(encoding="utf-8"))
        _say("This run has finished already; its results (resume=never trains anew):")
        _say(report.result_text(results, folder))
        return results
    _require(config)
    with _alone_in(folder):
        _take_folder(config, folder)
        return _train(config, folder)


# ---------------------------------------------------------------------------------------------- before training
def _require(config: Config) -> None:
    """All that is missing, in one message, before anything slow begins."""
    sources = config.tasks.values() or [config.data]
    found = [factory.missing_weights(config.model), *(missing_data(data) for data in sources)]
    missing = [m for m in found if m is not None]
    if missing:
        raise UserError("\n".join(missing))


def _refuse_another_run(config: Config, folder: Path) -> None:
    """Two runs never mix in one folder."""
    stored = folder / CONFIG
    differs = _difference(config, stored) if config.resume == "auto" and stored.is_file() else None
    if differs:
        raise UserError(
            f"{folder} holds another run ({differs}). Choose another hydra.run.dir, or resume=never (the old"
            " folder is kept under another name)."
        )


@contextmanager
def _alone_in(folder: Path) -> Iterator[None]:
    """No other process trains in `folder` meanwhile; of one that Lightning started, the first asks for all."""
    if _rank() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    lock = FileLock(folder / _LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder} is in use: the same command is running in another process. Wait for it, or choose another"
            " hydra.run.dir."
        ) from None
    try:
        yield
    finally:
        lock.release()


def _take_folder(config: Config, folder: Path) -> None:
    """Make the folder this run's: what an earlier one left is moved aside where a new start is asked for."""
    if _rank() != 0:
        return
    if config.resume == "never":
        _move_aside(folder)
    text = yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False)
    checkpoint.write_text_atomically(folder / CONFIG, text)


def _difference(config: Config, stored: Path) -> str | None:
    """What makes the run in `stored` another one, for a message; None when it is the same."""
    try:
        old_plain = yaml.safe_load(stored.read_text(encoding="utf-8"))
        if fingerprint(check(old_plain)) == fingerprint(config):
            return None
    except (UserError, TypeError, AttributeError, UnicodeDecodeError, yaml.YAMLError):
        return "its config.yaml cannot be read"
    old, new = _flat(old_plain), _flat(config.model_dump(mode="json"))
    changed = [k for k in {**old, **new} if old.get(k) != new.get(k)]
    return ", ".join(f"{k}: {old.get(k)} there, {new.get(k)} here" for k in changed[:3])


def _flat(tree: Any, prefix: str = "") -> dict[str, Any]:
    if not isinstance(tree, dict) or not tree:
        return {prefix: tree}
    return {k: v for name, sub in tree.items() for k, v in _flat(sub, f"{prefix}.{name}" if prefix else name).items()}


def _move_aside(folder: Path) -> None:
    """What an earlier run left in `folder` goes to `<folder>.1`, `.2`, …; nothing is deleted."""
    marks = (RESULTS, CONFIG, checkpoint.NAME, export.NAME, "metrics.jsonl")
    if not any((folder / name).exists() for name in marks):
        return
    number = 1
    while (aside := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    aside.mkdir()
    for entry in folder.iterdir():
        # Hydra has opened its log for this command already.
        if entry.suffix != ".log" and entry.name not in (".hydra", _LOCK):
            shutil.move(str(entry), aside / entry.name)
    _say(f"resume=never: the earlier run was moved to {aside}.")


# ---------------------------------------------------------------------------------------------- training
def _train(config: Config, folder: Path) -> dict[str, Any]:
    L.seed_everything(config.seed, verbose=False)
    spec = factory.input_of(config.model)
    images = _open(config, spec)
    for note in images.report()["notes"]:
        _say(note)
    network = factory.create_model(config.model, images.num_classes)
    methods = build_methods(config)
    names = images.class_names

    def keep_best(module: L.LightningModule, epoch: int, accuracy: float) -> None:
        if module.global_rank == 0:
            notes: dict[str, Any] = {"epoch": epoch, "accuracy": accuracy, "split": images.best_split}
            if recorder.best_tasks:
                notes["task_accuracy"] = recorder.best_tasks
            weights = plain_state_dict(network, methods)
            export.save(folder / export.NAME, weights, config.model, names, spec, notes, methods)

    run_id = _run_id(folder)
    recorder = Recorder(folder, images.best_split, keep_best, {"run_id": run_id, "version": __version__})
    loggers = _loggers(config, folder, run_id)
    callbacks: list[L.Callback] = [MethodCallback(methods, frozen_bn=config.model.frozen_bn)]
    if config.step_stats.interval:  # after the methods have chosen, before a checkpoint is written
        callbacks.append(StepStats(folder, methods, config.step_stats.interval))
    callbacks.append(recorder)
    epochs, total_steps = _length(config, images)
    if config.trainer.progress:
        callbacks.append(Bar(total_steps, epochs))
    trainer = _trainer(config, folder, methods, callbacks, loggers, epochs)
    if _channels_last(config, trainer.strategy.root_device):
        network.to(memory_format=torch.channels_last)
    module = FineTuner(network, config, images.num_classes, total_steps)

    state = folder / checkpoint.NAME
    resume = str(state) if checkpoint.exists(state) else None
    if resume is not None:
        _say(f"Continuing the run in {folder}.")
    with _patient_interrupt(recorder):
        try:
            trainer.fit(module, datamodule=Images(images), ckpt_path=resume)
        except BaseException as error:
            _close(loggers, failed=True)
            if isinstance(error, SystemExit) and trainer.interrupted:  # Lightning's way out of an interrupt
                raise KeyboardInterrupt from None
            raise
    if recorder.best is None or recorder.last is None:
        raise UserError("No epoch was finished, so there is no result; the same command continues.")

    # The optimizer's state and gradients are not needed any more; the cost probes want the memory.
    device = trainer.strategy.root_device
    trainer.optimizers = []
    network.zero_grad(set_to_none=True)
    results: dict[str, Any] = {
        "accuracy": {"best": recorder.best, "last": recorder.last, "split": images.best_split},
        "cost": {},
        "trainable_parameters": sum(p.numel() for p in network.parameters() if p.requires_grad),
        "total_parameters": sum(p.numel() for p in network.parameters()),
        "methods": {m.name: _applied(m.applied) for m in methods if m.applied is not None},
        "data": {},
        "config": config.model_dump(mode="json"),
        "environment": _environment(config, device),
    }
    if recorder.best_tasks:
        each = {t: {"best": best, "last": recorder.last_tasks[t]} for t, best in recorder.best_tasks.items()}
        results["accuracy"]["tasks"] = each
    if not trainer.is_global_zero:
        return results
    results["data"] = _data_report(config, folder, images, device)
    results["cost"] = _costs(config, network, methods, spec, images.num_classes, device, config.cost.steps)
    _summarise(loggers, results)
    checkpoint.write_text_atomically(folder / RESULTS, json.dumps(results, indent=2) + "\n")
    _say(report.result_text(results, folder))
    return results


@contextmanager
def _patient_interrupt(recorder: Recorder) -> Iterator[None]:
    """The first Ctrl-C ends the run after the present step, with a checkpoint; the second at once."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def ask(number: int, frame: Any) -> None:
        if recorder.stop_asked:
            raise KeyboardInterrupt
        recorder.stop_asked = True
        _say("\nStopping after this step, with a checkpoint (again: at once) …")

    before = signal.signal(signal.SIGINT, ask)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)


def _open(config: Config, spec: InputSpec) -> ImageData | RoundRobinData:
    """The images of the run, as the network takes them."""
    if not config.tasks:
        return open_data(config.data, spec, config.seed)
    parts = {}
    for task, data in config.tasks.items():
        try:
            parts[task] = open_data(data, spec, config.seed)
        except SettingError as error:
            # It knows its settings as those of the one data set.
            error.setting = error.setting.replace("data.", f"tasks.{task}.", 1)
            error.args = (str(error).replace("data.", f"tasks.{task}.", 1),)
            raise
    return RoundRobinData(parts, config.trainer.grad_accum_steps)


def _length(config: Config, images: ImageData | RoundRobinData) -> tuple[int, int]:
    """Epochs and optimizer steps of the run; the last batches of an epoch make a step, however few they are."""
    devices = config.trainer.devices
    world = devices if isinstance(devices, int) else max(1, torch.cuda.device_count())
    per_epoch = -(-len(images.train_loader(0, world)) // config.trainer.grad_accum_steps)
    if not per_epoch:
        raise UserError("There is not one batch of training images; see data.batch_size.")
    total = config.trainer.epochs * per_epoch
    if config.trainer.max_steps > 0:
        total = min(total, config.trainer.max_steps)
    return -(-total // per_epoch), total


def _trainer(
    config: Config,
    folder: Path,
    methods: Sequence[Method],
    callbacks: list[L.Callback],
    loggers: list[Logger],
    epochs: int,
) -> L.Trainer:
    options = config.trainer
    # Layers that freeze and thaw per step leave some parameters without a gradient, which DDP must be told.
    # So do the classifiers of other tasks.
    unused = bool(config.tasks) or any(getattr(m, "find_unused_parameters", False) for m in methods)
    strategy = "ddp_find_unused_parameters_true" if unused and options.devices != 1 else "auto"
    try:
        trainer = L.Trainer(
            accelerator=options.accelerator,
            devices=options.devices,
            strategy=strategy,
            precision=_PRECISION[options.precision],
            max_epochs=epochs,
            accumulate_grad_batches=options.grad_accum_steps,
            gradient_clip_val=config.optim.grad_clip_norm,
            limit_val_batches=options.limit_eval_batches,
            deterministic=options.deterministic,
            num_sanity_val_steps=0,
            callbacks=callbacks,
            plugins=[checkpoint.AtomicCheckpointIO()],
            logger=loggers or False,
            use_distributed_sampler=False,  # ours knows rank and world, and where to continue
            enable_checkpointing=False,
            enable_progress_bar=False,
            enable_model_summary=False,
            default_root_dir=str(folder),
        )
    except (MisconfigurationException, ValueError, RuntimeError) as error:
        raise UserError(
            f"trainer.accelerator={options.accelerator}, trainer.devices={options.devices},"
            f" trainer.precision={options.precision} cannot be had on this machine: {error}"
        ) from error
    if options.precision == "fp16" and trainer.strategy.root_device.type == "cpu":
        raise UserError("trainer.precision=fp16: allowed on a GPU only; use fp32 or bf16 on the CPU.")
    return trainer


def _applied(applied: Applied | None) -> dict[str, Any]:
    assert applied is not None
    return {"touched": list(applied.touched), "skipped": dict(applied.skipped), "notes": list(applied.notes)}


def _environment(config: Config, device: torch.device) -> dict[str, Any]:
    gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else None
    return {
        "efficient_ft": __version__,
        "torch": torch.__version__,
        "timm": timm.__version__,
        "lightning": L.__version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": gpu or f"{device.type} ({platform.machine()})",
        "threads": torch.get_num_threads(),
        "keep_allocator": config.keep_freed_memory and platform.system() == "Linux",
    }


def _channels_last(config: Config, device: torch.device) -> bool:
    chosen = config.trainer.channels_last
    return device.type == "cpu" if chosen is None else chosen


# ---------------------------------------------------------------------------------------------- evaluation
@torch.inference_mode()
def accuracy(
    model: nn.Module, loader: DataLoader, classes: int, device: torch.device, precision: str, limit: int | None = None
) -> float:
    """Top-1 accuracy (a fraction) of `model` on the first `limit` batches of `loader`, or on all."""
    model.eval().to(device)
    # on this process alone: the others may have ended
    metric = MulticlassAccuracy(classes, average="micro", validate_args=False, sync_on_compute=False).to(device)
    dtype = AUTOCAST[precision]
    for number, (images, labels) in enumerate(loader):
        if number == limit:
            break
        with torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext():
            logits = model(images.to(device, non_blocking=True))
        metric.update(logits.float(), labels.to(device, non_blocking=True))
    return float(metric.compute())


def _data_report(
    config: Config, folder: Path, images: ImageData | RoundRobinData, device: torch.device
) -> dict[str, Any]:
    """Of the images: sizes, corrupt ones left out, and the accuracy of model.safetensors as written on every split."""
    trained = export.load(folder)
    found = _accuracies(config, trained.model, images, device)
    told = images.report()
    if isinstance(images, ImageData):
        return {"splits": told["splits"], "skipped": told["skipped_count"], "accuracy": found}
    each = {
        task: {"splits": of["splits"], "skipped": of["skipped_count"], "accuracy": found[task]}
        for task, of in told["tasks"].items()
    }
    return {"skipped": sum(of["skipped"] for of in each.values()), "accuracy": _means(found), "tasks": each}


def _means(found: dict[str, dict[str, float]]) -> dict[str, float]:
    """The mean over the tasks, of the splits that all of them have."""
    splits = [s for s in ("val", "test") if all(s in of for of in found.values())]
    return {split: sum(of[split] for of in found.values()) / len(found) for split in splits}


def _accuracies(
    config: Config, model: nn.Module, images: ImageData | RoundRobinData, device: torch.device
) -> dict[str, Any]:
    """The accuracy by split, or by task and split."""
    options = config.trainer
    if isinstance(images, ImageData):
        return {
            split: accuracy(
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
    switch, found = tasks_of(model), {}
    assert switch is not None
    for task, part in images.parts.items():
        switch.active = task
        found[task] = _accuracies(config, model, part, device)
    return found


def _evaluate(folder: Path, asked: Config) -> dict[str, Any]:
    """Accuracy of a finished or interrupted run's best weights on its own data, on every split there is."""
    stored = folder / CONFIG
    if not stored.is_file():
        what = "holds no config.yaml; a run folder is meant" if folder.is_dir() else "no such folder"
        raise UserError(f"evaluate={folder}: {what}.")
    # The command line composes the run's own configuration with what is asked now; a run made otherwise is read.
    if (folder / ".hydra" / "overrides.yaml").is_file():
        config = asked
    else:
        config = check(yaml.safe_load(stored.read_text(encoding="utf-8")))
    trained = export.load(folder)
    missing = [m for m in map(missing_data, config.tasks.values() or [config.data]) if m is not None]
    if missing:
        raise UserError("\n".join(missing))
    images = _open(config, trained.input)
    if images.class_names != (trained.tasks or trained.class_names):
        places = ", ".join(data.root for data in config.tasks.values() or [config.data])
        raise UserError(f"evaluate={folder}: {places} now holds other classes than the run was trained on.")
    trainer = L.Trainer(accelerator=asked.trainer.accelerator, devices=1, logger=False, enable_checkpointing=False)
    found = _accuracies(config, trained.model, images, trainer.strategy.root_device)
    rows = [["accuracy", "", "images"]]
    if isinstance(images, ImageData):
        rows += [[split, f"{value:.2%}", str(images.splits[split])] for split, value in found.items()]
        told = {"accuracy": found}
    else:
        for task, part in images.parts.items():
            rows += [[f"{task} {s}", f"{value:.2%}", str(part.splits[s])] for s, value in found[task].items()]
        told = {"accuracy": _means(found), "tasks": found}
        rows += [[f"mean {split}", f"{value:.2%}", ""] for split, value in told["accuracy"].items()]
    _say(f"{folder / export.NAME} (epoch {trained.notes.get('epoch')}):\n{report.table(rows)}")
    return told


# ---------------------------------------------------------------------------------------------- cost
def _cost_only(config: Config) -> dict[str, Any]:
    """Executed cost of the method, beside full fine-tuning: no data, no weights."""
    counts = {task: class_count(data) or _UNKNOWN_CLASSES for task, data in config.tasks.items()}
    classes = counts or class_count(config.data) or _UNKNOWN_CLASSES
    spec = factory.input_of(config.model)
    network = factory.random_model(config.model, classes)
    costs = _costs(config, network, build_methods(config), spec, classes, torch.device("cpu"), steps=0)
    height, width = spec.size
    shown = classes if isinstance(classes, int) else "+".join(map(str, classes.values()))
    _say(
        f"{config.model.name}, {height}×{width}, {shown} classes, batch {config.data.batch_size},"
        f" {config.trainer.precision}; counted, not timed\n\n"
        + report.cost_table(costs, "+".join(config.method), config.data.batch_size)
    )
    return costs


def _costs(
    config: Config,
    network: nn.Module,
    methods: Sequence[Method],
    spec: InputSpec,
    classes: int | Mapping[str, int],
    device: torch.device,
    steps: int,
) -> dict[str, Any]:
    """The `cost` of results.json: a step of `network` with its methods and, beside it, of plain full fine-tuning.

    With several tasks it is a step of the first.
    """
    switch = tasks_of(network)
    if switch is not None:
        switch.active = switch.names[0]
    found = cost.compare(
        network,
        methods,
        (lambda: factory.random_model(config.model, classes)) if config.cost.compare_full else None,
        batch_size=config.data.batch_size,
        input_size=spec.size,
        steps=steps,
        precision=config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        in_chans=len(spec.mean),
        frozen_bn=config.model.frozen_bn,
        device=device,
        clip=config.optim.grad_clip_norm,
        build_optimizer=lambda model: build_optimizer(model, config.optim, config.trainer.precision),
    )
    for name, one in found.items():
        if one.note:
            _say(f"cost of {name}: {one.note}")
    method = _two_groups(found["method"])
    return {**method, "full": _two_groups(found["full"]) if "full" in found else None}


def _two_groups(found: cost.Cost) -> dict[str, Any]:
    counted, measured = found.executed, found.measured
    return {
        "executed": {
            "forward_flops": counted.forward_flops,
            "backward_flops": counted.backward_flops,
            "saved_bytes": counted.saved_bytes,
        },
        "measured": {
            "step_seconds": None if measured is None else measured.step_seconds,
            "peak_bytes": counted.peak_bytes if measured is None else measured.peak_bytes,
        },
    }


# ---------------------------------------------------------------------------------------------- logging
def _run_id(folder: Path) -> str:
    """The run's id for loggers: kept in the folder and in every checkpoint, so that a resumed run is the same one."""
    state, file = folder / checkpoint.NAME, folder / "run_id"
    if file.is_file():
        return file.read_text(encoding="utf-8").strip()
    if checkpoint.exists(state):
        for held in checkpoint.read(state)["callbacks"].values():
            if "run_id" in held:
                return str(held["run_id"])
    run_id = os.urandom(4).hex()
    if _rank() == 0:
        checkpoint.write_text_atomically(file, run_id + "\n")
    return run_id


def _loggers(config: Config, folder: Path, run_id: str) -> list[Logger]:
    """The chosen logger, started, so that what is wrong with it shows before training."""
    options = config.logger
    if options.name == "none":
        return []
    folder = folder.resolve()
    plain = config.model_dump(mode="json")
    try:
        if options.name == "tensorboard":
            from lightning.pytorch.loggers import TensorBoardLogger

            board = TensorBoardLogger(save_dir=folder, name="", version="tensorboard")
            board.log_hyperparams(_flat(plain))
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
            f"logger={options.name} needs a package that is not installed: pip install -e '.[{options.name}]'"
        ) from error
    except Exception as error:  # wandb's own errors derive from several bases
        raise UserError(
            f"logger={options.name} cannot start: {(str(error).splitlines() or [''])[0]}"
            " Use logger.mode=offline, or log in first (wandb login)."
        ) from error
    return [logger]


def _summarise(loggers: Sequence[Logger], results: dict[str, Any]) -> None:
    """Accuracy and cost into wandb's summary, so that runs can be compared there."""
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "summary"):
            shown = {k: results[k] for k in ("accuracy", "cost", "trainable_parameters", "total_parameters")}
            experiment.summary.update(_flat(shown))
    _close(loggers, failed=False)


def _close(loggers: Sequence[Logger], failed: bool) -> None:
    for logger in loggers:
        experiment: Any = getattr(logger, "experiment", None)
        if hasattr(experiment, "finish"):
            experiment.finish(exit_code=int(failed))


# ---------------------------------------------------------------------------------------------- talking
def _rank() -> int:
    """Known before the trainer is: a process that Lightning started carries it in its environment."""
    return int(getattr(rank_zero_only, "rank", None) or 0)


@rank_zero_only
def _say(text: str) -> None:
    print(text, flush=True)


def _quiet_lightning() -> None:
    """Leave out advice that does not apply here: our loaders, our checkpoints, BatchNorm frozen on purpose."""
    for name in ("lightning.pytorch", "lightning.fabric", "lightning", "timm"):
        logging.getLogger(name).setLevel(logging.WARNING)
    for message in (
        ".*does not have many workers.*",
        ".*module\\(s\\) in eval mode at the start of training.*",
        ".*your dataloader is not resumable.*",
        ".*is smaller than the logging interval.*",
        ".*Checkpoint directory.*",
        ".*GPU available but not used.*",
        ".*isinstance\\(treespec, LeafSpec\\).*",
    ):
        warnings.filterwarnings("ignore", message=message)
