"""Text for terminals: tables, and names that others have chosen."""

from __future__ import annotations

import os
import re
import shutil
import unicodedata
from collections.abc import Collection, Sequence

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


def terminal_width() -> int:
    """Return the columns that a line may have: those of the terminal, at least 80; 100 without a terminal."""
    return max(80, shutil.get_terminal_size((100, 24)).columns)


def display_width(text: str) -> int:
    """Return the terminal columns of `text`: two for wide characters, none for combining and invisible ones."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.category(sign) in ("Mn", "Me", "Cf") else 2 if unicodedata.east_asian_width(sign) in "WF" else 1
        for sign in text
    )


def padded(text: str, width: int, left: bool = True) -> str:
    """Fill `text` up with spaces to `width` terminal columns, after it (`left`) or before it."""
    space = " " * (width - display_width(text))
    return text + space if left else space + text


def shortened(text: str, width: int) -> str:
    """Return `text`, or its beginning with an ellipsis, in at most `width` terminal columns."""
    if display_width(text) <= width:
        return text
    return _head(text, width - 1) + "…"


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break `text` into lines of at most `width` terminal columns: between words, else in them, at a separator.

    Args:
        text: in one line or several, which stay separate.
        width: of a line.
        indent: before all lines except the first.
    """
    lines = []
    for line in text.split("\n"):
        current = ""
        for piece in _BREAKS.findall(line):
            if current.strip() and display_width((current + piece).rstrip()) > width:
                lines.append(current.rstrip())
                current = indent
            while display_width((current + piece).rstrip()) > width:
                part = _head(piece, max(1, width - display_width(current)))
                lines.append(current + part)
                current, piece = indent, piece[len(part) :]
            current += piece
        lines.append(current.rstrip())
    return lines


def paragraph(text: str, indent: str = "  ") -> str:
    """Return a sentence for people in lines that fit the terminal; a word, such as a path, is never broken."""
    lines = [""]
    for word in text.split(" "):
        longer = f"{lines[-1]} {word}" if lines[-1].strip() else lines[-1] + word
        if lines[-1].strip() and display_width(longer) > terminal_width():
            lines.append(indent + word)
        else:
            lines[-1] = longer
    return "\n".join(lines)


#: A piece of text with the separator after which a line may end.
_BREAKS = re.compile(r"[^\s+,/;]*(?:[+,/;]|\s+)|[^\s+,/;]+")
#: Columns of words are not made narrower than this, in terminal columns.
_NARROW = 24


def _head(text: str, width: int) -> str:
    """The longest beginning of `text` in `width` terminal columns; at least one sign."""
    end = next((i for i in range(1, len(text)) if display_width(text[: i + 1]) > width), len(text))
    return text[:end]


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    widths: Sequence[int] = (),
    gap: str = "  ",
    rule: str = "─",
    whole: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """Align columns, in lines that fit the terminal.

    A column is as wide as its widest cell. Where the terminal is too narrow, headers and columns of words break into
    several lines; where this is not enough, the columns are divided into several tables, which repeat the first one.

    Args:
        rows: the header, then the lines; short ones are filled up with empty cells.
        left: indices of the columns aligned to the left, which hold words; the others are aligned to the right.
        widths: minimum widths of the first columns.
        gap: between two columns.
        rule: the sign that the line below the header is made of; empty: no line.
        whole: indices of the columns that are never broken: paths.
        width: of a line; None: that of the terminal.
    """
    limit = terminal_width() if width is None else width
    count = max(len(row) for row in rows)
    full = [[*row, *[""] * (count - len(row))] for row in rows]
    least = least_widths(full, left=left, whole=whole)
    panels: list[list[int]] = [[0]]
    for i in range(1, count):
        needed = sum(least[j] for j in panels[-1]) + len(gap) * len(panels[-1]) + least[i]
        if needed > limit and len(panels[-1]) > 1:
            panels.append([0])
        panels[-1].append(i)
    texts = []
    for panel in panels:
        cells = [[row[i] for i in panel] for row in full]
        minimum = [widths[i] if i < len(widths) else 0 for i in panel]
        sizes = _sizes(cells, [least[i] for i in panel], minimum, limit - len(gap) * (len(panel) - 1))
        lines = _lines(cells, sizes, [i in left for i in panel], gap, {k for k, i in enumerate(panel) if i in whole})
        if rule:
            lines.insert(_height(cells[0], sizes), rule * min(sum(sizes) + len(gap) * (len(panel) - 1), limit))
        texts.append("\n".join(line.rstrip() for line in lines))
    return "\n\n".join(texts)


def least_widths(
    rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), whole: Sequence[int] = ()
) -> list[int]:
    """Return the smallest width of each column of a `table`: of numbers and paths that of the widest one."""
    found = []
    for i, (header, *cells) in enumerate(zip(*rows, strict=True)):
        body = max(map(display_width, cells), default=0)
        words = max(map(display_width, header.split()), default=0)
        broken = i in left and i not in whole
        found.append(max(min(body, _NARROW), min(words, _NARROW)) if broken else max(body, min(words, _NARROW)))
    return found


def _sizes(rows: Sequence[Sequence[str]], least: Sequence[int], minimum: Sequence[int], limit: int) -> list[int]:
    """The width of each column, above `least` as far as `limit` allows: first without broken cells, then headers."""
    sizes = [max(a, b) for a, b in zip(least, minimum, strict=True)]
    columns = list(zip(*rows, strict=True))
    for part in (slice(1, None), slice(0, None)):
        wanted = [max(map(display_width, column[part]), default=0) for column in columns]
        for i in sorted(range(len(sizes)), key=lambda i: wanted[i] - sizes[i]):
            sizes[i] += max(0, min(wanted[i] - sizes[i], limit - sum(sizes)))
    return sizes


def _height(cells: Sequence[str], sizes: Sequence[int]) -> int:
    return max(len(wrapped(cell, size)) for cell, size in zip(cells, sizes, strict=True))


def _lines(
    rows: Sequence[Sequence[str]], sizes: Sequence[int], left: Sequence[bool], gap: str, whole: Collection[int]
) -> list[str]:
    """The lines of a table; cells of the header end in its last line, the others begin in the first of their row."""
    lines = []
    for number, row in enumerate(rows):
        cells = [[cell] if i in whole else wrapped(cell, size) for i, (cell, size) in enumerate(zip(row, sizes, strict=True))]
        height = max(map(len, cells))
        for cell in cells:
            empty = [""] * (height - len(cell))
            cell[:] = empty + cell if number == 0 else cell + empty
        lines += [
            gap.join(padded(part, size, at_left) for part, size, at_left in zip(line, sizes, left, strict=True))
            for line in zip(*cells, strict=True)
        ]
    return lines


def spelled(metric: str) -> str:
    """The name of a metric as text: ``mean_iou`` → ``mean IoU``."""
    return {"mean_iou": "mean IoU"}.get(metric, metric.replace("_", " "))
