"""Create method objects from a validated configuration. The methods of all runs are created in this module.

`efficient_ft.methods` does not import this module, so that the library does not require pydantic.
"""

from __future__ import annotations

import inspect
import typing
from collections.abc import Container, Mapping, Sequence
from typing import Any

import yaml
from pydantic import ConfigDict, create_model

from efficient_ft.config import Config, validate
from efficient_ft.config.schema import Section
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.packages import configuration_folders, method_files
from efficient_ft.methods.base import Method, in_order
from efficient_ft.methods.declarations import Axis
from efficient_ft.methods.registry import METHODS
from efficient_ft.methods.stack import check_stack
from efficient_ft.models.tasks import Tasks


def build_methods(config: Config) -> list[Method]:
    """Return the methods of a run, including the selection method, in their order of application.

    A selection method that the user names replaces the default selections (`select`) of the other methods. If no
    selection method is named and no default selection is set, `requires_grad` does not change.

    Raises:
        SettingError: If a method or setting is unknown, or if a constructor rejects a value.
        UserError: If methods cannot be combined, if their default selections differ, or if the keys in a YAML file of
            another package differ from the arguments of the constructor.
    """
    if config.tasks:
        Tasks(config.tasks)  # This call checks the task names, which become parts of parameter names.
    for name in config.method:
        if name not in METHODS:
            raise SettingError("method", name, sorted(METHODS))
    _check_files(config.method)
    if config.model.select != "keep":
        _selection_named("model.select", config.model.select)
    settings = {name: dict(config.method[name]) for name in config.method}
    for name, given in settings.items():
        if "seed" in _arguments(METHODS[name]) and given.get("seed") is None:
            given["seed"] = config.seed
    # The key `select` names the default selection, unless the constructor has an argument with this name.
    selects = {
        name: given.pop("select")
        for name, given in settings.items()
        if METHODS[name].axis != Axis.SELECTION and "select" in given and "select" not in _arguments(METHODS[name])
    }
    methods = [_build(METHODS[name], name, settings[name]) for name in config.method]
    check_stack(methods)
    selection = None
    if not any(Axis.SELECTION in method.axes for method in methods):
        selection = _default_selection(selects)
    if selection is not None:
        methods.append(_build(METHODS[selection], selection, {}))
    return in_order(methods)


def baseline_methods(config: Config) -> list[Method] | None:
    """Return a list with the selection method that ``cost.baseline`` names, or None if costs are not compared."""
    if config.cost.baseline == "none":
        return None
    name = _selection_named("cost.baseline", config.cost.baseline, ("all", "none"))
    return [_build(METHODS[name], name, {})]


def _check_files(chosen: Container[str]) -> None:
    """Raise UserError if the keys in another package's file of a method in `chosen` differ from its arguments."""
    for package, name, file in method_files(configuration_folders()):
        if name not in chosen:
            continue
        given = set(yaml.safe_load(file.read_text(encoding="utf-8")) or {})
        arguments = set(_arguments(METHODS[name]))
        # The key `defaults` belongs to Hydra, and the key `select` names the default selection.
        extra = given - arguments - {"defaults"} - ({"select"} if METHODS[name].axis != Axis.SELECTION else set())
        missing = set() if "defaults" in given else arguments - given
        for names, fault in ((extra, "has unknown keys"), (missing, "lacks keys")):
            if names:
                raise UserError(
                    f"Package {package}: the file {file} {fault}: {', '.join(sorted(names))}. The keys must be the"
                    f" arguments of the constructor of method {name}: {', '.join(sorted(arguments)) or 'none'}."
                )


def _default_selection(selects: Mapping[str, Any]) -> str | None:
    """Return the default selection, or None if no default is set. The values null and ``keep`` are ignored."""
    wanted: dict[str, str] = {}
    for recipe, select in selects.items():
        if select in (None, "keep"):
            continue
        wanted[recipe] = _selection_named(f"method.{recipe}.select", select)
    if len(set(wanted.values())) > 1:
        each = ", ".join(f"method.{recipe}.select={selects[recipe]}" for recipe in wanted)
        raise UserError(
            f"method: {each} select different parameters. Add a selection method to the list,"
            f" e.g. 'method=[{','.join([*selects, 'last_stage'])}]', or use the same value for these settings."
        )
    return next(iter(wanted.values()), None)


def _selection_named(setting: str, select: Any, others: Sequence[str] = ("all", "keep")) -> str:
    """Return the name of the selection method for the value `select`. The error message also lists `others`."""
    # A selection method with a required setting (for example, `blocks`) cannot be specified by its name alone.
    names = sorted(
        name
        for name, method in METHODS.items()
        if method.axis == Axis.SELECTION and all(p.default is not p.empty for p in _arguments(method).values())
    )
    name = "full" if select == "all" else select
    if name not in names:
        allowed = [*others, *(n for n in names if n != "full" or "keep" not in others)]
        hint = "Selection methods with required settings, such as blocks, cannot be named here."
        if "keep" in others:
            hint = "Add a selection method with required settings, such as blocks, to the list: 'method=[...]'."
        raise SettingError(setting, select, allowed, hint)
    return name


def _arguments(method: type) -> dict[str, inspect.Parameter]:
    return dict(inspect.signature(method).parameters)


def _build(method: type, name: str, settings: dict[str, Any]) -> Method:
    """Create a method after validating its settings against the argument names and types of its constructor."""
    hints = typing.get_type_hints(method.__init__, include_extras=True)  # type: ignore[misc]
    fields: dict[str, Any] = {
        argument: (hints.get(argument, Any), ... if p.default is p.empty else p.default)
        for argument, p in _arguments(method).items()
    }
    schema = create_model(name, __config__=ConfigDict(**Section.model_config, arbitrary_types_allowed=True), **fields)
    checked = validate(schema, settings, f"method.{name}")
    try:
        made = method(**{argument: getattr(checked, argument) for argument in settings})
    except SettingError as error:
        # Errors raised by the constructor contain the name of the setting without its prefix.
        error.setting = f"method.{name}.{error.setting}"
        error.args = (f"method.{name}.{error}",)
        raise
    unstored = [argument for argument in fields if not hasattr(made, argument)]
    if unstored:  # The registry checks only constructors whose settings all have defaults.
        raise UserError(
            f"Package {METHODS.distribution(name)}: the constructor of method {name} does not store the setting"
            f" {unstored[0]} in an attribute of the same name."
        )
    return made
