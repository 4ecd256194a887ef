"""Format text for terminals: tables, and text from untrusted sources."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

#: Control characters, and characters that change the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    r"""Return `text` with control characters, except line feeds and tabs, as escapes: ``\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def plain_line(text: str) -> str:
    """Return `text` in one line: as `plain_text`, also with line feeds and tabs as escapes."""
    return plain_text(text).replace("\n", "\\x0a").replace("\t", "\\x09")


#: Beginnings of cells that spreadsheets evaluate, and a number, which may begin in the same way.
_FORMULA = re.compile("[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-](inf|nan)?")
#: Characters that begin a link, code, a tag or a cell in Markdown and HTML.
_MARKUP = re.compile(r"[\\|\[\]`]")


def csv_cell(text: str) -> str:
    """Return `text` for a cell of a CSV file that spreadsheets do not evaluate as a formula.

    An apostrophe precedes text that begins like a formula; numbers are not changed. Control characters become escapes.
    """
    plain = plain_text(text)
    return f"'{plain}" if _FORMULA.match(plain) and not _NUMBER.fullmatch(plain) else plain


def json_plain(text: str) -> str:
    """Return JSON with control characters in its strings as JSON escapes, for a terminal."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def markdown_text(text: str) -> str:
    """Return `text` for Markdown, in one line without links, code or HTML."""
    plain = _MARKUP.sub(lambda found: f"\\{found[0]}", plain_line(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;")


#: Width of a line without a terminal.
WITHOUT_TERMINAL = 100


def printable(path: str | os.PathLike[str]) -> str:
    """Return a printable path. Undecodable bytes (old archives) become a replacement character."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def terminal_width(stream: TextIO | None = None, least: int = 80) -> int:
    """Return the width of lines: ``COLUMNS``, the width of the terminal, or 100 without a terminal.

    Args:
        stream: output stream; None: the standard output.
        least: minimum width, because tables cannot be narrower.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return max(least, int(given))
    try:
        return max(least, os.get_terminal_size((stream or sys.stdout).fileno()).columns or WITHOUT_TERMINAL)
    except (OSError, ValueError, AttributeError):  # a pipe, a file, or a stream without a descriptor
        return WITHOUT_TERMINAL


def display_width(text: str) -> int:
    """Return the terminal columns of `text`: two for wide characters, none for combining and invisible ones."""
    if text.isascii():
        return len(text)
    return sum(
        0
        if unicodedata.category(sign) in ("Mn", "Me", "Cf")
        else 2
        if unicodedata.east_asian_width(sign) in "WF"
        else 1
        for sign in text
    )


def padded(text: str, width: int, left: bool = True) -> str:
    """Pad `text` with spaces to `width` terminal columns, after it (`left`) or before it."""
    space = " " * (width - display_width(text))
    return text + space if left else space + text


def shortened(text: str, width: int) -> str:
    """Return `text` in at most `width` terminal columns, shortened with an ellipsis."""
    if display_width(text) <= width:
        return text
    return _head(text, width - 1) + "…"


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Break `text` into lines of at most `width` terminal columns: between words, or at separators in long words.

    Args:
        text: one or more lines, which are wrapped separately.
        width: maximum width of a line.
        indent: prefix of all lines except the first.
    """
    lines = []
    for line in text.split("\n"):
        current = ""
        words = _SPACES.split(line)
        pieces = [p for w in words for p in ([w] if display_width(w.rstrip()) <= width else _SEPARATORS.split(w))]
        for piece in pieces:
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


def filled(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap a line of text to `width` terminal columns. Words, such as paths, are never broken.

    Args:
        text: a line; leading spaces are preserved.
        width: maximum width of a line.
        indent: prefix of all lines except the first.
    """
    text = plain_text(text)
    body = text.lstrip(" ")
    first, *words = body.split(" ")
    lines = [text[: len(text) - len(body)] + first]
    for word in words:
        if display_width(f"{lines[-1]} {word}") > width:
            lines.append(indent + word)
        else:
            lines[-1] += f" {word}"
    return lines


def paragraph(text: str, indent: str = "") -> str:
    """Wrap a sentence to the width of the terminal, see `filled`."""
    return "\n".join(filled(text, terminal_width(), indent))


#: Possible line breaks: between words, and in long words.
_SPACES = re.compile(r"(?<=\s)(?=\S)")
_SEPARATORS = re.compile(r"(?<=[+,/;])|(?<=\.)(?=[a-z])")
#: Minimum width of a column of words, in terminal columns.
_NARROW = 24


def _head(text: str, width: int) -> str:
    """Return the longest prefix of `text` that fits `width` terminal columns, with at least one character."""
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
    """Align columns in lines that fit the terminal.

    A column is as wide as its widest cell. If the table is too wide, headers and columns of words are wrapped. If it is
    still too wide, it is divided into several tables, each with the first column.

    Args:
        rows: the header and the lines. Missing cells are empty.
        left: indices of columns of words, which are aligned to the left. The others are aligned to the right.
        widths: minimum widths of the first columns.
        gap: separator between columns.
        rule: character of the line below the header; empty: no line.
        whole: indices of columns that are never wrapped, such as paths.
        width: maximum width of a line; None: that of the terminal.
    """
    limit = terminal_width() if width is None else width
    count = max(len(row) for row in rows)
    full = [[*map(plain_line, row), *[""] * (count - len(row))] for row in rows]
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
        layout = Layout(
            cells,
            left=[k for k, i in enumerate(panel) if i in left],
            widths=[widths[i] if i < len(widths) else 0 for i in panel],
            gap=gap,
            rule=rule,
            whole=[k for k, i in enumerate(panel) if i in whole],
            width=limit,
        )
        texts.append("\n".join([layout.head(), *map(layout.row, cells[1:])]))
    return "\n\n".join(texts)


class Layout:
    """The widths of a table's columns, for printing its lines one at a time.

    Args:
        rows: the header, and all rows or samples of the same width.
        left: see `table`.
        widths: minimum widths of the first columns.
        gap: separator between columns.
        rule: character of the line below the header.
        whole: columns that are never wrapped.
        width: maximum width of a line.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        *,
        left: Sequence[int] = (0,),
        widths: Sequence[int] = (),
        gap: str = "  ",
        rule: str = "─",
        whole: Sequence[int] = (),
        width: int | None = None,
    ) -> None:
        self._header, self._left, self._gap, self._rule, self._whole = rows[0], left, gap, rule, whole
        self._limit = terminal_width() if width is None else width
        minimum = [*widths, *[0] * (len(self._header) - len(widths))]
        least = least_widths(rows, left=left, whole=whole)
        self._sizes = [max(a, b) for a, b in zip(least, minimum, strict=True)]
        room = self._limit - len(gap) * (len(least) - 1)
        columns = list(zip(*rows, strict=True))
        # Cells that are not broken come first, then headers that are not.
        for part in (slice(1, None), slice(0, None)):
            wanted = [max(map(display_width, column[part]), default=0) for column in columns]
            for i in sorted(range(len(wanted)), key=lambda i: wanted[i] - self._sizes[i]):
                self._sizes[i] += max(0, min(wanted[i] - self._sizes[i], room - sum(self._sizes)))

    def head(self) -> str:
        """Return the header, aligned at the bottom, and the line below it."""
        total = sum(self._sizes) + len(self._gap) * (len(self._sizes) - 1)
        lines = self._lines(self._header, top=False)
        return "\n".join([*lines, *([self._rule * min(total, self._limit)] if self._rule else [])])

    def row(self, cells: Sequence[str]) -> str:
        """Return the lines of a row."""
        return "\n".join(self._lines(cells, top=True))

    def _lines(self, row: Sequence[str], top: bool) -> list[str]:
        cells = [
            [cell] if i in self._whole else wrapped(cell, size)
            for i, (cell, size) in enumerate(zip(row, self._sizes, strict=True))
        ]
        height = max(map(len, cells))
        for cell in cells:
            empty = [""] * (height - len(cell))
            cell[:] = cell + empty if top else empty + cell
        return [
            self._gap.join(
                padded(part, size, i in self._left)
                for i, (part, size) in enumerate(zip(line, self._sizes, strict=True))
            ).rstrip()
            for line in zip(*cells, strict=True)
        ]


def least_widths(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), whole: Sequence[int] = ()) -> list[int]:
    """Return the minimum width of each column of a `table`; for numbers and paths, the width of the widest cell."""
    found = []
    for i, (header, *cells) in enumerate(zip(*rows, strict=True)):
        body = max(map(display_width, cells), default=0)
        words = max(map(display_width, header.split()), default=0)
        broken = i in left and i not in whole
        found.append(max(min(body, _NARROW), min(words, _NARROW)) if broken else max(body, min(words, _NARROW)))
    return found


def spelled(metric: str) -> str:
    """Return the display name of a metric: ``mean_iou`` → ``mean IoU``."""
    return {"mean_iou": "mean IoU"}.get(metric, metric.replace("_", " "))
