"""Text for terminals: tables, and names that others have chosen."""

from __future__ import annotations

import os
import re
import sys
import unicodedata
from collections.abc import Sequence
from typing import TextIO

#: Control characters, which move the cursor or change colors, and those that turn the direction of writing.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    """Return `text` with its control characters, other than line feeds and tabs, as escapes: ``\\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def plain_line(text: str) -> str:
    """Return `text` in one line: as `plain_text`, with line feeds and tabs as escapes, too."""
    return plain_text(text).replace("\n", "\\x0a").replace("\t", "\\x09")


#: The beginnings of a cell that a spreadsheet evaluates, and a number, which begins like one.
_FORMULA = re.compile("[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-](inf|nan)?")
#: Signs of Markdown and HTML that begin a link, code, a tag or another cell.
_MARKUP = re.compile(r"[\\|\[\]`]")


def csv_cell(text: str) -> str:
    """Return `text` for a cell of a CSV file: spreadsheets show it, and do not evaluate it as a formula.

    A text that begins like a formula gets an apostrophe before it; numbers stay as they are. Control characters are
    written as escapes.
    """
    plain = plain_text(text)
    return f"'{plain}" if _FORMULA.match(plain) and not _NUMBER.fullmatch(plain) else plain


def json_plain(text: str) -> str:
    """Return a JSON text with the control characters in its strings as JSON's escapes, for a terminal."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def markdown_text(text: str) -> str:
    """Return `text` for Markdown, in one line and without links, code or HTML."""
    plain = _MARKUP.sub(lambda found: f"\\{found[0]}", plain_line(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;")


#: Columns of a line where there is no terminal.
WITHOUT_TERMINAL = 100


def printable(path: str | os.PathLike[str]) -> str:
    """Return a path that can be printed: undecodable bytes (old archives) become a replacement character."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def terminal_width(stream: TextIO | None = None, least: int = 80) -> int:
    """Return the columns that a line may have: those of ``COLUMNS`` or of the terminal, or 100 without a terminal.

    Args:
        stream: written to; None: the standard output.
        least: the smallest result, since tables cannot be narrower.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return max(least, int(given))
    try:
        return max(least, os.get_terminal_size((stream or sys.stdout).fileno()).columns or WITHOUT_TERMINAL)
    except (OSError, ValueError, AttributeError):  # a pipe, a file, or no real stream
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
    """Return one line of prose as lines of at most `width` terminal columns; a word, such as a path, is never broken.

    Args:
        text: a line; spaces at its beginning stay.
        width: of a line.
        indent: before all lines except the first.
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
    """Return a sentence in lines that fit the terminal, see `filled`."""
    return "\n".join(filled(text, terminal_width(), indent))


#: The places at which a line may end: between words, and in a word that is too wide.
_SPACES = re.compile(r"(?<=\s)(?=\S)")
_SEPARATORS = re.compile(r"(?<=[+,/;])|(?<=\.)(?=[a-z])")
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
    """The widths of a table's columns, with which its lines can be printed one by one.

    Args:
        rows: the header, and all rows or samples that are as wide as them.
        left: see `table`, as the other arguments.
        widths: minimum widths of the first columns.
        gap: between two columns.
        rule: the sign of the line below the header.
        whole: columns that are never broken.
        width: of a line.
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
        """The header, aligned at the bottom, and the line below it."""
        total = sum(self._sizes) + len(self._gap) * (len(self._sizes) - 1)
        lines = self._lines(self._header, top=False)
        return "\n".join([*lines, *([self._rule * min(total, self._limit)] if self._rule else [])])

    def row(self, cells: Sequence[str]) -> str:
        """The lines of a row."""
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
    """Return the smallest width of each column of a `table`: of numbers and paths that of the widest one."""
    found = []
    for i, (header, *cells) in enumerate(zip(*rows, strict=True)):
        body = max(map(display_width, cells), default=0)
        words = max(map(display_width, header.split()), default=0)
        broken = i in left and i not in whole
        found.append(max(min(body, _NARROW), min(words, _NARROW)) if broken else max(body, min(words, _NARROW)))
    return found


def spelled(metric: str) -> str:
    """The name of a metric as text: ``mean_iou`` → ``mean IoU``."""
    return {"mean_iou": "mean IoU"}.get(metric, metric.replace("_", " "))
