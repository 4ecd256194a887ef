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

from docsgen import configuration, labels, records
from docsgen.markdown import duration, table, times
from efficient_ft.core.packages import method_of, option_settings

ROOT = Path(__file__).resolve().parents[2]
CARDS = ROOT / "docs" / "methods"

ORDER = ("selection", "backprop", "memory", "tokens", "patches", "adapters")

#: What a value of `select` is, of the methods whose constructor has no such argument.
SELECT = (
    "what trains if the list names no selection: `last_stage`, `all`, another selection, or `keep` (leaves"
    " `requires_grad` as it is)"
)

#: Measurements with plain full fine-tuning as baseline, and how their recipes are shown.
MEASURED = {
    "memory": labels.MEMORY,
    "memory_felt": {
        name: label for name, (label, _) in labels.MEMORY_FELT.items() if name.startswith(("compact", "low_bit"))
    },
    "tokens": labels.TOKENS,
    "stacked": labels.TOKENS,
    "methods": labels.METHODS,
    "memory_gpu": labels.GPU,
    "memory_gpu_bf16": labels.GPU,
}

NETWORKS = {
    "deit_small": "DeiT-S",
    "vit_base": "ViT-B/16",
    "efficientformer_l1": "EfficientFormer-L1",
    "proxyless_mobile": "ProxylessNAS-Mobile",
    "resnet50": "ResNet-50",
}


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
def settings_table(name: str) -> str:
    """Settings, their types, defaults by option, and meanings."""
    options = options_of()[name]
    values = {option: option_settings(configuration.CONF / "method" / f"{option}.yaml") for option in options}
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
def cost_tables(name: str) -> str:
    """Counted and measured cost of a method, relative to full fine-tuning."""
    counted, measured = _counted(name), _measured(name)
    parts = []
    if counted:
        head = ["network", "recipe", "parameters trained", "forward GFLOP / image", "backward GFLOP / image"]
        parts.append(
            f"Counted (the same on every machine; `{records.path('counted')}`):\n\n"
            + table([*head, "saved MiB / image", "peak MiB of the batch"], counted, left=2)
        )
    if measured:
        head = ["network, batch, machine", "recipe", "step", "time / time of `full`", "saved MiB / image"]
        parts.append("Measured:\n\n" + table([*head, "peak MiB of the batch"], measured, left=2))
    else:
        parts.append(_not_timed(name))
    return "\n\n".join(parts)


def _not_timed(name: str) -> str:
    """The sentences of a card without a measurement: what there is, and the command that measures."""
    for model, of in records.load("counted")["models"].items():
        own = [r["arguments"] for r in of["recipes"].values() if _names(r["arguments"][0]) & set(options_of()[name])]
        if own:
            recipes = shlex.join(["full", *map(_bench_recipe, own)])
            command = f"efficient-ft bench step {recipes} --model {model} --batch {of['batch']}"
            first = "These costs are counted; step times are not recorded. Measure them on your machine:"
            return f"{first}\n\n```bash\n{command}\n```"
    return "Neither counts nor step times are recorded."


def _bench_recipe(arguments: Sequence[str]) -> str:
    """Arguments of the command line as a recipe of `efficient-ft bench`: ``METHOD:KEY=VALUE+METHOD``."""
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
        recipes = of["recipes"]
        own = [r for r, recipe in recipes.items() if _names(recipe["arguments"][0]) & set(options_of()[name])]
        if name != "full" and own and own != ["full"]:
            own = ["full", *(r for r in own if r != "full")]
        elif name == "full":
            own = ["full"] if "full" in recipes else []
        for recipe in own:
            executed = recipes[recipe]["executed"]
            rows.append(
                [
                    f"{NETWORKS[model]}, batch {of['batch']}",
                    labels.command(recipes[recipe]["arguments"]),
                    f"{recipes[recipe]['trainable_parameters'] / 1e6:.2f} M",
                    f"{executed['forward_flops'] / 1e9:.2f}",
                    f"{executed['backward_flops'] / 1e9:.2f}",
                    f"{executed['saved_bytes'] / records.MIB:.2f}",
                    f"{executed['peak_bytes'] / records.MIB:.0f}",
                ]
            )
    return rows


def _names(argument: str) -> set[str]:
    return set(argument.removeprefix("method=").strip("[]").split(","))


def _measured(name: str) -> list[list[str]]:
    rows = []
    own = classes()[name].__name__
    for file, shown in MEASURED.items():
        data = records.load(file)
        for recipe, of in data["recipes"].items():
            if recipe not in shown or not _holds(of["methods"], own, name):
                continue
            environment = data["environment"]
            machine = environment["device"] + (
                "" if "NVIDIA" in environment["device"] else f", {environment['threads']} threads"
            )
            precision = "" if data["dtype"] == "fp32" else f", {data['dtype']}"
            rows.append(
                [
                    f"{NETWORKS[data['model']]}, {data['batch']}, {machine}{precision}",
                    shown[recipe],
                    duration(records.seconds(file, recipe)),
                    times(records.time(file, recipe)),
                    f"{records.saved(file, recipe):.2f}",
                    f"{records.peak(file, recipe):.0f}",
                ]
            )
    return rows


def _holds(methods: list[str], own: str, name: str) -> bool:
    """Whether a recipe is about the method: selections only where they stand alone."""
    if name in ("full", "last_stage"):
        return len(methods) == 1 and methods[0].startswith(f"{own}(")
    return any(text.startswith(f"{own}(") for text in methods)
