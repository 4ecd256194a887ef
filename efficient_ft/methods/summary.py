"""Functions that create the phrases of the one-line summary of a method."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from itertools import groupby

from torch import nn

from efficient_ft.core.format import format_number
from efficient_ft.models.view import Reason, Skipped

#: Maximum number of names in a list. Additional names are counted but not listed.
_MOST = 4
_NAMED = {Reason.HEAD: "head", Reason.STEM: "stem"}
_SHORT = {
    Reason.GROUPED_CONVOLUTION: "grouped convolutions",
    Reason.SPATIAL_CONVOLUTION: "larger or strided convolutions",
    Reason.NOT_ATTENTION: "outside attention",
    Reason.EXACT_IS_CHEAPER: "exact is cheaper",
    Reason.TOO_NARROW: "no wider than the rank",
}


def ranges(names: Iterable[str]) -> str:
    """Return a short text that lists names, with ranges for consecutive numbers (``blocks 9–11, norm and head``)."""
    found: dict[str, list[int]] = {}  # the list of numbers is empty for a name without a number
    for name in names:
        before, number = re.fullmatch(r"(.*?)\.?(\d+)", name, re.DOTALL).groups() if name[-1:].isdigit() else (name, "")  # type: ignore[union-attr]
        key = before if not number or name == f"{before}.{number}" else f"{before}#"
        found.setdefault(key, []).extend([int(number)] if number else [])
    words = [_numbered(name, numbers) for name, numbers in found.items()]
    if len(words) > _MOST:
        words = [*words[: _MOST - 1], f"{len(words) - _MOST + 1} more"]
    return _listed(words)


def _numbered(name: str, numbers: list[int]) -> str:
    """Format the name ``blocks`` with the numbers 3, 7, 8, 9 as ``blocks 3, 7–9``.

    If the name ends with ``#``, no dot or space precedes the numbers, as in ``layer1–4``.
    """
    runs = [[n for _, n in run] for _, run in groupby(enumerate(sorted(set(numbers))), lambda pair: pair[1] - pair[0])]
    text = ", ".join(str(run[0]) if len(run) == 1 else f"{run[0]}–{run[-1]}" for run in runs)
    if name.endswith("#"):
        return name[:-1] + text
    if not numbers:
        return name
    return f"{name} {text}" if len(numbers) > 1 and not re.search(r"\d", name) else f"{name}.{text}"


def _listed(words: list[str]) -> str:
    return " and ".join(filter(None, (", ".join(words[:-1]), words[-1]))) if words else "nothing"


def within(names: Iterable[str]) -> str:
    """Return the location of model parts as text: the names up to the first number, formatted by `ranges`."""
    return ranges(dict.fromkeys(re.sub(r"(\d+)\..*", r"\1", name, flags=re.DOTALL) for name in names))


def count(number: int, word: str) -> str:
    """Return a number with a noun, such as ``1 layer`` or ``2 layers``."""
    return f"{number} {word}{'' if number == 1 else 's'}"


def are(number: int) -> str:
    """Return the verb form for a number of parts: ``is`` or ``are``."""
    return "is" if number == 1 else "are"


def trained(model: nn.Module) -> str:
    """Return the number of trained parameters and of all parameters, such as ``1.34 M of 5.53 M parameters``."""
    total, train = (sum(p.numel() for p in model.parameters() if p.requires_grad or every) for every in (True, False))
    share = f"{format_number(train)} of {format_number(total)}" if train < total else format_number(total)
    return f"{share} parameters"


def left(skipped: Mapping[str, Skipped], state: str, unit: str = "layer") -> str:
    """Return the last phrase of a summary, which describes the skipped parts.

    The phrase is empty if no part was skipped. `state` describes the skipped parts, for example as ``exact``, ``dense``
    or ``not adapted``. `unit` is the noun for one part.
    """
    reasons = {why.reason for why in skipped.values()}
    others = [name for name, why in skipped.items() if why.reason not in _NAMED]
    named = [word for reason, word in _NAMED.items() if reason in reasons]
    if others:
        named.append(ranges(others) if len(others) < _MOST and not named else count(len(others), unit))
    why = ", ".join(_texts([skipped[name] for name in others], state))
    return f"; {_listed(named)} {state}{f' ({why})' if why else ''}" if named else ""


def _texts(left: Iterable[Skipped], state: str) -> list[str]:
    """Return the distinct reasons as short texts. Details that differ between parts are omitted."""
    details: dict[Reason, set[str]] = {}
    for why in left:
        details.setdefault(why.reason, set()).add(str(why))
    found = []
    for reason, texts in details.items():
        text = texts.pop() if len(texts) == 1 else reason.value
        text = _SHORT.get(reason, text)
        for prefix in (f"left {state}", state):
            text = text.removeprefix(f"{prefix}, ").removeprefix(f"{prefix}: ")
        found.append(text)
    return found
