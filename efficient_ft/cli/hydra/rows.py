"""Rows of a sweep: settings that belong together, from a published table, an experiment or the command line."""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import OverrideParseException

from efficient_ft.core.errors import UserError

#: Settings that name rows; a job of the sweep has the settings of its row instead. An experiment may have others too.
NAMING = ("table", "rows")

#: Ends messages about ``rows``.
EXAMPLE = "Example: rows=['method=full']"

#: Where `zipped` has no value for a row.
NOTHING = "_"


def register() -> None:
    """Make ``hydra/sweeper=rows`` known to Hydra; the class it names is found by Hydra itself."""
    ConfigStore.instance().store(
        group="hydra/sweeper",
        name="rows",
        node={
            "_target_": "hydra_plugins.efficient_ft_sweeper.RowsSweeper",
            "max_batch_size": None,
            "params": None,
        },
        provider="efficient_ft",
    )


def jobs_of_rows(jobs: Iterable[Sequence[str]], table: str | None, rows: Sequence[str] | None) -> list[list[str]]:
    """The arguments of every job of a sweep: each of `jobs` with each of the rows; `jobs` if there are no rows.

    A job's own arguments replace those of a row with the same key.

    Args:
        jobs: arguments, as typed.
        table: name of a published table, whose accuracies each have a row.
        rows: texts of settings.

    Raises:
        UserError: there is no such table, or nothing of it can be run; or rows of two kinds.
    """
    if table is not None and rows:
        raise UserError(
            f"table={table}: an experiment or rows=[...] has rows of its own. Choose one of the two. Some rows of a"
            f" table: efficient-ft table {table} --run --rows ROW,..."
        )
    settings = _of_table(table) if table is not None else [(_words(row), ()) for row in rows or ()]
    for word in (word for row, _ in settings for word in row if "=" not in word):
        raise UserError(f"rows: every row is a text of KEY=VALUE settings, got {word}. {EXAMPLE}")
    for row, _ in settings if table is None else ():
        refuse_doubled(row)
    own = [[one for one in job if key_of(one) not in NAMING] for job in jobs]
    if not settings:
        return own
    # An experiment may have settings of all its runs too; its rows are not those of one run.
    own = [[*job, "rows=null"] if any(key_of(one) == "experiment" for one in job) else job for job in own]
    return [
        list(merged(*row, *of_tasks(job, tasks)))
        for row, tasks in dict.fromkeys(settings)
        for job in own
    ]  # fmt: skip


def _words(row: object) -> tuple[str, ...]:
    """The settings in the text of a row."""
    if not isinstance(row, str):
        raise UserError(f"rows: every row is a text of KEY=VALUE settings, got {row}. {EXAMPLE}")
    try:
        return tuple(shlex.split(row))
    except ValueError as error:  # a quotation mark that is not closed
        raise UserError(f"rows: {row} cannot be read: {error}. {EXAMPLE}") from error


def key_of(argument: str) -> str:
    """The key of an argument of the command line, without the sign that adds it."""
    return argument.partition("=")[0].lstrip("+")


def merged(*arguments: str) -> tuple[str, ...]:
    """The arguments of a run; of several with the same key the last one counts: `refuse_doubled` comes before."""
    return tuple({key_of(one): one for one in arguments}.values())


def refuse_doubled(arguments: Iterable[str]) -> None:
    """Refuse a setting that a user gives more than once; Hydra would use the last value.

    The option of a group and its settings are different settings (``method=lora method.lora.rank=4``), and a mapping
    stands for the settings in it. A deleted setting may be added again: ``~model.kwargs +model.kwargs={a: 1}``.

    Args:
        arguments: typed by the user, sweeps included.

    Raises:
        UserError: for the first such setting, with both values.
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
    """The full names of the settings that an argument gives."""
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
    """The arguments for a run on `tasks`: settings of ``data`` become those of every task."""
    found: list[str] = []
    for argument in arguments:
        key, dot, rest = argument.partition(".")
        found += [f"tasks.{task}.{rest}" for task in tasks] if tasks and key + dot == "data." else [argument]
    return found


def _of_table(name: str) -> list[tuple[tuple[str, ...], tuple[str, ...]]]:
    """The arguments of every run of a table, and the data sets of a run on several."""
    from efficient_ft.papers.published import published_table

    table = published_table(name)
    found = [(arguments, row.tasks) for row in table.rows for _, arguments in row.runs]
    if not found:
        raise UserError(f"table={name} has no accuracies that can be run. {table.reason or ''}".rstrip())
    return found


def zipped(arguments: Sequence[str]) -> list[str]:
    """Replace paired values, ``KEY=zip(A,B,...)``, by the rows that they stand for.

    The n-th values of all pairs belong to one row; `NOTHING` leaves the setting out of it:
    ``method=zip(full,lbp_wht) method.lbp_wht.order=zip(_,4)`` are the rows ``method=full`` and
    ``method=lbp_wht method.lbp_wht.order=4``.

    Args:
        arguments: of the command line.

    Raises:
        UserError: the pairs have different numbers of values, or an argument is not closed.
    """
    pairs: dict[str, list[str]] = {}
    others = []
    for argument in arguments:
        key, _, value = argument.partition("=")
        if not value.startswith("zip("):
            others.append(argument)
            continue
        if not value.endswith(")"):
            raise UserError(f"{argument}: paired values are written KEY=zip(A,B,...).")
        if key in pairs:
            raise UserError(f"{key}=zip(...): it is there twice.")
        pairs[key] = _values(value.removeprefix("zip(").removesuffix(")"))
    if not pairs:
        return others
    for key, values in pairs.items():
        if not all(values):
            raise UserError(f"{key}=zip(...): a value is empty. {NOTHING} leaves the setting out of a row.")
    if named := next((one for one in others if key_of(one) in (*NAMING, "experiment")), None):
        raise UserError(
            f"{named}: it has rows of its own, and so has {next(iter(pairs))}=zip(...). Choose one of the two."
        )
    if twice := next((one for one in others if key_of(one) in {key.lstrip("+") for key in pairs}), None):
        raise UserError(f"{twice}: {key_of(twice)}=zip(...) gives every row its own value. Choose one of the two.")
    counts = {key: len(values) for key, values in pairs.items()}
    if len(set(counts.values())) > 1:
        each = ", ".join(f"{key} has {count}" for key, count in counts.items())
        raise UserError(f"zip(...): all paired settings need the same number of values; {each}.")
    rows = [
        " ".join(shlex.quote(f"{key}={value}") for key, value in zip(pairs, row, strict=True) if value != NOTHING)
        for row in zip(*pairs.values(), strict=True)
    ]
    quoted = ",".join("'" + row.replace("\\", "\\\\").replace("'", "\\'") + "'" for row in rows)
    return [*others, f"rows=[{quoted}]"]


def _values(text: str) -> list[str]:
    """Split at the commas that are not inside brackets or quotes."""
    parts, depth, quote = [""], 0, ""
    for sign in text:
        if quote:
            quote = "" if sign == quote else quote
        elif sign in "'\"":
            quote = sign
        elif sign == "," and depth == 0:
            parts.append("")
            continue
        else:
            depth += (sign in "[{(") - (sign in "]})")
        parts[-1] += sign
    return [part.strip() for part in parts]
