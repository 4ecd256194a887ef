"""From a checked configuration to method objects: the only place that makes them for a run."""

from __future__ import annotations

import inspect
import typing
from collections.abc import Mapping
from typing import Any

from pydantic import ConfigDict, create_model

from efficient_ft.config import Config, validate
from efficient_ft.config.schema import Section
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.base import Method


def build_methods(config: Config) -> list[Method]:
    """The methods of a run, the selection among them, in the order in which they are to be applied.

    The only place that makes method objects. A selection named by the user replaces the default one (`select`)
    of the recipes beside it; where none is named and no recipe has one, `requires_grad` is left as it is.

    Raises:
        SettingError: unknown method or setting, or a value that its constructor refuses.
        UserError: selections that exclude each other.
    """
    from efficient_ft.methods import METHODS
    from efficient_ft.methods.base import in_order
    from efficient_ft.models.tasks import Tasks

    if config.tasks:
        Tasks(config.tasks)  # which knows what a network can call them
    for name in config.method:
        if name not in METHODS:
            raise SettingError("method", name, sorted(METHODS))
    if config.model.select != "keep":
        _selection_named("model.select", config.model.select, METHODS)
    for axis, does in (
        ("backprop", "replace the backward pass"),
        ("memory", "decide how activations are kept"),
        ("tokens", "decide which tokens flow on"),
    ):
        rivals = [name for name in config.method if METHODS[name].axis == axis]
        if len(rivals) > 1:
            raise UserError(f"method: {' and '.join(rivals)} both {does}; name one of them.")
    named = [name for name in config.method if METHODS[name].axis == "selection"]
    recipes = [name for name in config.method if name not in named]
    if len(named) > 1:
        raise UserError(
            f"method: {' and '.join(named)} both select what trains; name one of them"
            " (full: everything; with no selection named, the other methods bring their own)."
        )

    settings = {name: dict(config.method[name]) for name in config.method}
    for name, given in settings.items():
        if "seed" in _arguments(METHODS[name]) and given.get("seed") is None:
            given["seed"] = config.seed
    # What a method wants trained, where its constructor leaves the word free for that.
    selects = {
        name: settings[name].pop("select")
        for name in recipes
        if "select" in settings[name] and "select" not in _arguments(METHODS[name])
    }
    methods = [_build(METHODS[name], name, settings[name]) for name in config.method]
    selection = None if named else _default_selection(selects, METHODS)
    if selection is not None:
        methods.append(_build(METHODS[selection], selection, {}))
    return in_order(methods)


def _default_selection(selects: Mapping[str, Any], known: Mapping[str, type]) -> str | None:
    """The one selection that the recipes agree on; null and ``keep`` have no say."""
    wanted: dict[str, str] = {}
    for recipe, select in selects.items():
        if select in (None, "keep"):
            continue
        wanted[recipe] = _selection_named(f"method.{recipe}.select", select, known)
    if len(set(wanted.values())) > 1:
        each = ", ".join(f"method.{recipe}.select={selects[recipe]}" for recipe in wanted)
        raise UserError(
            f"method: {each} disagree about what trains. Name a selection in the list, e.g."
            f" 'method=[{','.join([*selects, 'last_stage'])}]', or set them equal."
        )
    return next(iter(wanted.values()), None)


def _selection_named(setting: str, select: Any, known: Mapping[str, type]) -> str:
    """The selection that the value `select` of a setting names."""
    # Those that need to be told more (which blocks) cannot be a bare name.
    names = sorted(
        name
        for name, method in known.items()
        if method.axis == "selection"  # type: ignore[attr-defined]
        and all(p.default is not p.empty for p in _arguments(method).values())
    )
    name = "full" if select == "all" else select
    if name not in names:
        allowed = ["all", "keep", *(n for n in names if n != "full")]
        hint = "A selection with settings of its own goes into the list: 'method=[...]'."
        raise SettingError(setting, select, allowed, hint)
    return name


def _arguments(method: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(method).parameters)


def _build(method: type, name: str, settings: dict[str, Any]) -> Method:
    """One method from its settings, checked against the names and types of its constructor."""
    hints = typing.get_type_hints(method.__init__, include_extras=True)  # type: ignore[misc]
    fields: dict[str, Any] = {
        argument: (hints.get(argument, Any), ... if p.default is p.empty else p.default)
        for argument, p in _arguments(method).items()
    }
    schema = create_model(name, __config__=ConfigDict(**Section.model_config, arbitrary_types_allowed=True), **fields)
    checked = validate(schema, settings, f"method.{name}")
    try:
        return method(**{argument: getattr(checked, argument) for argument in settings})
    except SettingError as error:
        # A constructor knows its settings by their own names only.
        error.setting = f"method.{name}.{error.setting}"
        error.args = (f"method.{name}.{error}",)
        raise
