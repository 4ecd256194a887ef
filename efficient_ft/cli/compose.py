"""From command-line arguments to checked configurations, and every mistake on that way in one clear message.

Hydra composes; what it refuses, and what it accepts in silence, is explained here: unknown options, unknown keys
(with ``+`` and ``++`` too), values of another type, methods that share a name. Loads no torch.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra import compose, version
from hydra._internal.hydra import Hydra
from hydra._internal.utils import create_config_search_path
from hydra.core.config_loader import ConfigLoader
from hydra.core.config_search_path import SearchPathQuery
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from hydra.errors import HydraException, OverrideParseException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.config import Config, UnknownSetting, check, setting_names
from efficient_ft.config.plain import plain, sentence
from efficient_ft.config.stored import stored_config
from efficient_ft.core.errors import SettingError, UserError


@dataclass(frozen=True)
class ComposedJob:
    """One job of a command line: its arguments and the configuration that they give."""

    arguments: tuple[str, ...]
    config: Config


def composed_jobs(
    conf: Path, name: str, overrides: Sequence[str], *, sweep: bool, search: str | None = None
) -> list[ComposedJob]:
    """The checked configuration of each job that a command line asks for: one, or those of a sweep.

    The configuration of a job with ``evaluate=RUN`` is that of RUN, changed by the other arguments.

    Args:
        conf: the folder of the configuration groups.
        name: the primary configuration in it.
        overrides: the arguments, as typed.
        sweep: comma-separated values are swept over.
        search: one more folder of configurations, looked into first.

    Raises:
        UserError: the first mistake.
    """
    version.setbase("1.3")
    path = create_config_search_path(str(conf.resolve()))
    if search is not None:
        if not Path(search).is_dir():
            raise UserError(f"--config-dir {search}: no such folder.")
        first = SearchPathQuery(provider="schema")
        path.prepend("command-line", f"file://{Path(search).resolve()}", first)
    # As hydra.main does; the public initialize_config_dir knows no second folder.
    loader = Hydra.create_main_hydra2(name, path).config_loader
    try:
        return [
            ComposedJob(tuple(job), _evaluation(loader, name, job) or _configuration(loader, name, job))
            for job in _jobs(loader, overrides, sweep)
        ]
    finally:
        GlobalHydra.instance().clear()


def configurations(
    conf: Path, name: str, overrides: Sequence[str], *, sweep: bool, search: str | None = None
) -> list[Config]:
    """The configurations of `composed_jobs`."""
    return [job.config for job in composed_jobs(conf, name, overrides, sweep=sweep, search=search)]


def _jobs(loader: ConfigLoader, overrides: Sequence[str], sweep: bool) -> list[list[str]]:
    """The arguments of each job; a sweep is the product of its comma-separated values."""
    parser = OverridesParser.create(config_loader=loader)
    choices: dict[str, list[str]] = {}
    for text in overrides:
        try:
            (override,) = parser.parse_overrides([text])
        except OverrideParseException:
            raise _unreadable(text) from None
        if not override.is_sweep_override():
            choices[text] = [text]
            continue
        values = text.partition("=")[2]
        if not sweep:
            raise UserError(
                f"{text}: several values. To run each of them add -m; to give a list write"
                f" '{override.key_or_group}=[{values}]'; to give a text with commas quote it:"
                f" \"{override.key_or_group}='{values}'\"."
            )
        # Ranges of other sweepers' kinds have no list; their jobs are checked when they start.
        if override.is_discrete_sweep():
            key = override.get_key_element()
            choices[text] = [f"{key}={value}" for value in override.sweep_string_iterator()]
    return [list(job) for job in itertools.product(*choices.values())]


def _unreadable(text: str) -> UserError:
    key, equals, value = text.partition("=")
    if not equals or not value:
        return UserError(f"{text}: arguments have the form KEY=VALUE; see --help.")
    inner = value.strip("'\"").replace('"', '\\"')
    quoted = shlex.quote(f'{key}="{inner}"')
    return UserError(f"{text}: the value has special characters; quote it: {quoted}")


def _configuration(loader: ConfigLoader, name: str, job: list[str]) -> Config:
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(job)
    for override in parsed:
        _check_option(loader, override)
    try:
        composed = compose(name, job)
    except (HydraException, OmegaConfBaseException) as error:
        raise _explained(loader, name, parsed, error) from None
    _check_packages(name, parsed, composed)
    try:
        config = check(plain(composed))
    except UnknownSetting as error:
        raise _unknown(loader, error.setting, error.value, error.known) from None
    if config.evaluate is not None:
        raise UserError(f"evaluate={config.evaluate} must be given on the command line, not in a configuration file.")
    if config.tasks:
        _refuse_data(parsed, config)
    return config


def _evaluation(loader: ConfigLoader, name: str, job: list[str]) -> Config | None:
    """The configuration of a job with ``evaluate=RUN``: that of RUN, changed by the arguments given now; else None.

    Composition has no part in what RUN holds: Hydra's own keys, interpolations and targets in it mean nothing.
    """
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(job)
    runs = [override.value() for override in parsed if override.key_or_group == "evaluate"]
    if not runs or runs[-1] is None:
        return None
    run = Path(str(runs[-1]))
    if not (run / "model.safetensors").is_file():
        what = "it holds no model.safetensors: no epoch has been finished there" if run.is_dir() else "no such folder"
        raise UserError(f"evaluate={run}: {what}. Pass the run folder printed when training ended.")
    config = stored_config(run)
    settings = config.model_dump(mode="json")
    groups = [override for override in parsed if loader.get_group_options(override.key_or_group)]
    for override in groups:
        _check_option(loader, override)
        group = override.key_or_group
        if group not in Config.model_fields or override.package not in (None, group) or override.is_delete():
            raise UserError(
                f"{override.input_line}: evaluate=RUN takes the settings of RUN; only a whole section"
                " (data=NAME) or single settings (data.root=DIR) can be changed."
            )
    if groups:
        composed = plain(compose(name, [str(override.input_line) for override in groups]))
        settings.update({override.key_or_group: composed[override.key_or_group] for override in groups})
    for override in parsed:
        if override not in groups:
            _change(loader, settings, override)
    settings["evaluate"] = str(run)
    try:
        config = check(settings)
    except UnknownSetting as error:
        raise _unknown(loader, error.setting, error.value, error.known) from None
    if config.tasks:
        _refuse_data(parsed, config)
    return config


def _change(loader: ConfigLoader, settings: dict[str, Any], override: Override) -> None:
    """Apply one ``KEY=VALUE``, ``+KEY=VALUE`` or ``~KEY`` to plain `settings`; only its own value is interpolated."""
    line, full = str(override.input_line), override.key_or_group
    if full.partition(".")[0] == "hydra" or full.startswith("hydra/"):
        raise UserError(f"{line}: evaluate=RUN makes no folder and needs nothing of Hydra; leave it out.")
    value = plain(OmegaConf.create({"value": override.value()}))["value"]
    addable = override.is_add() or override.is_force_add() or full in setting_names()
    *groups, key = parts = full.split(".")
    node = settings
    for depth, part in enumerate(parts):
        within = depth < len(groups)
        if part not in node and not addable:
            raise _unknown(loader, ".".join(parts[: depth + 1]), value, node)
        if within and not isinstance(node.get(part, {}), dict):
            raise _unknown(loader, ".".join(parts[: depth + 2]), value, ())
        if within:
            node = node.setdefault(part, {})
    if override.is_delete():
        node.pop(key, None)
    else:
        node[key] = value


def _refuse_data(parsed: Sequence[Override], config: Config) -> None:
    """Refuse settings of the one data set, which several tasks do not use."""
    for override in parsed:
        of_one = override.key_or_group == "data" and override.package in (None, "data")
        if of_one or override.key_or_group.startswith("data."):
            names = ", ".join(config.tasks)
            first = next(iter(config.tasks))
            raise UserError(
                f"{override.input_line}: the data sets of this run are those of tasks ({names}); set"
                f" tasks.{first}.batch_size=VALUE and the like, or train on one with tasks=none."
            )


def _check_option(loader: ConfigLoader, override: Override) -> None:
    """Refuse an option that its group does not have; Hydra would pass over one of an optional group in silence."""
    group, value = override.key_or_group, override.value()
    options = loader.get_group_options(group) if not group.startswith("hydra") else []
    if not options or isinstance(value, dict):
        return
    if override.is_delete():
        if group in Config.model_fields:
            raise UserError(f"~{group}: a run needs one; choose another option: {', '.join(options)}.")
        return
    several = value if isinstance(value, list) and group == "method" else [value]
    for option in several:
        if option not in options:
            raise SettingError(group, "null" if option is None else option, options)


def _check_packages(name: str, parsed: Sequence[Override], composed: DictConfig) -> None:
    """Refuse two options of `method` that fill one package: Hydra would merge them, the last one winning."""
    chosen: list[str] = []
    for override in parsed:
        value = override.value()
        if override.key_or_group == "method" and isinstance(value, list):
            chosen = [str(option) for option in value]
    if len(chosen) <= len(composed.method):
        return
    owner: dict[str, str] = {}
    for option in chosen:
        package = str(next(iter(compose(name, [f"method=[{option}]"]).method)))
        if package in owner:
            same = "" if owner[package] == option else f" and {option} are variants of {package}"
            raise UserError(f"method=[{','.join(chosen)}]: {owner[package]}{same or ' is named twice'}; name one.")
        owner[package] = option


def _explained(loader: ConfigLoader, name: str, parsed: Sequence[Override], error: Exception) -> UserError:
    """What Hydra's refusal means, found by composing again without the settings: which key is not there?"""
    choices = [o for o in parsed if loader.get_group_options(o.key_or_group) or o.key_or_group.startswith("hydra")]
    lines = [str(o.input_line) for o in choices]
    try:
        known = compose(name, lines)
    except (HydraException, OmegaConfBaseException) as second:
        return UserError(sentence(second))
    for override in parsed:
        if override in choices:
            continue
        key, line = override.key_or_group, str(override.input_line)
        present, missing = _walk(known, key)
        if missing is None:
            if override.is_add() and not isinstance(override.value(), dict | list):
                return UserError(f"{line}: {key} is there already; leave out the +.")
            continue
        if override.is_add() or override.is_force_add():
            continue
        here = OmegaConf.select(known, present) if present else known
        siblings = [str(k) for k in here] if OmegaConf.is_dict(here) else []
        methods = loader.get_group_options("method")
        if present == "method" and missing in methods:
            return UserError(
                f"{line}: method {missing} is not chosen (chosen: {', '.join(siblings)}). Choose it,"
                f" method={missing}, or both, 'method=[{','.join([*siblings, missing])}]'."
            )
        if present == "method":
            return SettingError("method", missing, methods, f"(in {line})")
        if present == "model.kwargs":
            return UserError(f"{line}: a new argument for timm.create_model is added with a plus: +{line}")
        if key in setting_names():
            # Known to the schema, absent from the chosen option: the check says why it has no place here.
            try:
                check(plain(compose(name, [*lines, f"+{line}"])))
            except UserError as reason:
                return reason
            return UserError(f"{line}: the chosen options do not have it; add it with a plus: +{line}")
        return _unknown(loader, f"{present}.{missing}".lstrip("."), override.value(), siblings)
    return UserError(sentence(error))


def _unknown(loader: ConfigLoader, setting: str, value: object, beside: Iterable[str]) -> UnknownSetting:
    """A key that nothing reads; at the top, a misspelt group is as likely as a misspelt setting."""
    groups = [] if "." in setting else [group for group in loader.list_groups("") if group != "hydra"]
    return UnknownSetting(setting, value, {*beside, *groups}, setting_names())


def _walk(config: DictConfig, key: str) -> tuple[str, str | None]:
    """The longest part of the dotted `key` that exists, and the first name after it that does not (or None)."""
    node: Any = config
    present: list[str] = []
    for part in key.split("."):
        if not OmegaConf.is_dict(node) or part not in node:
            return ".".join(present), part
        present.append(part)
        node = node._get_node(part)
    return key, None
