"""Functions that format tables and numbers in Markdown, and the registry of functions that markers call."""

from __future__ import annotations

from collections.abc import Callable, Sequence

#: Dict from names in markers to functions that generate blocks. A function with a parameter ``page`` also receives the
#: path of the page.
BLOCKS: dict[str, Callable[..., str]] = {}


def block(function: Callable[..., str]) -> Callable[..., str]:
    """Register a function under its name for use in markers. Underscores in the name are replaced with hyphens."""
    BLOCKS[function.__name__.replace("_", "-")] = function
    return function


def table(head: Sequence[str], rows: Sequence[Sequence[str]], left: int = 1, text_last: bool = False) -> str:
    """Return a Markdown table.

    The first `left` columns are aligned to the left. If `text_last` is True, the last column is also aligned to the
    left.
    """
    last = len(head) - 1
    rule = ["---" if column < left or (text_last and column == last) else "---:" for column in range(len(head))]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in (head, rule, *rows))


def listed(items: Sequence[str]) -> str:
    """Join items for use in a sentence, for example "a, b and c"."""
    return " and ".join(filter(None, (", ".join(items[:-1]), items[-1])))


def duration(seconds: float) -> str:
    """Format a duration, for example 2.71 s, 320 ms or 7.2 ms."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.1 else f"{seconds * 1e3:.1f} ms"


def cosine(value: float) -> str:
    """Format a cosine with three digits, or with four digits if it is close to 1."""
    if value >= 0.99995:
        return "1"
    return f"{value:.4f}" if value >= 0.9985 else f"{value:.3f}"
