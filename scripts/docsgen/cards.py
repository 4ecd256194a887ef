"""Generated parts of the method cards, docs/methods/*.md: titles, summaries, settings and costs."""

from __future__ import annotations

import inspect
import os
import re
import textwrap
import typing
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from docsgen import ROOT, records
from docsgen.columns import COUNTED, MEASURED, cells, counted_rows, headings
from docsgen.markdown import block, table
from docsgen.records import LABELS
from efficient_ft.core.packages import method_of, option_settings
from efficient_ft.methods import METHODS

CARDS, CONF = ROOT / "docs" / "methods", ROOT / "conf"

ORDER = ("selection", "backprop", "memory", "tokens", "patches", "adapters")

#: The meaning of the setting `select`, which is not an argument of a constructor.
SELECT = (
    "part of the network that is trained if no listed method selects parameters: `last_stage`, `all`, the name of a"
    " method that selects parameters, or `keep` (which does not change `requires_grad`)"
)

#: Measurements whose baseline is plain full fine-tuning, and the labels of the measured recipes.
MEASUREMENTS = {"memory": "memory", "memory_process": "memory_process", "tokens": "tokens", "stacked": "tokens",
                "methods": "methods", "memory_gpu": "memory_gpu", "memory_gpu_bf16": "memory_gpu"}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """Card of a method. The first option has the same name as the method."""

    name: str
    options: tuple[str, ...]
    axes: str
    title: str
    summary: str

    @property
    def file(self) -> Path:
        return CARDS / f"{self.name}.md"


@cache
def options_of() -> dict[str, tuple[str, ...]]:
    """Return the options of each method. The first option has the same name as the method."""
    found: dict[str, list[str]] = {}
    for file in sorted((CONF / "method").glob("*.yaml")):
        name = method_of(file)
        assert name is not None, file
        found.setdefault(name, []).append(file.stem)
    return {name: tuple(sorted(options, key=lambda o: (o != name, o))) for name, options in found.items()}


@cache
def all_cards() -> list[Card]:
    """Return all cards, sorted by axis and by name."""
    cards = [card(name) for name in options_of()]
    return sorted(cards, key=lambda c: (ORDER.index(c.axes.split(", ")[0]), "," in c.axes, c.name))


def card(name: str) -> Card:
    """Return the card of a method."""
    file = CARDS / f"{name}.md"
    assert file.is_file(), f"docs/methods/{name}.md is missing. Every method in conf/method must have a card."
    first = re.match(r"# ([^\n]+)\n\n(.+?)\n\n", file.read_text(encoding="utf-8"), re.DOTALL)
    assert first is not None, f"docs/methods/{name}.md must begin with a title and a paragraph about the method"
    axes = ", ".join((METHODS[name].axis, *METHODS[name].other_axes))
    return Card(name, options_of()[name], axes, first[1], " ".join(first[2].split()))


def by_axis() -> dict[str, list[Card]]:
    """Return the cards for each heading, which is an axis or "Several axes"."""
    found: dict[str, list[Card]] = {}
    for one in all_cards():
        found.setdefault("Several axes" if "," in one.axes else one.axes.capitalize(), []).append(one)
    return found


def navigation() -> str:
    """Return the lines of mkdocs.yml that list the cards."""
    lines = []
    for heading, cards in by_axis().items():
        lines += [f"      - {heading}:\n", *(f"          - {one.title}: methods/{one.name}.md\n" for one in cards)]
    return "".join(lines)


def link(of: Card, page: Path) -> str:
    """Return the link to a card relative to a page."""
    return Path(os.path.relpath(of.file, page.parent)).as_posix()


# ---------------------------------------------------------------------------------------------- settings
@block
def settings(name: str) -> str:
    """Show the settings of a method with their types, defaults for each option, and meanings."""
    options = options_of()[name]
    values = {option: option_settings(CONF / "method" / f"{option}.yaml") for option in options}
    keys = list(dict.fromkeys(key for given in values.values() for key in given))
    if not keys:
        return "None."
    parameters = inspect.signature(METHODS[name]).parameters
    hints = typing.get_type_hints(METHODS[name].__init__)
    meanings = _meanings(METHODS[name])
    rows = []
    for key in keys:
        if key in parameters:
            kind, meaning = _kind(hints.get(key, Any)), meanings[key]
        else:
            assert key == "select", f"{name}: the setting {key} is not an argument of the constructor"
            kind, meaning = "name", SELECT
        shown = [_value(given[key]) if key in given else "" for given in values.values()]
        rows.append([f"`{key}`", kind, *shown, meaning])
    defaults = ["default"] if len(options) == 1 else [f"`{option}`" for option in options]
    return table(["setting", "type", *defaults, "meaning"], rows, left=len(rows[0]))


def _value(value: Any) -> str:
    if value == "???":
        return "required"
    if isinstance(value, str) and value.startswith("${"):  # the value of another setting
        return f"`{value.strip('${}')}`"
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{str(value).lower()}`"
    return f"`{value}`"


def _kind(hint: Any) -> str:
    """Return a description of a type in words, such as "integer" or a list of allowed names."""
    arguments, simple = typing.get_args(hint), {int: "integer", float: "number", bool: "true or false", str: "text"}
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in arguments)
    if typing.get_origin(hint) is list and arguments == (int,):
        return "list of integers"
    if arguments and typing.get_origin(hint) is not list:
        return " or ".join(map(_kind, arguments))
    return "null" if hint is type(None) else simple.get(hint, str(hint))


def _meanings(of: Any) -> dict[str, str]:
    """Return the descriptions of the arguments of a class, including those that another class documents."""
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        for key, meaning in _arguments(base.__doc__ or ""):
            reference = re.match(r"(?:as in|see) `(\w+)`", meaning)
            if reference is None:
                found[key] = meaning
            elif key not in found:
                (other,) = (one for one in METHODS.values() if one.__name__ == reference[1])
                found[key] = _meanings(other)[key]
    return found


def _arguments(doc: str) -> Iterator[tuple[str, str]]:
    """Yield the names and descriptions in the ``Args:`` section of a docstring."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n|\n)*)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    lines = textwrap.dedent(section[1]) if section else ""
    for names, text in re.findall(r"^([\w, ]+?)(?: \([^)]*\))?: (.*(?:\n[ ]+.*)*)", lines, re.MULTILINE):
        meaning = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
        yield from ((argument.strip(), meaning) for argument in names.split(","))


# ---------------------------------------------------------------------------------------------- costs
@block
def cost(name: str) -> str:
    """Show the counted and measured costs of a method and of full fine-tuning."""
    counted, measured = _counted(name), _measured(name)
    parts = []
    if counted:
        head = ["network", "recipe", *headings(COUNTED)]
        title = f"Counted costs, which are the same on every machine (record: `{records.path('counted')}`):"
        parts.append(f"{title}\n\n{table(head, counted, left=2)}")
    if measured:
        head = ["network, batch, machine", "recipe", *headings(MEASURED)]
        parts.append(f"Measured costs:\n\n{table(head, measured, left=2)}")
    else:
        parts.append("Step times are not recorded. To measure step times, see the [guide](../guides/comparing.md).")
    return "\n\n".join(parts)


def _of(name: str, recipes: dict[str, Any]) -> list[str]:
    """Return the names of the recipes that use an option of the method."""
    options = set(options_of()[name])
    return [
        one
        for one, recipe in recipes.items()
        if set(re.findall(r"\w+", recipe["arguments"][0].split("=")[1])) & options
    ]


def _counted(name: str) -> list[list[str]]:
    rows = []
    for model, of in records.load("counted")["models"].items():
        own = [one for one in _of(name, of["recipes"]) if one != "full"] if name != "full" else []
        recipes = ["full", *own] if own or (name == "full" and "full" in of["recipes"]) else []
        rows += [[f"{LABELS['networks'][model]}, batch {of['batch']}", *row] for row in counted_rows(model, recipes)]
    return rows


def _measured(name: str) -> list[list[str]]:
    """Return the measured costs of a method. For `full` and `last_stage`, combinations of methods are omitted."""
    rows = []
    own = f"{METHODS[name].__name__}("
    for file, labels in MEASUREMENTS.items():
        data, shown = records.load(file), LABELS[labels]
        if file == "memory_process":
            shown = {one: label for one, label in shown.items() if one.startswith(("compact", "low_bit"))}
        environment = data["environment"]
        machine = environment["device"]
        if "NVIDIA" not in machine:
            machine += f", {environment['threads']} threads"
        precision = "" if data["dtype"] == "fp32" else f", {data['dtype']}"
        where = f"{LABELS['networks'][data['model']]}, {data['batch']}, {machine}{precision}"
        for recipe, of in data["recipes"].items():
            alone = len(of["methods"]) == 1 or name not in ("full", "last_stage")
            if recipe in shown and alone and any(text.startswith(own) for text in of["methods"]):
                rows.append([where, shown[recipe], *cells(file, recipe, MEASURED)])
    return rows
