"""Combine and check lists of command-line arguments. In an experiment, each row contains the settings of a run."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Sequence

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from efficient_ft.config.schema import flatten
from efficient_ft.core.errors import UserError

#: Last sentence of messages about rows.
_EXAMPLE = "Example: rows: ['method=full', 'method=lora method.lora.rank=4']"


def jobs_of_rows(jobs: Iterable[Sequence[str]], rows: Sequence[str] | None) -> list[list[str]]:
    """Return the arguments of each combination of a job and a row. The arguments of the job take precedence."""
    if not rows:
        return [list(job) for job in jobs]
    settings = dict.fromkeys(_words(row) for row in rows)
    # Each job keeps the experiment option, which may contain settings for all runs. rows=null removes the rows.
    return [list(merged(*row, *job, "rows=null")) for row in settings for job in jobs]


def _words(row: object) -> tuple[str, ...]:
    try:
        words = tuple(shlex.split(row)) if isinstance(row, str) else None
    except ValueError as error:  # A quotation mark is not closed.
        raise UserError(f"rows: the row {row} cannot be parsed: {error}. {_EXAMPLE}") from error
    if words is None or any("=" not in word for word in words):
        raise UserError(f"rows: every row must be a string of KEY=VALUE settings, got {row}. {_EXAMPLE}")
    refuse_doubled(words)
    return words


def key_of(argument: str) -> str:
    """Return the key of a command-line argument without leading plus signs."""
    return argument.partition("=")[0].lstrip("+")


def merged(*arguments: str) -> tuple[str, ...]:
    """Return the arguments of a run. If a key occurs several times, the last value is used."""
    return tuple({key_of(one): one for one in arguments}.values())


def check_settings(words: Sequence[str]) -> None:
    """Raise a `UserError` for settings that do not have the form KEY=VALUE, or that are given more than once."""
    for word in words:
        if not word.partition("=")[1] or word.startswith("="):
            raise UserError(f"{word}: settings must have the form KEY=VALUE. Options start with --. See --help.")
    refuse_doubled(words)


def refuse_doubled(arguments: Iterable[str]) -> None:
    """Raise a `UserError` if a setting is given more than once. Without this check, Hydra would use the last value.

    The option of a group and a setting inside the group are different settings (``method=lora method.lora.rank=4``). A
    deleted setting may be added again: ``~model.kwargs +model.kwargs={a: 1}``.
    """
    parser = OverridesParser.create()
    given: dict[str, str] = {}
    for text in arguments:
        try:
            (override,) = parser.parse_overrides([text])
        except OverrideParseException:  # Hydra reports the error during composition.
            continue
        key = override.key_or_group + (f"@{override.package}" if override.package else "")
        for setting in flatten(None if override.is_sweep_override() else override.value(), key):
            first = given.setdefault(setting, text)
            if first is text or (first.startswith("~") and text.startswith("+")):
                given[setting] = text
                continue
            both = f"{first} twice" if first == text else f"{first} and {text}"
            raise UserError(f"{setting} must be given once, got {both}. {_instead(setting, first, text)}")


def _instead(setting: str, *arguments: str) -> str:
    values = [one.partition("=")[2] for one in arguments]
    swept = setting.partition(".")[0] in ("model", "data", "method", "optim", "trainer", "seed")
    if not swept or len(set(values)) == 1 or any(key_of(one) != setting for one in arguments):
        return "Remove one of the arguments."
    if setting == "method":
        names = ",".join(value.strip("[]") for value in values)
        return f"Remove one of the arguments, or apply both methods: 'method=[{names}]'."
    several = shlex.quote(f"{arguments[0].partition('=')[0]}={','.join(values)}")
    return f"Remove one of the arguments, or sweep over both values: -m {several}."


def of_tasks(arguments: Iterable[str], tasks: Sequence[str]) -> list[str]:
    """Convert arguments for a run on `tasks`. Each setting of ``data`` becomes a setting of every task."""
    found: list[str] = []
    for argument in arguments:
        key, dot, rest = argument.partition(".")
        found += [f"tasks.{task}.{rest}" for task in tasks] if tasks and key + dot == "data." else [argument]
    return found
