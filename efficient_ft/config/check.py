"""From a plain mapping to a checked `Config`; the first mistake becomes one clear message."""

from __future__ import annotations

import json
import re
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import BaseModel, ValidationError

from efficient_ft.config.explain import mistake, show
from efficient_ft.config.schema import Config, DataConfig, OptimConfig
from efficient_ft.core.errors import SettingError


def check(plain: Mapping[str, Any]) -> Config:
    """The configuration `plain` stands for.

    Raises:
        SettingError: for the first mistake: the full key, its value, what is allowed, and the nearest known name.
            Method names and settings are checked by `build_methods`, which knows the constructors.
    """
    if not isinstance(plain.get("method", {}), Mapping):
        raise SettingError("method", show(plain["method"]), "a mapping from a method's name to its settings")
    plain = _without_missing(plain)
    # A YAML that says nothing but its package composes to null.
    plain = {**plain, "method": {k: {} if v is None else v for k, v in plain.get("method", {}).items()}}
    plain = {**plain, "tasks": {} if plain.get("tasks") is None else plain["tasks"]}
    if isinstance(plain["tasks"], Mapping) and all(isinstance(one, Mapping) for one in plain["tasks"].values()):
        plain["data"] = next(iter(plain["tasks"].values()), plain.get("data"))
    config = validate(Config, plain, "")
    _check_together(config)
    return config


def _without_missing(value: Any) -> Any:
    """Without the entries that YAML marks as still to be given (``???``)."""
    if not isinstance(value, Mapping):
        return value
    return {key: _without_missing(below) for key, below in value.items() if below != "???"}


def _check_together(config: Config) -> None:
    """What no single value shows: settings that exclude each other, or mean nothing here."""
    model, data, optim, trainer = config.model, config.data, config.optim, config.trainer
    if config.evaluate is not None and config.cost_only:
        raise SettingError("cost_only", True, "false together with evaluate=RUN", "Ask for one of the two.")
    if (model.mean is None) != (model.std is None):
        missing = "model.std" if model.std is None else "model.mean"
        raise SettingError(missing, "null", "a list of numbers, one per channel, since the other one is given")
    if model.mean is not None and model.std is not None and len(model.mean) != len(model.std):
        raise SettingError("model.std", list(model.std), f"as many numbers as model.mean has ({len(model.mean)})")
    if model.name in ("vit_digits", "vit_micro") and model.pretrained and model.weights is None:
        raise SettingError(
            "model.pretrained", True, f"false: {model.name} has no published weights", "Or give model.weights=FILE."
        )
    for key, one in {f"tasks.{name}": one for name, one in config.tasks.items()}.items() or [("data", data)]:
        _check_data(key, one)
    if config.tasks:
        _check_tasks(config.tasks)
    for setting, owners in (("momentum", ("sgd",)), ("betas", ("adamw", "adam"))):
        # The default itself is harmless, and stands in every configuration that was written out.
        if getattr(optim, setting) != OptimConfig.model_fields[setting].default and optim.name not in owners:
            raise SettingError(
                f"optim.{setting}",
                show(getattr(optim, setting)),
                f"nothing with optim={optim.name}",
                f"It belongs to optim={' or optim='.join(owners)}.",
            )
    if trainer.max_steps == 0:
        raise SettingError("trainer.max_steps", 0, "-1 (no limit) or a whole number of at least 1")
    if trainer.precision == "fp16" and trainer.accelerator == "cpu":
        raise SettingError("trainer.precision", "fp16", "fp32 or bf16 on the CPU")


def _check_data(key: str, data: DataConfig) -> None:
    if data.augment.scale[0] > data.augment.scale[1]:
        raise SettingError(f"{key}.augment.scale", list(data.augment.scale), "[smallest, largest], in that order")
    if data.augment.name == "none" and data.augment.resize != "input":
        raise SettingError(
            f"{key}.augment.resize",
            data.augment.resize,
            f"input with {key}.augment.name=none",
            "Nothing is cropped there.",
        )


def _check_tasks(tasks: Mapping[str, DataConfig]) -> None:
    if len(tasks) == 1:
        raise SettingError("tasks", ", ".join(tasks), "two data sets or more", "For one: tasks=none data=NAME.")
    for name in tasks:
        if not re.fullmatch(r"[A-Za-z0-9_-]+", name):
            raise SettingError("tasks", name, "names of letters, digits, _ and -")
    first, *others = tasks
    for name in others:
        if tasks[name].select_best_on != tasks[first].select_best_on:
            raise SettingError(
                f"tasks.{name}.select_best_on",
                tasks[name].select_best_on,
                f"{tasks[first].select_best_on}, as for {first}: the best epoch is that of the best mean accuracy",
            )


_Model = typing.TypeVar("_Model", bound=BaseModel)


def validate(schema: type[_Model], plain: Mapping[str, Any], prefix: str) -> _Model:
    """`plain` as a `schema`; its first mistake as a SettingError, keys below `prefix`.

    Strict, as JSON: no "3" for 3, no true for 1, while a list still serves for a tuple.
    """
    try:
        return schema.model_validate_json(json.dumps(plain, default=str), strict=True)
    except ValidationError as error:
        # A misspelt key often shows as a missing one as well: name the spelling first.
        mistakes = sorted(error.errors(include_url=False), key=lambda e: e["type"] != "extra_forbidden")
        raise mistake(schema, plain, prefix, mistakes[0]["loc"], mistakes[0]["type"]) from None
