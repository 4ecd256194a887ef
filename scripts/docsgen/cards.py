"""The method cards, docs/methods/*.md: what they say of themselves, their settings and their costs."""

from __future__ import annotations

import inspect
import os
import re
import shlex
import textwrap
import typing
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from docsgen import configuration, records
from docsgen.columns import COUNTED, MEASURED, cells, counted_rows, headings
from docsgen.labels import LABELS
from docsgen.markdown import table
from docsgen.registry import block
from efficient_ft.core.packages import method_of

ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "docs" / "methods"

ORDER = ("selection", "backprop", "memory", "tokens", "patches", "adapters")

#: What a value of `select` is, of the methods whose constructor has no such argument.
SELECT = (
    "what trains if the list names no selection: `last_stage`, `all`, another selection, or `keep` (leaves"
    " `requires_grad` as it is)"
)

#: Measurements with plain full fine-tuning as baseline, and the labels of their recipes.
MEASUREMENTS = {"memory": "memory", "memory_felt": "memory_felt", "tokens": "tokens", "stacked": "tokens",
                "methods": "methods", "memory_gpu": "memory_gpu", "memory_gpu_bf16": "memory_gpu"}  # fmt: skip


@dataclass(frozen=True)
class Card:
    """A method's page.

    Attributes:
        options: the YAML files of conf/method that are variants of it, its own name first.
        summary: the first sentence of the page.
    """

    name: str
    options: tuple[str, ...]
    axes: str
    summary: str

    @property
    def file(self) -> Path:
        return CARDS / f"{self.name}.md"


@cache
def options_of() -> dict[str, tuple[str, ...]]:
    """By method: its options, the one of its own name first."""
    found: dict[str, list[str]] = {}
    for file in sorted((configuration.CONF / "method").glob("*.yaml")):
        name = method_of(file)
        assert name is not None, file
        found.setdefault(name, []).append(file.stem)
    return {name: tuple(sorted(options, key=lambda o: (o != name, o))) for name, options in found.items()}


@cache
def all_cards() -> list[Card]:
    """Every card, by axis and then by name."""
    cards = [card(name) for name in options_of()]
    return sorted(cards, key=lambda c: (ORDER.index(c.axes.split(", ")[0]), "," in c.axes, c.name))


def card(name: str) -> Card:
    """One card.

    Raises:
        ValueError: the method has none.
    """
    file = CARDS / f"{name}.md"
    if not file.is_file():
        raise ValueError(f"docs/methods/{name}.md is missing: every method of conf/method has a card")
    text = file.read_text(encoding="utf-8")
    first = re.match(r"# [^\n]+\n\n(.+?)\n\n", text, re.DOTALL)
    if first is None:
        raise ValueError(f"docs/methods/{name}.md: a card begins with a title and a paragraph that sums the method up")
    summary = " ".join(first[1].split())
    of = classes()[name]
    return Card(name, options_of()[name], ", ".join((of.axis, *of.other_axes)), summary)


def by_axis() -> dict[str, list[Card]]:
    """The cards by heading: an axis, or several."""
    found: dict[str, list[Card]] = {}
    for one in all_cards():
        found.setdefault("Several axes" if "," in one.axes else one.axes.capitalize(), []).append(one)
    return found


def navigation() -> str:
    """The lines of mkdocs.yml that list the cards."""
    lines = []
    for heading, cards in by_axis().items():
        lines.append(f"      - {heading}:\n")
        for one in cards:
            title = one.file.read_text(encoding="utf-8").partition("\n")[0].removeprefix("# ")
            lines.append(f"          - {title}: methods/{one.name}.md\n")
    return "".join(lines)


def link(of: Card, page: Path) -> str:
    """The address of a card as seen from a page."""
    return Path(os.path.relpath(of.file, page.parent)).as_posix()


@cache
def classes() -> dict[str, Any]:
    """The methods' classes by name."""
    from efficient_ft.methods import METHODS

    return dict(METHODS)


# ---------------------------------------------------------------------------------------------- settings
@block
def settings(name: str) -> str:
    """Show the settings of a method, their types, defaults by option, and meanings."""
    options = options_of()[name]
    values = {option: yaml.safe_load(_yaml(option)) or {} for option in options}
    keys = list(dict.fromkeys(key for given in values.values() for key in given))
    if not keys:
        return "None."
    parameters = inspect.signature(classes()[name]).parameters
    hints = typing.get_type_hints(classes()[name].__init__)
    meanings = _meanings(classes()[name])
    rows = []
    for key in keys:
        if key in parameters:
            kind, meaning = _kind(hints.get(key, Any)), meanings[key]
        else:
            assert key == "select", f"{name}.{key} is no argument of the constructor"
            kind, meaning = "name", SELECT
        shown = [_value(given[key]) if key in given else "" for given in values.values()]
        rows.append([f"`{key}`", kind, *shown, meaning])
    defaults = ["default"] if len(options) == 1 else [f"`{option}`" for option in options]
    return table(["setting", "type", *defaults, "meaning"], rows, left=len(rows[0]))


def _yaml(option: str) -> str:
    return (configuration.CONF / "method" / f"{option}.yaml").read_text(encoding="utf-8")


def _value(value: Any) -> str:
    if value == "???":
        return "must be given"
    if value == "${model.select}":
        return "`model.select`"
    if value is None or isinstance(value, bool):
        return "`null`" if value is None else f"`{str(value).lower()}`"
    return f"`{value}`"


def _kind(hint: Any) -> str:
    """A type in words: integer, number, one of the names."""
    if typing.get_origin(hint) is typing.Literal:
        return ", ".join(f"`{choice}`" for choice in typing.get_args(hint))
    several = typing.get_args(hint)
    if several and typing.get_origin(hint) is not list:
        return " or ".join(_kind(one) for one in several)
    simple = {int: "integer", float: "number", bool: "true or false", str: "text", type(None): "null"}
    if hint in simple:
        return simple[hint]
    return "list of integers" if typing.get_args(hint) == (int,) else str(hint)


def _meanings(of: Any) -> dict[str, str]:
    """By argument: what the docstring of its class says, or that of the class it refers to."""
    found: dict[str, str] = {}
    for base in reversed(of.__mro__):
        for key, meaning in _arguments(base.__doc__ or ""):
            # "see `LayersPerStep`" is no meaning: the base's stays.
            if not re.match(r"(as in|see) `\w+`", meaning):
                found[key] = meaning
            elif key not in found:
                found[key] = _meanings_of(meaning, key)
    return found


def _meanings_of(reference: str, key: str) -> str:
    named = re.search(r"`(\w+)`", reference)
    other = next((c for c in classes().values() if named and c.__name__ == named[1]), None)
    assert other is not None, f"{key}: {reference}"
    return _meanings(other)[key]


def _arguments(doc: str) -> Iterator[tuple[str, str]]:
    """Arguments and their texts in a docstring's ``Args:``."""
    section = re.search(r"^Args:\n((?:[ ]{4}.*\n|\n)*)", inspect.cleandoc(doc) + "\n", re.MULTILINE)
    if section is None:
        return
    lines = textwrap.dedent(section[1])
    for names, text in re.findall(r"^([\w, ]+?)(?: \([^)]*\))?: (.*(?:\n[ ]+.*)*)", lines, re.MULTILINE):
        meaning = " ".join(text.split()).replace("``", "`").replace("|", "\\|")
        for argument in names.split(","):
            yield argument.strip(), meaning


# ---------------------------------------------------------------------------------------------- costs
@block
def cost(name: str) -> str:
    """Show the counted and measured cost of a method, relative to full fine-tuning."""
    counted, measured = _counted(name), _measured(name)
    parts = []
    if counted:
        head = ["network", "recipe", *headings(COUNTED)]
        title = f"Counted (the same on every machine; `{records.path('counted')}`):"
        parts.append(f"{title}\n\n{table(head, counted, left=2)}")
    if measured:
        head = ["network, batch, machine", "recipe", *headings(MEASURED)]
        parts.append(f"Measured:\n\n{table(head, measured, left=2)}")
    else:
        parts.append(_not_timed(name))
    return "\n\n".join(parts)


def _of(name: str, recipes: dict[str, Any]) -> list[str]:
    """Return the names of the recipes whose list of methods has an option of the method."""
    options = set(options_of()[name])
    return [
        one
        for one, recipe in recipes.items()
        if set(re.findall(r"\w+", recipe["arguments"][0].split("=")[1])) & options
    ]


def _not_timed(name: str) -> str:
    """Return the text of a card without a measurement, with the command that measures."""
    for model, of in records.load("counted")["models"].items():
        if own := _of(name, of["recipes"]):
            recipes = shlex.join(["full", *(_bench_recipe(of["recipes"][one]["arguments"]) for one in own)])
            command = f"efficient-ft bench step {recipes} --model {model} --batch {of['batch']}"
            first = "These costs are counted; step times are not recorded. Measure them on your machine:"
            return f"{first}\n\n```bash\n{command}\n```"
    return "Neither counts nor step times are recorded."


def _bench_recipe(arguments: Sequence[str]) -> str:
    """Return arguments of the command line as a recipe of `efficient-ft bench`: ``METHOD:KEY=VALUE+METHOD``."""
    options, *settings = arguments
    parts = []
    for option in options.removeprefix("method=").strip("[]").split(","):
        method = next(name for name, variants in options_of().items() if option in variants)
        own = [s.removeprefix(f"method.{method}.") for s in settings if s.startswith(f"method.{method}.")]
        parts.append(f"{option}:{','.join(own)}" if own else option)
    return "+".join(parts)


def _counted(name: str) -> list[list[str]]:
    rows = []
    for model, of in records.load("counted")["models"].items():
        own = _of(name, of["recipes"])
        if name == "full":
            own = [one for one in own if one == "full"]
        elif own and own != ["full"]:
            own = ["full", *(one for one in own if one != "full")]
        network = f"{LABELS['networks'][model]}, batch {of['batch']}"
        rows += [[network, *row] for row in counted_rows(model, own)]
    return rows


def _measured(name: str) -> list[list[str]]:
    """Return the rows of measurements about the method; selections only where they stand alone."""
    rows = []
    own = f"{classes()[name].__name__}("
    for file, labels in MEASUREMENTS.items():
        data, shown = records.load(file), LABELS[labels]
        if file == "memory_felt":
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
