"""Convert a plain mapping to a validated `Config`. The first invalid setting raises an error."""

from __future__ import annotations

import json
import os
import re
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ValidationError

from efficient_ft.config.augment import check_augment, check_stored_features, refuse_mixing
from efficient_ft.config.class_weights import check_values
from efficient_ft.config.explain import mistake, show
from efficient_ft.config.identity import OWN_FOLDERS, data_configs
from efficient_ft.config.kinds import OWN_CLASSIFIERS, check_kind
from efficient_ft.config.schema import Config, DataConfig, OptimConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.core.in_backward import Wrong, refuse_in_backward
from efficient_ft.core.units import parse_bytes, parse_seconds


def check(plain: Mapping[str, Any]) -> Config:
    """Return the configuration that a nested mapping of settings describes.

    `build_methods` checks the names and settings of the methods against their constructors.

    Args:
        plain: Groups and settings as in config.yaml. Settings that are missing or have the value ``???`` get the
            defaults of the schema.

    Raises:
        SettingError: If a setting is invalid. The message contains the full key and the value of the first invalid
            setting, the constraint, and the most similar known name.
    """
    if not isinstance(plain.get("method", {}), Mapping):
        raise SettingError("method", show(plain["method"]), "a mapping from method names to their settings")
    _refuse_sharding(plain)
    plain = _without_missing(plain)
    if isinstance(plain.get("model"), Mapping):
        plain = {**plain, "model": _with_model_type(plain["model"])}
    # A method's YAML file that contains only a package directive is composed to null.
    plain = {**plain, "method": {k: {} if v is None else v for k, v in plain.get("method", {}).items()}}
    plain = {**plain, "tasks": {} if plain.get("tasks") is None else plain["tasks"]}
    if isinstance(plain["tasks"], Mapping) and all(isinstance(one, Mapping) for one in plain["tasks"].values()):
        plain["data"] = next(iter(plain["tasks"].values()), plain.get("data"))
    config = validate(Config, plain, "")
    for data in data_configs(config):
        data._stops_early = config.trainer.patience is not None
        if data.labels is not None:
            data.labels._task = config.task
    _check_together(config)
    return config


def _refuse_sharding(plain: Mapping[str, Any]) -> None:
    """Raise a SettingError with an explanation for strategies that shard parameters over the processes."""
    trainer = plain.get("trainer")
    strategy = str(trainer.get("strategy", "")) if isinstance(trainer, Mapping) else ""
    if re.match(r"(fsdp|deepspeed|model_parallel|zero)", strategy.lower()):
        raise SettingError(
            "trainer.strategy",
            strategy,
            "auto or ddp",
            "This strategy shards each parameter over the processes, but methods require whole parameters. Methods"
            " replace the backward pass of whole layers, pack the tensors that layers save, and freeze parameters in"
            " some steps. To find a method that fits a memory budget, use efficient-ft plan memory=4GB.",
        )


def _without_missing(value: Any) -> Any:
    """Remove the entries with the value ``???``, which marks a missing value in YAML."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_missing(below) for key, below in value.items() if below != "???"}


def _with_model_type(model: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the model settings. If the name of a network of `transformers` is missing, add the name.

    The name is the model type in config.json in the folder of the weights. If there is no model type, the name is
    ``auto``, and reading the folder raises an error later. Raise a SettingError if `weights` is not set.
    """
    if model.get("library") != "transformers" or model.get("name") is not None:
        return model
    weights = model.get("weights")
    if not isinstance(weights, str):
        known = "a repository OWNER/NAME on the hub, or a model type such as vit"
        raise SettingError("model.name", "nothing", known, "For a local folder, set model.weights=DIR instead.")
    path = Path(weights).expanduser()
    try:
        file = (path if os.path.isdir(path) else path.parent) / "config.json"
        name = json.loads(file.read_bytes().decode("utf-8-sig"))["model_type"]
    except (OSError, ValueError, LookupError, TypeError, RecursionError):
        name = None
    return {**model, "name": name if isinstance(name, str) and name else "auto"}


def _check_together(config: Config) -> None:
    """Raise a SettingError for settings that exclude each other or that have no effect together."""
    model, data, optim, trainer = config.model, config.data, config.optim, config.trainer
    if config.evaluate is not None and config.cost_only:
        raise SettingError("cost_only", "true", "false with evaluate=RUN", "Set only one of these settings.")
    if (model.mean is None) != (model.std is None):
        missing = "model.std" if model.std is None else "model.mean"
        raise SettingError(missing, "null", "a list with one number per channel if model.mean or model.std is set")
    if model.mean is not None and model.std is not None and len(model.mean) != len(model.std):
        raise SettingError("model.std", list(model.std), f"a list of {len(model.mean)} numbers, like model.mean")
    if model.name in OWN_CLASSIFIERS[:2] and model.pretrained and model.weights is None:
        known = f"false for {model.name}, which has no published weights"
        raise SettingError("model.pretrained", "true", known, "Or pass model.weights=FILE.")
    if model.weights_key is not None and model.weights is None:
        raise SettingError("model.weights_key", model.weights_key, "null without model.weights=FILE")
    check_kind(config)
    for key, one in {f"tasks.{name}": one for name, one in config.tasks.items()}.items() or [("data", data)]:
        _check_data(key, one)
    if config.tasks:
        _check_tasks(config.tasks)
    for setting, owners in (("momentum", ("sgd",)), ("betas", ("adamw", "adam")), ("state_bits", ("adamw", "adam"))):
        # The default is accepted with every optimizer, because the configuration that a run writes contains the
        # default.
        value = getattr(optim, setting)
        if value != OptimConfig.model_fields[setting].default and optim.name not in owners:
            do = f"The setting applies only to optim={' or optim='.join(owners)}."
            raise SettingError(f"optim.{setting}", show(value), f"left out with optim={optim.name}", do)
    if optim.decay_steps is not None and optim.schedule != "constant":
        do = "The cosine schedule decreases the learning rate in all steps after the warm-up."
        raise SettingError("optim.decay_steps", optim.decay_steps, f"null with optim.schedule={optim.schedule}", do)
    if isinstance(optim.class_weights, list | dict):
        check_values(optim.class_weights)
    if optim.in_backward:
        clip, accumulate, devices = optim.grad_clip_norm, trainer.grad_accum_steps, trainer.devices
        refuse_in_backward(
            "optim.in_backward=true",
            clipping=None if clip is None else Wrong("optim.grad_clip_norm", clip, "null"),
            accumulation=None if accumulate == 1 else Wrong("trainer.grad_accum_steps", accumulate, "1"),
            scaling=None if trainer.precision != "fp16" else Wrong("trainer.precision", "fp16", "fp32 or bf16"),
            processes=None if devices in (1, "auto") else Wrong("trainer.devices", devices, "1"),
        )
        nodes = None if trainer.num_nodes == 1 else Wrong("trainer.num_nodes", trainer.num_nodes, "1")
        refuse_in_backward("optim.in_backward=true", processes=nodes)
    if trainer.patience is not None:
        _check_patience(config, trainer.patience)
    if config.memory is not None:
        parse_bytes("memory", config.memory)
        if trainer.compile:
            do = "The prediction of the process memory does not include the compiler. Remove memory or trainer.compile."
            raise SettingError("trainer.compile", "true", "false if memory is set", do)
    _check_batch_size(config)
    if trainer.cache_features == "on":
        check_stored_features(config)
    if config.pause_at is not None:
        _check_pause(config.pause_at)
    if config.job_timeout is not None:
        parse_seconds("job_timeout", config.job_timeout, plain=True)
    parse_bytes("trainer.cache_limit", trainer.cache_limit)
    if trainer.max_steps == 0:
        raise SettingError("trainer.max_steps", 0, "-1 (no limit) or an integer >= 1")
    if trainer.weight_dtype == "bf16" and trainer.precision != "bf16":
        do = "Only matrix products in bf16 use bf16 weights without a conversion. Set trainer.precision=bf16."
        raise SettingError("trainer.weight_dtype", "bf16", f"fp32 with trainer.precision={trainer.precision}", do)
    if trainer.precision == "fp16" and trainer.accelerator == "cpu":
        raise SettingError("trainer.precision", "fp16", "fp32 or bf16 on the CPU")


def _check_pause(value: int | str) -> None:
    """Raise a SettingError if `pause_at` is neither a number of steps nor a time."""
    try:
        if isinstance(value, str):
            parse_seconds("pause_at", value)
        elif value >= 1:
            return
    except SettingError:
        value = str(value)
    else:
        if isinstance(value, str):
            return
    raise SettingError("pause_at", value, "a number of optimizer steps >= 1, or a time (for example, 30min)")


def _check_batch_size(config: Config) -> None:
    """Raise a SettingError for settings that exclude an automatic or an effective batch size."""
    data, trainer, effective = config.data, config.trainer, config.data.effective_batch_size
    for key, one in {f"tasks.{name}": one for name, one in config.tasks.items()}.items():
        if one.automatic:
            do = "The memory prediction supports only one data set."
            raise SettingError(f"{key}.batch_size", "auto", "an integer with several data sets", do)
        if one.effective_batch_size is not None:
            do = "Set trainer.grad_accum_steps instead."
            raise SettingError(f"{key}.effective_batch_size", one.effective_batch_size, "null with several tasks", do)
    if data.automatic and trainer.compile:
        do = "The prediction of the process memory does not include the compiler."
        raise SettingError("data.batch_size", "auto", "an integer with trainer.compile=true", do)
    if data.automatic and config.jobs > 1 and config.memory is None:
        do = "Parallel jobs share the available memory. Set memory=SIZE, the budget of each job."
        raise SettingError("data.batch_size", "auto", f"an integer with jobs={config.jobs} and memory=null", do)
    if effective is None:
        return
    if isinstance(data.batch_size, str):
        if trainer.grad_accum_steps > 1:
            do = "data.effective_batch_size determines the accumulation. Remove trainer.grad_accum_steps."
            raise SettingError("trainer.grad_accum_steps", trainer.grad_accum_steps, "1 with data.batch_size=auto", do)
        return
    if effective % data.batch_size:
        known = f"a multiple of data.batch_size={data.batch_size}"
        do = "With data.batch_size=auto, the run selects a batch size that divides this value."
        raise SettingError("data.effective_batch_size", effective, known, do)
    if config.optim.in_backward and effective != data.batch_size:
        do = "An optimizer step inside the backward pass uses one batch."
        raise SettingError("data.effective_batch_size", effective, f"{data.batch_size} with optim.in_backward", do)


def refuse_automatic(config: Config, command: str) -> None:
    """Raise a SettingError if the batch size is ``auto``, which only a run selects. The message names `command`."""
    if config.data.automatic:
        do = "Only efficient-ft train and efficient-ft lr select a batch size. Set data.batch_size."
        raise SettingError("data.batch_size", "auto", f"an integer with {command}", do)


def _check_patience(config: Config, patience: int) -> None:
    """Raise a SettingError if training cannot stop early, or if the test split would decide when training stops."""
    for key, data in {f"tasks.{name}": one for name, one in config.tasks.items()}.items() or [("data", config.data)]:
        if data.select_best_on == "test":
            do = "Early stopping requires a validation split. Remove trainer.patience to reproduce a published run."
            raise SettingError(f"{key}.select_best_on", "test", f"val with trainer.patience={patience}", do)
    epochs = config.trainer.epochs
    if patience >= epochs:
        do = "Training could never stop early. Set trainer.patience=null to train for all epochs."
        raise SettingError(
            "trainer.patience", patience, f"less than {epochs}, the value of trainer.epochs, or null", do
        )


def _check_data(key: str, data: DataConfig) -> None:
    parse_bytes(f"{key}.decoded_limit", data.decoded_limit)
    if data.splits is not None and data.name not in OWN_FOLDERS:
        raise SettingError(f"{key}.splits", show(data.splits), f"null with data={data.name}, which has its own splits")
    if data.value_range is not None and not data.value_range[0] < data.value_range[1]:
        raise SettingError(f"{key}.value_range", list(data.value_range), "[LOW, HIGH] with LOW < HIGH, or null")
    if (data.name == "labels") != (data.labels is not None):
        value = "null" if data.labels is None else "a mapping"
        known = f"{'a mapping with the key file' if data.labels is None else 'null'} with data={data.name}"
        raise SettingError(f"{key}.labels", value, known, "Use data=labels data.root=DIR data.labels.file=FILE.")
    if data.value_range is not None and data.name not in ("folder", "labels", "mask_folder"):
        raise SettingError(f"{key}.value_range", list(data.value_range), f"null with data={data.name}")
    check_augment(key, data.augment)
    if data.batch_size == 1:
        why = "Images are mixed with other images of the same batch."
        refuse_mixing(key, data.augment, f"with {key}.batch_size=1", why)


def _check_tasks(tasks: Mapping[str, DataConfig]) -> None:
    if len(tasks) == 1:
        raise SettingError("tasks", ", ".join(tasks), "two data sets or more", "For one, use tasks=none data=NAME.")
    for name in tasks:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SettingError("tasks", name, "a mapping whose names contain only letters, digits, _ and -")
    first, *others = tasks
    split = tasks[first].select_best_on
    for name in others:
        if tasks[name].select_best_on != split:
            do = "The best epoch is selected by the mean accuracy over all tasks."
            raise SettingError(
                f"tasks.{name}.select_best_on", tasks[name].select_best_on, f"{split}, as for {first}", do
            )


_Model = typing.TypeVar("_Model", bound=BaseModel)


def validate(schema: type[_Model], plain: Mapping[str, Any], prefix: str) -> _Model:
    """Convert the settings in `plain` to an instance of the pydantic model `schema`.

    `prefix` is the name of the settings group. Validation is strict: a string such as "3" is not a valid integer, and
    true is not a valid number. However, a list is a valid tuple. Raise a SettingError if a setting is invalid.
    """
    try:
        return schema.model_validate_json(json.dumps(plain, default=str), strict=True)
    except ValidationError as error:
        # Report misspelled keys first, because a misspelled key often causes another error for a missing key.
        mistakes = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        raise mistake(schema, plain, prefix, mistakes[0]["loc"], mistakes[0]["type"]) from None
