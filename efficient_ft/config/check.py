"""From a plain mapping to a checked `Config`; the first mistake becomes one clear message."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from efficient_ft.config.explain import mistake, show
from efficient_ft.config.identity import OWN_FOLDERS
from efficient_ft.config.schema import Config, DataConfig, MaskConfig, ModelConfig, OptimConfig
from efficient_ft.core.errors import SettingError
from efficient_ft.core.in_backward import Wrong, refuse_in_backward
from efficient_ft.core.units import parse_bytes, parse_seconds

#: Classifiers of images that timm does not have.
OWN_CLASSIFIERS = ("vit_digits", "vit_micro", "proxyless_mobile")


def check(plain: Mapping[str, Any]) -> Config:
    """Return the configuration that a nested mapping of settings describes.

    Args:
        plain: groups and settings as in config.yaml. Settings left out have the defaults of the schema; ``???`` counts
            as left out.

    Raises:
        SettingError: for the first mistake, with the full key, its value, the constraint, and the nearest known name.
            Names and settings of methods are checked by `build_methods`, which knows the constructors.
    """
    if not isinstance(plain.get("method", {}), Mapping):
        raise SettingError("method", show(plain["method"]), "a mapping from a method's name to its settings")
    _refuse_sharding(plain)
    plain = _without_missing(plain)
    # A YAML with nothing but its package composes to null.
    plain = {**plain, "method": {k: {} if v is None else v for k, v in plain.get("method", {}).items()}}
    plain = {**plain, "tasks": {} if plain.get("tasks") is None else plain["tasks"]}
    if isinstance(plain["tasks"], Mapping) and all(isinstance(one, Mapping) for one in plain["tasks"].values()):
        plain["data"] = next(iter(plain["tasks"].values()), plain.get("data"))
    config = validate(Config, plain, "")
    _check_together(config)
    return config


def _refuse_sharding(plain: Mapping[str, Any]) -> None:
    """Refuse strategies that divide each parameter over the processes, with the reason."""
    trainer = plain.get("trainer")
    strategy = str(trainer.get("strategy", "")) if isinstance(trainer, Mapping) else ""
    if re.match(r"(fsdp|deepspeed|model_parallel|zero)", strategy.lower()):
        raise SettingError(
            "trainer.strategy",
            strategy,
            "auto or ddp",
            "It would divide each parameter over the processes, and the methods work on whole ones: they replace the"
            " backward pass of whole layers, pack what these save, and freeze parameters in some steps, whose gradient"
            " is None then. Memory is saved by methods here: efficient-ft plan memory=4GB finds one that fits.",
        )


def _without_missing(value: Any) -> Any:
    """Remove the entries that YAML marks as missing (``???``)."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_missing(below) for key, below in value.items() if below != "???"}


def _check_together(config: Config) -> None:
    """Refuse settings that exclude each other, or have no meaning together."""
    model, data, optim, trainer = config.model, config.data, config.optim, config.trainer
    if config.evaluate is not None and config.cost_only:
        raise SettingError("cost_only", "true", "false with evaluate=RUN", "Choose one of the two.")
    if (model.mean is None) != (model.std is None):
        missing = "model.std" if model.std is None else "model.mean"
        raise SettingError(missing, "null", "a list of numbers, one per channel, because the other one is set")
    if model.mean is not None and model.std is not None and len(model.mean) != len(model.std):
        raise SettingError("model.std", list(model.std), f"a list of {len(model.mean)} numbers, as model.mean")
    if model.name in OWN_CLASSIFIERS[:2] and model.pretrained and model.weights is None:
        raise SettingError(
            "model.pretrained",
            "true",
            f"false for {model.name}, which has no published weights",
            "Or pass model.weights=FILE.",
        )
    if model.weights_key is not None and model.weights is None:
        raise SettingError("model.weights_key", model.weights_key, "null without model.weights=FILE")
    _check_task(config)
    for key, one in {f"tasks.{name}": one for name, one in config.tasks.items()}.items() or [("data", data)]:
        _check_data(key, one)
    if config.tasks:
        _check_tasks(config.tasks)
    for setting, owners in (
        ("momentum", ("sgd",)),
        ("betas", ("adamw", "adam")),
        ("state_bits", ("adamw", "adam")),
    ):
        # The default is in every configuration that a run has written.
        if getattr(optim, setting) != OptimConfig.model_fields[setting].default and optim.name not in owners:
            raise SettingError(
                f"optim.{setting}",
                show(getattr(optim, setting)),
                f"left out with optim={optim.name}",
                f"It belongs to optim={' or optim='.join(owners)}.",
            )
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
    if config.memory is not None:
        parse_bytes("memory", config.memory)
    if config.job_timeout is not None:
        parse_seconds("job_timeout", config.job_timeout, plain=True)
    parse_bytes("trainer.cache_limit", trainer.cache_limit)
    if config.tasks and trainer.cache_features == "on":
        raise SettingError("trainer.cache_features", "on", "off or auto with several tasks", "auto stores none there.")
    if config.tasks and trainer.prefix in ("folded", "bf16"):
        raise SettingError("trainer.prefix", trainer.prefix, "fp32 or auto with several tasks", "auto is fp32 there.")
    if trainer.max_steps == 0:
        raise SettingError("trainer.max_steps", 0, "-1 (no limit) or an integer >= 1")
    if trainer.precision == "fp16" and trainer.accelerator == "cpu":
        raise SettingError("trainer.precision", "fp16", "fp32 or bf16 on the CPU")


def _check_task(config: Config) -> None:
    """Refuse a network or a data set of another task, and settings without meaning in this one."""
    task, data, model, trainer = config.task, config.data, config.model, config.trainer
    of_data = "segmentation" if data.masks is not None else "text" if data.text is not None else "classification"
    for kind, of in (("masks", "images with masks"), ("text", "texts")):
        settings = getattr(data, kind)
        if settings is not None and data.name not in _DATA[kind]:
            first = next(iter(settings.model_fields_set), "")
            key = f"data.{kind}.{first}" if first else f"data.{kind}"
            raise SettingError(
                key,
                show(getattr(settings, first, "{}")),
                f"left out with data={data.name}",
                f"It belongs to data sets of {of}.",
            )
    of_model = model.task
    if of_model != task or model.name in OWN_CLASSIFIERS:
        _check_kind(model)
    if task == "classification":
        for of, what in ((of_data, f"data={data.name}"), (of_model, f"model.name={model.name}")):
            if of != task:
                raise SettingError("task", task, f"{of} with {what}", f"Add task={of}.")
        return
    data_of, model_of = _CHOICES[task]
    if task == "text" and data.name in _DATA["text"] and data.text is None:
        raise SettingError("data.text", "null", "a mapping with columns and label")
    if of_data != task:
        raise SettingError("data.name", data.name, f"a data set {data_of[0]} with task={task}", data_of[1])
    if of_model != task:
        raise SettingError("model.name", model.name, f"{model_of[0]} with task={task}", model_of[1])
    if config.tasks:
        raise SettingError("tasks", ", ".join(config.tasks), f"none with task={task}")
    if trainer.cache_features == "on":
        raise SettingError("trainer.cache_features", "on", f"off or auto with task={task}")
    if trainer.prefix in ("folded", "bf16"):
        raise SettingError("trainer.prefix", trainer.prefix, f"fp32 or auto with task={task}")
    augmentation = data.augment.model_dump(exclude_defaults=True)
    if augmentation:
        own = "Masks have data.masks.zoom and data.masks.flip." if task == "segmentation" else "Texts have none."
        setting = next(iter(augmentation))
        raise SettingError(f"data.augment.{setting}", show(augmentation[setting]), f"left out with task={task}", own)
    if data.masks is not None:
        _check_masks(data.name, data.masks)
    if data.text is not None:
        columns = [*data.text.columns, data.text.label]
        if len(set(columns)) < len(columns):
            raise SettingError(
                "data.text.columns", data.text.columns, f"other columns than {data.text.label}, each once"
            )
        for name, value in (("image_size", model.image_size), ("mean", model.mean), ("std", model.std)):
            if value is not None:
                hint = "The length of texts is model.max_length." if name == "image_size" else "Texts have no colors."
                raise SettingError(f"model.{name}", show(value), "null with task=text", hint)


def _check_kind(model: ModelConfig) -> None:
    """Refuse a setting of text classifiers or segmentation networks for a classifier of images."""
    given = {"max_length": model.max_length, "encoder": model.encoder}
    for name, kind in (("max_length", "text classifiers"), ("encoder", "segmentation networks (model=smp)")):
        if given[name] is not None and _is_classifier(model.name):
            raise SettingError(
                f"model.{name}",
                given[name],
                f"null with model.name={model.name}",
                f"It belongs to {kind}; leave it out.",
            )


def _is_classifier(name: str) -> bool:
    """Whether a name is that of a classifier of images; loads timm."""
    import timm

    return name in OWN_CLASSIFIERS or timm.is_model(name.partition(".")[0])


#: The data sets that have settings of masks, and of texts.
_DATA = {"masks": ("camvid", "cityscapes", "voc2012_aug", "mask_folder"), "text": ("rte", "text_folder")}

#: For the tasks other than classification: what its data sets and its networks are, and which there are.
_CHOICES = {
    "segmentation": (
        ("with masks", f"Choose data={', '.join(_DATA['masks'][:-1])} or {_DATA['masks'][-1]}."),
        (
            "a segmentation network",
            "Choose model=segformer_b0, model=deeplabv3_mobilenetv2, or model=smp with model.encoder=NAME.",
        ),
    ),
    "text": (
        ("of texts", f"Choose data={' or '.join(_DATA['text'])}."),
        (
            "a text classifier",
            "Choose model=bert_base, distilbert_base, bert_tiny, or model=text with model.name=bert model.weights=DIR.",
        ),
    ),
}


def _check_masks(name: str, masks: MaskConfig) -> None:
    for setting in ("classes", "ignored", "values", "colors", "palette", "folder", "image_folder", "suffix"):
        value = getattr(masks, setting)
        if value and value != "auto" and name != "mask_folder":
            known = "left out, since the data set has its own"
            raise SettingError(f"data.masks.{setting}", show(value), known, "Or use data=mask_folder.")
    if masks.colors is not None:
        if masks.values is not None:
            raise SettingError("data.masks.values", show(masks.values), "null with data.masks.colors")
        if masks.palette == "index":
            raise SettingError("data.masks.palette", "index", "auto or color with data.masks.colors")
        for class_name, color in masks.colors.items():
            if isinstance(color, str) and not re.fullmatch(r"#[0-9a-fA-F]{6}", color):
                known = '[red, green, blue] or "#rrggbb"'
                raise SettingError(f"data.masks.colors.{class_name}", color, known)
    low, high = masks.zoom
    if low > high:
        raise SettingError("data.masks.zoom", [low, high], "[smallest, largest]")


def _check_data(key: str, data: DataConfig) -> None:
    parse_bytes(f"{key}.decoded_limit", data.decoded_limit)
    if data.splits is not None and data.name not in OWN_FOLDERS:
        raise SettingError(f"{key}.splits", show(data.splits), f"null with data={data.name}, which has its own splits")
    if data.value_range is not None and not data.value_range[0] < data.value_range[1]:
        raise SettingError(f"{key}.value_range", list(data.value_range), "[LOW, HIGH] with LOW < HIGH, or null")
    if data.value_range is not None and data.name not in ("folder", "mask_folder"):
        raise SettingError(f"{key}.value_range", list(data.value_range), f"null with data={data.name}")
    if data.augment.scale[0] > data.augment.scale[1]:
        raise SettingError(f"{key}.augment.scale", list(data.augment.scale), "[smallest, largest]")
    if data.augment.name == "none" and data.augment.resize != "input":
        raise SettingError(
            f"{key}.augment.resize",
            data.augment.resize,
            f"input with {key}.augment.name=none",
            "Nothing is cropped then.",
        )


def _check_tasks(tasks: Mapping[str, DataConfig]) -> None:
    if len(tasks) == 1:
        raise SettingError("tasks", ", ".join(tasks), "two data sets or more", "For one, use tasks=none data=NAME.")
    for name in tasks:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SettingError("tasks", name, "a mapping from names of letters, digits, _ and -")
    first, *others = tasks
    for name in others:
        if tasks[name].select_best_on != tasks[first].select_best_on:
            raise SettingError(
                f"tasks.{name}.select_best_on",
                tasks[name].select_best_on,
                f"{tasks[first].select_best_on}, as for {first}",
                "The best epoch has the best mean accuracy over the tasks.",
            )


_Model = typing.TypeVar("_Model", bound=BaseModel)


def validate(schema: type[_Model], plain: Mapping[str, Any], prefix: str) -> _Model:
    """Return the settings `plain` of the group `prefix` as an object of the pydantic model `schema`.

    The check is strict: "3" is not accepted for 3, and true is not accepted for 1. A list is accepted for a tuple.
    """
    try:
        return schema.model_validate_json(json.dumps(plain, default=str), strict=True)
    except ValidationError as error:
        # A misspelt key often shows as a missing one as well: name the spelling first.
        mistakes = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        raise mistake(schema, plain, prefix, mistakes[0]["loc"], mistakes[0]["type"]) from None
