"""Check Hydra's flags and settings on the command line: ``hydra.KEY=VALUE`` and ``hydra/GROUP=OPTION``."""

from __future__ import annotations

import os
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.object_type import ObjectType
from hydra.core.override_parser.types import Override
from omegaconf import BooleanNode, DictConfig, EnumNode, FloatNode, IntegerNode, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.cli.hydra.mistakes import group_options, walk
from efficient_ft.config import UnknownSetting
from efficient_ft.config.explain import show
from efficient_ft.core.errors import SettingError, UserError, first_line

#: Allowed classes in a Hydra configuration: plugins, which Hydra discovers, and log handlers.
_PLUGINS = ("hydra_plugins.", "hydra._internal.core_plugins.")
_LOG_CLASSES = (
    "efficient_ft.core.terminal.ConsoleHandler", "logging.StreamHandler", "logging.FileHandler", "logging.NullHandler",
    "logging.Formatter", "colorlog.ColoredFormatter",
)  # fmt: skip
_LOG_STREAMS = ("ext://sys.stdout", "ext://sys.stderr")
_NO_CODE = "A configuration must not execute arbitrary code. Remove this setting."

_FOLDERS = ("hydra.run.dir=", "hydra.sweep.dir=", "hydra.sweep.subdir=")

_SHELLS = ("bash", "fish", "zsh")
_DOES = ("install", "uninstall", "query")


def check_flags(arguments: Any) -> None:
    """Raise a `UserError` for flags that cause a traceback in Hydra, and for the flag that executes a file."""
    if arguments.experimental_rerun is not None:
        raise UserError(
            "--experimental-rerun is not supported, because the flag executes code. Repeat the command of the run"
            " to resume an interrupted run."
        )
    if arguments.multirun and arguments.cfg:
        raise UserError("--cfg prints the configuration of one run. Remove -m and the comma-separated values.")
    flags = ("run", "multirun", "cfg", "info", "shell_completion")
    given = [f"--{flag.replace('_', '-')}" for flag in flags if getattr(arguments, flag)]
    if len(given) > 1:
        raise UserError(f"The flags {' and '.join(given)} cannot be combined. Use only one flag.")
    for flag, value in (("--resolve", arguments.resolve), ("--package", arguments.package)):
        if value and not (arguments.cfg or arguments.help):
            raise UserError(f"{flag} requires --cfg job. Add --cfg job, or remove {flag}.")
    if arguments.cfg == "hydra" and arguments.resolve:
        raise UserError("--cfg hydra cannot be resolved, because it depends on a run. Use --cfg all --resolve.")
    if not arguments.shell_completion:
        return
    words = arguments.overrides
    does, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if does not in _DOES or shell not in _SHELLS:
        forms = " or ".join(f"install={shell}" for shell in _SHELLS)
        raise UserError(
            f'--shell-completion requires {forms}. Example: eval "$(efficient-ft --shell-completion install=bash)"'
        )
    if does == "query" and "COMP_LINE" not in os.environ:
        raise UserError(f"--shell-completion {words[0]} is only for the shell. Use --shell-completion install={shell}")


def check_hydra(loader: ConfigLoader, name: str, parsed: Sequence[Override]) -> None:
    """Raise a `UserError` for Hydra settings that Hydra ignores, or rejects with a less helpful message."""
    own = [one for one in parsed if one.key_or_group.partition(".")[0].partition("/")[0] == "hydra"]
    groups = [one for one in own if "/" in one.key_or_group]
    known_groups = [f"hydra/{one}" for one in loader.list_groups("hydra")] if groups else []
    for one in groups:
        group = one.key_or_group
        if group not in known_groups:
            raise SettingError("A Hydra group", group, known_groups)
        options = sorted(loader.get_group_options(group, ObjectType.CONFIG)) or group_options(loader, group)
        if one.is_delete() or one.is_add() or one.package is not None:
            raise UserError(f"{one.input_line}: use the form {group}=OPTION (OPTION: {', '.join(options)}).")
        if one.value() not in options:
            raise SettingError(group, show(one.value()), options)
    settings = [one for one in own if one not in groups]
    if all(one.key_or_group == "hydra.run.dir" and isinstance(one.value(), str) for one in settings):
        return  # Each job of a sweep has this setting, which `check_output_folder` has checked.
    known = compose(name, [str(one.input_line) for one in groups], return_hydra_config=True)
    for one in settings:
        if one.package is not None or one.is_delete():
            raise UserError(f"{one.input_line}: a Hydra setting must have the form hydra.KEY=VALUE.")
        _check_setting(known, one.key_or_group, one.value(), new=one.is_add() or one.is_force_add())


@contextmanager
def hydra_faults(overrides: Sequence[str], job: str) -> Iterator[None]:
    """Convert an error that Hydra raises outside of the function `job` to a message that names the Hydra settings."""
    own = [one for one in overrides if one.lstrip("+~").startswith("hydra") and not one.startswith(_FOLDERS)]
    try:
        yield
    except (UserError, OSError):
        raise
    except Exception as error:
        if not own or any(frame.name == job for frame in traceback.extract_tb(error.__traceback__)):
            raise
        raise UserError(
            f"{' '.join(own)}: Hydra cannot use this setting: {first_line(error)}. Remove the setting."
        ) from error


def check_targets(hydra: DictConfig) -> None:
    """Raise a `UserError` if a Hydra configuration names code other than Hydra plugins and log handlers."""
    if hydra.get("callbacks"):
        raise UserError(f"hydra.callbacks: callbacks are not supported. {_NO_CODE}")
    for key, value in _leaves(OmegaConf.to_container(hydra, resolve=False), "hydra"):
        last = key.rpartition(".")[2]
        if last == "_target_" and not str(value).startswith(_PLUGINS):
            raise SettingError(key, value, f"a class of {' or '.join(_PLUGINS)}", _NO_CODE)
        if not key.startswith(("hydra.job_logging.", "hydra.hydra_logging.")):
            continue
        if last in ("class", "()") and value not in _LOG_CLASSES:
            raise SettingError(key, value, _LOG_CLASSES, _NO_CODE)
        if isinstance(value, str) and value.partition("://")[0] in ("ext", "cfg") and value not in _LOG_STREAMS:
            raise SettingError(key, value, _LOG_STREAMS, _NO_CODE)


def _leaves(value: Any, key: str) -> Iterator[tuple[str, Any]]:
    if isinstance(value, dict | list):
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _leaves(inner, f"{key}.{name}")
    else:
        yield key, value


def _check_setting(known: DictConfig, key: str, value: Any, new: bool) -> None:
    """Raise a `UserError` for a setting that does not exist in Hydra, or for a value of the wrong type.

    Mappings are checked recursively.
    """
    present, missing = walk(known, key)
    node: Any = known
    for part in present.split("."):
        node = node._get_node(part)
    if missing is not None:
        if new:
            return
        if OmegaConf.is_dict(node) and OmegaConf.get_type(node) is dict and not node.keys():
            raise UserError(f"{key}={show(value)}: a new name requires a plus sign. Use +{key}={show(value)}")
        names = [str(one) for one in node] if OmegaConf.is_dict(node) else []
        raise UnknownSetting(f"{present}.{missing}", value, names)
    if isinstance(node, DictConfig) and isinstance(value, dict) and value:
        for name, inner in value.items():
            _check_setting(known, f"{key}.{name}", inner, new)
        return
    wrong = (isinstance(node, DictConfig) and not isinstance(value, dict)) or (
        isinstance(node, ListConfig) and not isinstance(value, list) and value is not None
    )
    try:
        if not wrong:
            OmegaConf.update(known, key, value)
    except (OmegaConfBaseException, ValueError):
        wrong = True
    if wrong:
        given = "an empty string" if value == "" else show(value)
        raise SettingError(key, given, _constraint(node), "Correct or remove this setting.")
    for folder in value if key == "hydra.searchpath" else ():
        path = str(folder).removeprefix("file://")
        if "://" not in path and not Path(path).is_dir():
            raise SettingError(key, folder, "a list of existing folders, each as a path or as file://DIR")


def _constraint(node: Any) -> str:
    """Return the type of a Hydra setting as a phrase that follows "must be"."""
    match node:
        case DictConfig():
            return "a mapping, {NAME: VALUE}"
        case ListConfig():
            return "a list, [VALUE,VALUE]"
        case BooleanNode():
            return "true or false"
        case EnumNode():
            return f"one of {', '.join(node.enum_type.__members__)}"
        case IntegerNode() | FloatNode():
            return "a number"
    return "a string"
