"""Compose and check the configurations of a command line, for one run or a sweep. This module does not import torch."""

from __future__ import annotations

import itertools
import json
import shlex
from collections.abc import Sequence
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
from hydra.errors import HydraException, OverrideParseException
from omegaconf import OmegaConf, open_dict
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.cli.commands import COMMANDS
from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.cli.hydra.evaluate import evaluation
from efficient_ft.cli.hydra.mistakes import check_option, check_packages, explained, known_here, refuse_data
from efficient_ft.cli.hydra.output_folder import check_output_folder, hydra_files
from efficient_ft.cli.hydra.rows import jobs_of_rows, key_of, refuse_doubled
from efficient_ft.cli.hydra.settings import check_hydra, check_targets
from efficient_ft.cli.hydra.sources import faults_of_files
from efficient_ft.cli.hydra.verbs import VERBS
from efficient_ft.config import Config, UnknownSetting, check, data_configs, refuse_automatic
from efficient_ft.config.explain import refuse_removed
from efficient_ft.config.plain import plain
from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.text import printable


@dataclass(frozen=True)
class ComposedJob:
    """A job of a command line: the arguments, the configuration, and the paths that Hydra writes for the job."""

    arguments: tuple[str, ...]
    config: Config
    written: tuple[Path, ...] = ()


def composed_jobs(
    conf: Path, name: str, overrides: Sequence[str], *, sweep: bool, search: str | None = None
) -> list[ComposedJob]:
    """Return the jobs of a command line (one run or a sweep) with checked configurations.

    Args:
        conf: folder that contains the configuration groups and the primary configuration.
        name: name of the primary configuration.
        overrides: command-line arguments.
        sweep: if True, sweep over comma-separated values in `overrides`.
        search: additional configuration folder that is searched first, or None.
    """
    version.setbase("1.3")
    path = create_config_search_path(str(conf.resolve()))
    if search is not None:
        if not Path(search).is_dir():
            raise UserError(f"--config-dir {search}: the folder does not exist.")
        first = SearchPathQuery(provider="schema")
        path.prepend("command-line", f"file://{Path(search).resolve()}", first)
    # hydra.main also uses this private function. The public initialize_config_dir does not support a second folder.
    loader = Hydra.create_main_hydra2(name, path).config_loader
    own = [folder for folder in (search, None if conf.resolve() == CONF.resolve() else str(conf)) if folder is not None]
    try:
        with faults_of_files(own):
            jobs = _with_rows(loader, name, _jobs(loader, overrides, sweep), sweep)
            return [_composed(loader, name, job, sweep) for job in jobs]
    finally:
        GlobalHydra.instance().clear()


def configurations(
    conf: Path, name: str, overrides: Sequence[str], *, sweep: bool, search: str | None = None
) -> list[Config]:
    """Return the configurations of the jobs from `composed_jobs`."""
    return [job.config for job in composed_jobs(conf, name, overrides, sweep=sweep, search=search)]


def configured(arguments: Sequence[str], *, automatic: bool = False) -> Config:
    """Return the checked configuration of a single run. Reject ``data.batch_size=auto`` unless `automatic` is True."""
    from efficient_ft.cli.hydra.groups import register  # The import loads Hydra's plugins.

    register()
    (config,) = configurations(CONF, "train", arguments, sweep=False)
    if not automatic:
        refuse_automatic(config, "this command")
    return config


def chosen_options(hydra: Any, arguments: Sequence[str]) -> dict[str, Any] | None:
    """Return the settings of the selected options without the other arguments, or None if composition fails."""
    groups = {"method", *(str(group).partition("@")[0] for group in hydra.runtime.choices)}
    parsed = OverridesParser.create().parse_overrides(list(arguments))
    chosen = [one for one in parsed if one.key_or_group in groups and not isinstance(one.value(), dict)]
    try:
        return plain(compose(hydra.job.config_name, [str(one.input_line) for one in chosen]))
    except (HydraException, OmegaConfBaseException, UserError):
        return None


def _jobs(loader: ConfigLoader, overrides: Sequence[str], sweep: bool) -> list[tuple[str, ...]]:
    """Return the arguments of each job. A sweep has a job for each combination of the comma-separated values."""
    check_form(overrides)
    refuse_doubled(overrides)
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
                f"{text}: several values are given. Add -m to run all values. Use '{override.key_or_group}=[{values}]'"
                f" for a list, or \"{override.key_or_group}='{values}'\" for a string that contains commas."
            )
        if not override.is_discrete_sweep():
            raise UserError(f"{text}: intervals are not supported. Pass the values, or range(START,STOP,STEP).")
        key = override.get_key_element()
        choices[text] = [f"{key}={value}" for value in override.sweep_string_iterator()]
        if not choices[text]:
            raise UserError(f"{text}: the pattern does not match any value. Correct the pattern.")
        if key_of(text) == "experiment":
            raise UserError(f"{text}: a sweep can run only one experiment. Repeat the command for each experiment.")
    return list(itertools.product(*choices.values()))


def _with_rows(loader: ConfigLoader, name: str, jobs: list[tuple[str, ...]], sweep: bool) -> list[tuple[str, ...]]:
    """Combine `jobs` with the rows of an experiment, like `RowsSweeper`."""
    naming = [one for one in jobs[0] if key_of(one) == "experiment"] if jobs else []
    if not naming or any(key_of(one) == "rows" for one in jobs[0]):  # rows=null: already combined
        return jobs
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(naming)
    for override in parsed:
        check_option(loader, override)
    try:
        composed = compose(name, naming)
    except (HydraException, OmegaConfBaseException) as error:
        raise explained(loader, name, parsed, error) from None
    rows = composed.get("rows")
    if rows is not None and not OmegaConf.is_list(rows):
        raise SettingError("rows", rows, "a list of strings, each of which contains the settings of a run")
    if not sweep and rows:
        raise UserError(f"{naming[0]}: the experiment defines several runs. Add -m to start all runs.")
    return [tuple(job) for job in jobs_of_rows(jobs, rows)]


def check_form(overrides: Sequence[str]) -> None:
    """Raise a `UserError` for arguments that Hydra cannot parse or that a run cannot record.

    An argument must have the form KEY=VALUE or ~KEY and be valid UTF-8. Removed settings are also rejected.
    """
    for text in overrides:
        refuse_removed(text)
        shown = printable(text)
        if shown != text:
            raise UserError(
                f"{shown}: the argument is not valid UTF-8, so a run cannot record it. Rename the file or folder, or"
                " pass a link with another name."
            )
        if (not text.startswith("~") and not text.partition("=")[1]) or text.startswith("="):
            raise _not_a_setting(text)


def _not_a_setting(text: str) -> UserError:
    return UserError(
        f"{text}: arguments must have the form KEY=VALUE. See --help.{did_you_mean(text, [*VERBS, *COMMANDS])}"
    )


def _unreadable(text: str) -> UserError:
    key, equals, value = text.partition("=")
    if not equals or not value:
        return _not_a_setting(text)
    whole = text.strip("'\"")  # The shell has kept quotes around the argument.
    if whole != text and text[0] in "'\"":
        do = f"the quotes are part of the argument. Remove the quotes: {shlex.quote(whole)}"
        if _is_readable(whole):
            return UserError(f"{text}: {do}")
    key = key.lstrip("'\"")
    inner = value.strip("'\"")
    forms = [f'{key}="{inner}"', f"{key}='{inner}'", f"{key}={json.dumps(inner)}"]
    if value.startswith("=") and _is_readable(f"{key}{value}"):
        return UserError(f"{text}: the argument contains two equals signs. Use {shlex.quote(key + value)}")
    for opening, closing in ("[]", "{}"):
        if value.startswith(opening) and value.count(opening) != value.count(closing):
            return UserError(f"{text}: the brackets {opening}{closing} do not match. Add or remove a bracket.")
    readable = next((form for form in forms if _is_readable(form)), None)
    if readable is None:
        return UserError(f"{text}: the argument cannot be parsed. Use the form KEY=VALUE. See --help.")
    return UserError(f"{text}: the value contains special characters. Quote the value: {shlex.quote(readable)}")


def _is_readable(text: str) -> bool:
    try:
        OverridesParser.create().parse_overrides([text])
    except OverrideParseException:
        return False
    return True


def _composed(loader: ConfigLoader, name: str, job: tuple[str, ...], sweep: bool) -> ComposedJob:
    parsed = OverridesParser.create(config_loader=loader).parse_overrides(list(job))
    check_output_folder(name, parsed)
    check_hydra(loader, name, parsed)
    evaluated = evaluation(loader, name, parsed)
    if evaluated is not None:
        return ComposedJob(job, evaluated)
    for override in parsed:
        check_option(loader, override)
        of_group = bool(loader.get_group_options(override.key_or_group))
        if of_group and override.is_delete() and not isinstance(override.value(), str | None):
            raise UserError(f"{override.input_line}: after ~GROUP, only the name of an option is allowed.")
    try:
        composed = compose(name, list(job), return_hydra_config=True)
    except (HydraException, OmegaConfBaseException, TypeError) as error:  # A key inside a list raises a TypeError.
        raise explained(loader, name, parsed, error) from None
    check_targets(composed.hydra)
    written = hydra_files(composed, sweep)
    with open_dict(composed):
        del composed["hydra"]
    check_packages(name, parsed, composed)
    try:
        config = check(plain(composed))
    except UnknownSetting as error:
        raise known_here(loader, error) from None
    if config.evaluate is not None:
        raise UserError(f"evaluate={config.evaluate} is only allowed on the command line. Remove this setting.")
    refuse_data(parsed, config)
    if any(one.batch_size_selected for one in data_configs(config)):
        do = "A run writes this setting. To let the run select the batch size, set data.batch_size=auto."
        raise SettingError("data.batch_size_selected", "true", "left out", do)
    return ComposedJob(job, config, written)
