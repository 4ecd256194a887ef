"""Rows of a sweep (the settings of an experiment's runs), and lists of arguments."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from efficient_ft.core.errors import UserError

#: Ends messages about rows.
_EXAMPLE = "Example: rows: ['method=full', 'method=lora method.lora.rank=4']"


def jobs_of_rows(jobs: Iterable[Sequence[str]], rows: Sequence[str] | None) -> list[list[str]]:
    """Return the arguments of each job of a sweep: each of `jobs` with each row; a job's own arguments win."""
    if not rows:
        return [list(job) for job in jobs]
    settings = dict.fromkeys(_words(row) for row in rows)
    # An experiment may contain settings of all its runs too; its rows do not apply to a single run.
    return [list(merged(*row, *job, "rows=null")) for row in settings for job in jobs]


def _words(row: object) -> tuple[str, ...]:
    """Return the settings in the text of a row."""
    try:
        words = tuple(shlex.split(row)) if isinstance(row, str) else None
    except ValueError as error:  # a quotation mark that is not closed
        raise UserError(f"rows: {row} cannot be read: {error}. {_EXAMPLE}") from error
    if words is None or any("=" not in word for word in words):
        raise UserError(f"rows: every row must be a string of KEY=VALUE settings, got {row}. {_EXAMPLE}")
    refuse_doubled(words)
    return words


def key_of(argument: str) -> str:
    """Return the key of an argument of the command line, without the sign that adds it."""
    return argument.partition("=")[0].lstrip("+")


def merged(*arguments: str) -> tuple[str, ...]:
    """Return the arguments of a run. If a key occurs several times, its last argument is used."""
    return tuple({key_of(one): one for one in arguments}.values())


def check_settings(words: Sequence[str]) -> None:
    """Refuse settings of a command that are not KEY=VALUE, or that are given more than once."""
    for word in words:
        if not word.partition("=")[1] or word.startswith("="):
            raise UserError(f"{word}: settings have the form KEY=VALUE. Options begin with --, see --help.")
    refuse_doubled(words)


def refuse_doubled(arguments: Iterable[str]) -> None:
    """Refuse a setting that a user gives more than once; Hydra would use the last value.

    The option of a group and its settings are different settings (``method=lora method.lora.rank=4``). A deleted
    setting may be added again: ``~model.kwargs +model.kwargs={a: 1}``.
    """
    parser = OverridesParser.create()
    given: dict[str, str] = {}
    for text in arguments:
        try:
            (override,) = parser.parse_overrides([text])
        except OverrideParseException:  # composing reports it
            continue
        key = override.key_or_group + (f"@{override.package}" if override.package else "")
        for setting in _leaves(key, None if override.is_sweep_override() else override.value()):
            first = given.setdefault(setting, text)
            if first is text or (first.startswith("~") and text.startswith("+")):
                given[setting] = text
                continue
            both = f"{first} twice" if first == text else f"{first} and {text}"
            raise UserError(f"{setting} must be given once, got {both}. {_instead(setting, first, text)}")


def _leaves(key: str, value: Any) -> Iterator[str]:
    """Yield the full names of the settings that an argument gives."""
    if isinstance(value, dict) and value:
        for name, inner in value.items():
            yield from _leaves(f"{key}.{name}", inner)
    else:
        yield key


def _instead(setting: str, *arguments: str) -> str:
    """Return advice on two arguments for one setting."""
    values = [one.partition("=")[2] for one in arguments]
    swept = setting.partition(".")[0] in ("model", "data", "method", "optim", "trainer", "seed")
    if not swept or len(set(values)) == 1 or any(key_of(one) != setting for one in arguments):
        return "Leave one of them out."
    if setting == "method":
        names = ",".join(value.strip("[]") for value in values)
        return f"Leave one of them out, or apply both: 'method=[{names}]'."
    several = shlex.quote(f"{arguments[0].partition('=')[0]}={','.join(values)}")
    return f"Leave one of them out. A sweep over both is -m {several}."


def of_tasks(arguments: Iterable[str], tasks: Sequence[str]) -> list[str]:
    """Return the arguments for a run on `tasks`: settings of ``data`` become those of every task."""
    found: list[str] = []
    for argument in arguments:
        key, dot, rest = argument.partition(".")
        found += [f"tasks.{task}.{rest}" for task in tasks] if tasks and key + dot == "data." else [argument]
    return found
