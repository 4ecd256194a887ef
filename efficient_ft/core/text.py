"""Text for terminals: tables, and names that others have chosen."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence

#: Control characters, which move the cursor or change colors, and those that turn the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    """Return `text` with its control characters, other than line feeds and tabs, as escapes: ``\\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def plain_line(text: str) -> str:
    """Return `text` in one line: as `plain_text`, with line feeds and tabs as escapes, too."""
    return plain_text(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path that can be printed: undecodable bytes (old archives) become a replacement character."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    widths: Sequence[int] = (),
    gap: str = "  ",
    rule: str = "─",
) -> str:
    """Align columns, each as wide as its widest cell.

    Args:
        rows: the header, then the lines; short ones are filled up with empty cells.
        left: indices of the columns aligned to the left; the others are aligned to the right.
        widths: minimum widths of the first columns.
        gap: between two columns.
        rule: the sign that the line below the header is made of; empty: no line.
    """
    columns = max(len(row) for row in rows)
    full = [[*row, *[""] * (columns - len(row))] for row in rows]
    minimum = [*widths, *[0] * (columns - len(widths))]
    wide = [max(minimum[i], *(len(row[i]) for row in full)) for i in range(columns)]
    lines = [
        gap.join(c.ljust(w) if i in left else c.rjust(w) for i, (c, w) in enumerate(zip(row, wide, strict=True)))
        for row in full
    ]
    if rule:
        lines.insert(1, rule * (sum(wide) + len(gap) * (columns - 1)))
    return "\n".join(line.rstrip() for line in lines)


def spelled(metric: str) -> str:
    """The name of a metric as text: ``mean_iou`` → ``mean IoU``."""
    return {"mean_iou": "mean IoU"}.get(metric, metric.replace("_", " "))
