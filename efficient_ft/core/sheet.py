"""Table output as text for a terminal, Markdown, CSV, JSON or LaTeX."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from efficient_ft.core import text
from efficient_ft.core.errors import SettingError

Cell = str | int | float | None

#: Formats of a table, and the subset of these formats that programs read.
FORMS = ("text", "markdown", "csv", "json", "latex")
DATA = ("csv", "json")


@dataclass(frozen=True)
class Column:
    """Display options of a column in text, Markdown and LaTeX tables.

    CSV and JSON tables contain the name and the raw values of the column instead.

    Attributes:
        rank: if the table does not fit the terminal, columns with the highest rank are omitted first. Columns with rank
            0 are never omitted.
        show: function that formats a value, or None for the default format.
        title: header of the column. If empty, the name of the column is used.
        words: if True, the column is aligned to the left and its cells are wrapped.
    """

    rank: int = 0
    show: Callable[[Any], str] | None = None
    title: str = ""
    words: bool = False


def render(
    header: Sequence[str],
    rows: Sequence[Sequence[Cell]],
    form: str,
    left: int = 1,
    columns: Mapping[str, Column] | None = None,
    chosen: Sequence[str] = (),
) -> str:
    """Format a table as text.

    Args:
        header: names of the columns.
        rows: cells of each row. None represents an empty cell. Numbers remain numbers in CSV and JSON.
        form: format of the table, one of `FORMS`.
        left: number of leading columns that contain text.
        columns: dict from column names to display options, in display order. Columns without options are shown last.
        chosen: names or titles (or parts of them) of the columns to show in addition to the first column. ``["all"]``
            shows all. If empty, a terminal shows the non-empty columns that fit, and other formats contain all columns.

    Raises:
        SettingError: If an item of `chosen` does not occur in any name or title.
    """
    if form == "text":
        lines = Lines(header, rows, left, columns, chosen)
        return "\n".join([lines.panels(), *lines.foot()])
    of, titles = _described(header, left, columns)
    if form in DATA:
        titles = {name: of[name].title or name for name in header}
    names = _chosen(titles, chosen) if chosen else list(titles)
    table = [[row[header.index(name)] for name in names] for row in rows]
    if form == "csv":
        return text.csv_text((names, *table)).rstrip("\n")
    if form == "json":
        return _json(names, table)
    shown = [[_person(cell, of[name]) for name, cell in zip(names, row, strict=True)] for row in table]
    write = {"markdown": _markdown, "latex": _latex}[form]
    return write([titles[name] for name in names], shown, [of[name].words for name in names])


class Lines:
    """Table for the terminal whose rows can be printed one at a time.

    Args:
        rows: rows that determine the column widths. Pass all rows, or sample rows of the same width.
        header, left, columns, chosen: see `render`. An invalid value of `chosen` raises the same error.
    """

    def __init__(
        self,
        header: Sequence[str],
        rows: Sequence[Sequence[Cell]],
        left: int = 1,
        columns: Mapping[str, Column] | None = None,
        chosen: Sequence[str] = (),
    ) -> None:
        self._header = list(header)
        self._of, titles = _described(header, left, columns)
        empty = {name for i, name in enumerate(header) if rows and all(row[i] is None for row in rows)}
        known = [name for name in titles if name not in empty or not self._of[name].rank]
        self._names = _chosen(titles, chosen) if chosen else self._fitting(known, titles, rows)
        hidden = () if chosen else (titles[name] for name in known if name not in self._names)
        self._hidden = list(dict.fromkeys(hidden))
        self._table = [[titles[name] for name in self._names], *(self._cells(row, self._names) for row in rows)]
        self._left = [i for i, name in enumerate(self._names) if self._of[name].words]
        self._layout = text.Layout(self._table, left=self._left)

    def head(self) -> str:
        """Return the header."""
        return self._layout.head()

    def row(self, row: Sequence[Cell]) -> str:
        """Return a row as one or more lines. `row` must contain the cells of all columns, including omitted columns."""
        return self._layout.row(self._cells(row, self._names))

    def foot(self) -> list[str]:
        """Return a list with a line that names the omitted columns, or an empty list if no column is omitted."""
        return [_not_shown(self._hidden)] if self._hidden else []

    def panels(self) -> str:
        """Return the table as text. A table that is too wide is divided into several tables."""
        return text.table(self._table, left=self._left)

    def _cells(self, row: Sequence[Cell], names: Sequence[str]) -> list[str]:
        return [_person(row[self._header.index(name)], self._of[name]) for name in names]

    def _fitting(self, names: Sequence[str], titles: Mapping[str, str], rows: Sequence[Sequence[Cell]]) -> list[str]:
        """Return the columns that fit the terminal. Columns with the highest rank are omitted first, from the right."""
        table = [[titles[name] for name in names], *(self._cells(row, names) for row in rows)]
        left = [i for i, name in enumerate(names) if self._of[name].words]
        least = dict(zip(names, text.least_widths(table, left=left), strict=True))
        while sum(least.values()) + 2 * (len(least) - 1) > text.terminal_width():
            last = max(reversed(least), key=lambda name: self._of[name].rank)
            if not self._of[last].rank:
                break
            del least[last]
        return list(least)


def _described(
    header: Sequence[str], left: int, columns: Mapping[str, Column] | None
) -> tuple[dict[str, Column], dict[str, str]]:
    """Return the display options of each column, and the titles in display order."""
    of = {name: Column(words=i < left) for i, name in enumerate(header)} | dict(columns or {})
    order = sorted(header, key=[*(columns or {}), *header].index)
    return of, {name: of[name].title or text.plain_line(name) for name in order}


def _not_shown(names: Sequence[str]) -> str:
    """Return the line that names the omitted columns and the option that shows them."""
    do = " (--columns all, or --columns NAME,...)"
    for count in range(len(names), 0, -1):
        more = f" and {len(names) - count} more" if count < len(names) else ""
        line = f"Not shown: {', '.join(names[:count])}{more}{do}"
        if text.display_width(line) <= text.terminal_width():
            return line
    return f"Not shown: {len(names)} columns{do}"


def _chosen(titles: Mapping[str, str], chosen: Sequence[str]) -> list[str]:
    """Return the first column and the columns that match the words in `chosen`, in the order of the words."""
    found = [next(iter(titles))]
    for word in map(str.lower, chosen):
        same = [name for name, title in titles.items() if word in (name.lower(), title.lower())]
        part = [name for name, title in titles.items() if word == "all" or word in f"{name} {title}".lower()]
        if not part:
            raise SettingError("--columns", word, ["all", *titles.values()])
        found += [name for name in same or part if name not in found]
    return found


def _person(cell: Cell, column: Column) -> str:
    """Format a cell of a text, Markdown or LaTeX table."""
    if cell is None:
        return ""
    if column.show is not None and not isinstance(cell, str):
        return column.show(cell)
    return f"{cell:.6g}" if isinstance(cell, float) else text.plain_line(str(cell))


def _markdown(header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[bool]) -> str:
    rule = ["---" if left else "--:" for left in words]
    lines = [list(map(text.markdown_text, header)), rule, *(list(map(text.markdown_text, row)) for row in rows)]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _json(header: Sequence[str], rows: Sequence[Sequence[Cell]]) -> str:
    assert len(set(header)) == len(header), header
    objects: list[dict[str, Any]] = [dict(zip(header, row, strict=True)) for row in rows]
    lines = (text.json_plain(json.dumps(one, ensure_ascii=False)) for one in objects)
    return "[\n" + ",\n".join(f"  {line}" for line in lines) + "\n]"


def _latex(header: Sequence[str], rows: Sequence[Sequence[str]], words: Sequence[bool]) -> str:
    columns = "".join("l" if left else "r" for left in words)
    lines = [" & ".join(map(_escaped, row)) + r" \\" for row in [header, *rows]]
    body = [rf"\begin{{tabular}}{{{columns}}}", r"\toprule", lines[0], r"\midrule", *lines[1:], r"\bottomrule"]
    return "\n".join([*body, r"\end{tabular}"])


#: LaTeX code for special characters and for characters that the default fonts do not contain.
_LATEX = {
    "\\": r"\textbackslash{}",
    "–": "--",
    "…": r"\ldots{}",
    "×": r"$\times$",
    "^": r"\textasciicircum{}",
    "~": r"\textasciitilde{}",
    "µ": r"$\mu$",
    "±": r"$\pm$",
    **{sign: f"\\{sign}" for sign in "&%$#_{}"},
}


def _escaped(cell: str) -> str:
    return "".join(_LATEX.get(sign, sign) for sign in cell)
