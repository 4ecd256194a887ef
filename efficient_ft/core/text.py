"""Functions that format text for terminals: tables, wrapped lines, and text from untrusted sources."""

from __future__ import annotations

import csv
import io
import os
import re
import sys
import unicodedata
from collections.abc import Iterable, Sequence
from typing import Any, TextIO

#: Control characters, and characters that change the text direction.
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def plain_text(text: str) -> str:
    r"""Replace the control characters of `text`, except line feeds and tabs, with escape sequences such as ``\x1b``."""
    return _CONTROL.sub(lambda found: f"\\x{ord(found[0]):02x}", text)


def plain_line(text: str) -> str:
    """Return `text` as a single line, with all control characters escaped, including line feeds and tabs."""
    return plain_text(text).replace("\n", "\\x0a").replace("\t", "\\x09")


def hydra_quoted(text: str) -> str:
    """Quote `text` as a value in an override of Hydra.

    Hydra removes backslashes only before a quote. All other backslashes are part of the value.
    """
    escaped = re.sub(r"(\\*)('|\Z)", lambda found: found[1] * 2 + ("\\'" if found[2] else ""), text)
    return f"'{escaped}'"


#: Regular expressions for the first character of a cell that spreadsheets evaluate as a formula, and for numbers.
#: Numbers are not formulas even if they begin with one of these characters.
_FORMULA = re.compile("[=+\\-@\t\r\n\uff1d\uff0b\uff0d\uff20]")
_NUMBER = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)([eE][+-]?\d+)?|[+-](inf|nan)?")
#: Characters that Markdown uses for escapes, table cells, links and code.
_MARKUP = re.compile(r"[\\|\[\]`]")


def csv_cell(text: str) -> str:
    """Format `text` for a cell of a CSV file, so that spreadsheets do not evaluate it as a formula.

    Text that begins like a formula is prefixed with an apostrophe, unless it is a number. Control characters are
    escaped.
    """
    plain = plain_text(text)
    return f"'{plain}" if _FORMULA.match(plain) and not _NUMBER.fullmatch(plain) else plain


def csv_text(rows: Iterable[Iterable[Any]]) -> str:
    """Format rows as CSV. Text is formatted with `csv_cell`, and None becomes an empty cell."""
    out = io.StringIO()
    writer = csv.writer(out, lineterminator="\n")
    for row in rows:
        writer.writerow(csv_cell(cell) if isinstance(cell, str) else cell for cell in row)
    return out.getvalue()


def json_plain(text: str) -> str:
    """Escape control characters in JSON text, so that a terminal does not interpret the control characters."""
    return _CONTROL.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def markdown_text(text: str) -> str:
    """Return `text` as a single line of Markdown in which characters for links, code and HTML are escaped."""
    plain = _MARKUP.sub(lambda found: f"\\{found[0]}", plain_line(text))
    return plain.replace("&", "&amp;").replace("<", "&lt;")


#: Line width that is used if the output is not a terminal.
WITHOUT_TERMINAL = 100


def printable(path: str | os.PathLike[str]) -> str:
    """Return a printable path. Bytes that are not valid UTF-8 are replaced with replacement characters."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def terminal_width(stream: TextIO | None = None, least: int = 80) -> int:
    """Return the value of ``COLUMNS`` if it is set, otherwise the width of the terminal, or 100 without a terminal.

    The width is at least `least`, because tables cannot be narrower. By default, `stream` is the standard output.
    """
    given = os.environ.get("COLUMNS", "")
    if given.isdigit() and int(given):
        return max(least, int(given))
    try:
        return max(least, os.get_terminal_size((stream or sys.stdout).fileno()).columns or WITHOUT_TERMINAL)
    except (OSError, ValueError, AttributeError):  # the stream is a pipe or file, or has no descriptor
        return WITHOUT_TERMINAL


def display_width(text: str) -> int:
    """Return the width of `text` in terminal columns.

    Wide characters occupy two columns. Combining and invisible characters occupy no column.
    """
    if text.isascii():
        return len(text)
    shown = (sign for sign in text if unicodedata.category(sign) not in ("Mn", "Me", "Cf"))
    return sum(2 if unicodedata.east_asian_width(sign) in "WF" else 1 for sign in shown)


def padded(text: str, width: int, left: bool = True) -> str:
    """Pad `text` with spaces to `width` terminal columns.

    The text is left-aligned if `left` is True, and right-aligned otherwise.
    """
    space = " " * (width - display_width(text))
    return text + space if left else space + text


def shortened(text: str, width: int) -> str:
    """Shorten `text` with an ellipsis to at most `width` terminal columns."""
    if display_width(text) <= width:
        return text
    return _head(text, width - 1) + "…"


def wrapped(text: str, width: int, indent: str = "") -> list[str]:
    """Wrap each line of `text` to `width` terminal columns.

    Lines are broken between words, or at separators inside long words. Continuation lines begin with `indent`.
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
    """Wrap a line to `width` terminal columns, and preserve leading spaces. The line is broken only at spaces.

    Continuation lines begin with `indent`.
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
    """Wrap a sentence to the width of the terminal (see `filled`)."""
    return "\n".join(filled(text, terminal_width(), indent))


#: Patterns of possible line breaks, between words and inside long words.
_SPACES = re.compile(r"(?<=\s)(?=\S)")
_SEPARATORS = re.compile(r"(?<=[+,/;])|(?<=\.)(?=[a-z])")
#: Minimum width of a text column, in terminal columns.
_NARROW = 24
#: Separator between columns.
_GAP = "  "


def _head(text: str, width: int) -> str:
    """Return the longest prefix of `text` that fits into `width` terminal columns (at least one character)."""
    end = next((i for i in range(1, len(text)) if display_width(text[: i + 1]) > width), len(text))
    return text[:end]


def table(
    rows: Sequence[Sequence[str]],
    *,
    left: Sequence[int] = (0,),
    rule: str = "─",
    whole: Sequence[int] = (),
    width: int | None = None,
) -> str:
    """Format a table with aligned columns so that its lines fit the terminal.

    A column is as wide as its widest cell. If the table is too wide, headers and text columns are wrapped. If the table
    is still too wide, it is divided into several tables, each of which begins with the first column.

    Args:
        rows: header row and body rows. Rows with fewer cells than the widest row are padded with empty cells.
        left: indices of the text columns, which are aligned to the left. Other columns are aligned to the right.
        rule: character of the line below the header. If empty, there is no line.
        whole: indices of the columns that are never wrapped, for example columns of paths.
        width: maximum width of a line. If None, the width of the terminal is used.
    """
    limit = terminal_width() if width is None else width
    count = max(len(row) for row in rows)
    full = [[*map(plain_line, row), *[""] * (count - len(row))] for row in rows]
    least = least_widths(full, left=left, whole=whole)
    panels: list[list[int]] = [[0]]
    for i in range(1, count):
        needed = sum(least[j] for j in panels[-1]) + len(_GAP) * len(panels[-1]) + least[i]
        if needed > limit and len(panels[-1]) > 1:
            panels.append([0])
        panels[-1].append(i)
    texts = []
    for panel in panels:
        cells = [[row[i] for i in panel] for row in full]
        layout = Layout(
            cells,
            left=[k for k, i in enumerate(panel) if i in left],
            rule=rule,
            whole=[k for k, i in enumerate(panel) if i in whole],
            width=limit,
        )
        texts.append("\n".join([layout.head(), *map(layout.row, cells[1:])]))
    return "\n\n".join(texts)


class Layout:
    """Layout of a table whose rows are printed one at a time.

    Args:
        rows: header row and the rows that determine the column widths (all rows, or sample rows of the same width).
        left, rule, whole, width: see `table`.
    """

    def __init__(
        self,
        rows: Sequence[Sequence[str]],
        *,
        left: Sequence[int] = (0,),
        rule: str = "─",
        whole: Sequence[int] = (),
        width: int | None = None,
    ) -> None:
        self._header, self._left, self._rule, self._whole = rows[0], left, rule, whole
        self._limit = terminal_width() if width is None else width
        self._sizes = least_widths(rows, left=left, whole=whole)
        room = self._limit - len(_GAP) * (len(self._sizes) - 1)
        columns = list(zip(*rows, strict=True))
        # Columns are widened until their cells fit on one line, and then until their headers also fit.
        for part in (slice(1, None), slice(0, None)):
            wanted = [max(map(display_width, column[part]), default=0) for column in columns]
            for i in sorted(range(len(wanted)), key=lambda i: wanted[i] - self._sizes[i]):
                self._sizes[i] += max(0, min(wanted[i] - self._sizes[i], room - sum(self._sizes)))

    def head(self) -> str:
        """Return the header, aligned at the bottom, and the line below the header."""
        total = sum(self._sizes) + len(_GAP) * (len(self._sizes) - 1)
        lines = self._lines(self._header, top=False)
        return "\n".join([*lines, *([self._rule * min(total, self._limit)] if self._rule else [])])

    def row(self, cells: Sequence[str]) -> str:
        """Return a row as one or more lines."""
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
            _GAP.join(
                padded(part, size, i in self._left)
                for i, (part, size) in enumerate(zip(line, self._sizes, strict=True))
            ).rstrip()
            for line in zip(*cells, strict=True)
        ]


def least_widths(rows: Sequence[Sequence[str]], *, left: Sequence[int] = (0,), whole: Sequence[int] = ()) -> list[int]:
    """Return the minimum width of each column of a `table`.

    A column of numbers or paths must be as wide as its widest cell.
    """
    found = []
    for i, (header, *cells) in enumerate(zip(*rows, strict=True)):
        body = max(map(display_width, cells), default=0)
        words = max(map(display_width, header.split()), default=0)
        broken = i in left and i not in whole
        found.append(max(min(body, _NARROW), min(words, _NARROW)) if broken else max(body, min(words, _NARROW)))
    return found


def spelled(metric: str) -> str:
    """Return the display name of a metric: ``mean_iou`` → ``mean IoU``; ``mae_width`` → ``MAE width``."""
    score, of, target = metric.partition("_")
    if of and score in ("mae", "rmse"):
        return f"{score.upper()} {target}"
    return {"mean_iou": "mean IoU", "mean_average_precision": "mAP", "r2": "R²", "mae": "MAE", "rmse": "RMSE",
            "f1_macro": "macro F1", "f1_micro": "micro F1"}.get(metric, metric.replace("_", " "))  # fmt: skip
