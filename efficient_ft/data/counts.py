"""Functions that format counts, verb forms and lists of names for messages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from efficient_ft.core.text import plain_line, printable


def counted(count: int, noun: str) -> str:
    """Format a number with a noun, for example ``1 text``, ``2,000 texts`` or ``3 classes``."""
    return f"{count:,} {noun}{'' if count == 1 else 'es' if noun.endswith(('s', 'x')) else 's'}"


def verb(count: int, one: str = "has", several: str = "have") -> str:
    """Return the form of a verb that agrees with a number."""
    return one if count == 1 else several


def and_more(count: int, noun: str = "") -> str:
    """Return the end of a shortened list, such as `` and 3 more files``, or an empty string if nothing was left out."""
    return "" if count <= 0 else f" and {counted(count, f'more {noun}')}" if noun else f" and {count:,} more"


def some(names: Sequence[str], count: int = 6) -> str:
    """Join the first `count` names with commas, and append the number of remaining names."""
    return ", ".join(printable(name) for name in names[:count]) + and_more(len(names) - count)


def some_groups(groups: Sequence[Sequence[str]], counts: Mapping[str, int]) -> str:
    """Format the first three groups of names with the number of samples of each name."""
    shown = (" and ".join(f"{plain_line(name)!r} ({counts[name]})" for name in group[:4]) for group in groups[:3])
    return "; ".join(shown) + and_more(len(groups) - 3)


def most_frequent(counts: Counter[str], limit: int, noun: str) -> str:
    """Format the most frequent keys with their counts, for example ``.txt ×3, .csv ×1 and 2 more kinds``."""
    shown = ", ".join(f"{name} ×{count:,}" for name, count in counts.most_common(limit))
    return shown + and_more(len(counts) - limit, noun)
