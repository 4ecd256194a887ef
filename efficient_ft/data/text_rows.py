"""Read rows of texts from tables (.csv, .tsv) and JSON lines."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, some
from efficient_ft.data.tables import (
    MISSING,
    Record,
    Records,
    TableFormat,
    clean_name,
    read_records,
    require_columns,
    short,
)


@dataclass(frozen=True, slots=True)
class Row:
    """A text or a pair of texts, with its label and location."""

    text: tuple[str, ...]  # one or two texts
    label: str  # class name; empty if the label is missing
    file: str  # name of the file, shown in messages
    line: int | None = None  # line number, or None if the file contains a single text
    problem: str | None = None  # short reason why the row cannot be used, or None if the row can be used

    @property
    def place(self) -> str:
        """The file name and the line number, shown in messages."""
        return self.file if self.line is None else f"{self.file}, line {self.line}"


def read_rows(path: Path, settings: TextConfig, advice: str = "") -> tuple[list[Row], Records]:
    """Read the rows of a .csv, .tsv or .jsonl file, which may be compressed with gzip.

    Return all rows, including unusable rows, and the records from which they were created.

    Raise `UserError` if the format is not supported, a column is missing, or the rows are malformed, and `SettingError`
    if a setting is incompatible with the file. If a column is missing, the message ends with `advice`.
    """
    choose = "Set data.text.columns=[NAME] and data.text.label=NAME."
    about = (settings.names, settings.delimiter, settings.quotes, settings.encoding)
    form, name = TableFormat("data.text", settings.columns, settings.label, *about, choose), printable(path)
    read = read_records(path, form)
    wanted = [*(("columns", column) for column in settings.columns), ("label", settings.label)]
    require_columns(path, read, form, wanted, advice)
    numbers: Counter[str] = Counter()
    missing = MISSING.union(map(str, settings.missing))
    rows = [_row(name, record, settings, missing, numbers, len(read.columns)) for record in read.records]
    read.notes += [
        f"{name}: numbers and booleans in column {column!r} are converted to text in {counted(count, 'row')}."
        for column, count in numbers.items()
    ]
    return rows, read


def _row(
    name: str, record: Record, settings: TextConfig, missing: Container[str], numbers: Counter[str], width: int
) -> Row:
    """Convert a record to a row. For each column, `numbers` counts the values that are numbers or booleans."""
    for column in (*settings.columns, settings.label):
        value = record.cells.get(column)
        if isinstance(value, list | dict):
            kind = "a list" if isinstance(value, list) else "an object"
            advice = "Join the parts into one text." if column in settings.columns else "Write one label per row."
            raise UserError(f"{name}, line {record.first}: {column!r} is {kind} instead of a text. {advice}")
        if column in settings.columns and isinstance(value, int | float) and value == value:
            numbers[column] += 1
    values = [record.cells.get(column) for column in settings.columns]
    text = tuple("" if value is None or value != value else str(value).strip() for value in values)
    value = record.cells.get(settings.label)
    label = "" if value is None or value in (math.inf, -math.inf) else clean_name(str(value))
    problem = None
    lacks = [column for column in (*settings.columns, settings.label) if column not in record.cells]
    if record.width is not None:
        problem = f"{counted(record.width, 'cell')} for {counted(width, 'column')}"
    elif lacks and lacks[0] != settings.label:
        problem = f"the key {lacks[0]!r} is missing ({_keys(record.cells)})"
    elif not all(text):
        problem = "an empty text"
    elif label == settings.label and text == tuple(settings.columns):
        problem = "a repeated header line"
    elif label in missing:
        problem = "no label"
        if label:
            problem += f" ({label!r}{'' if label in MISSING else '; data.text.missing'})"
        elif lacks:
            problem += f" (the key {lacks[0]!r} is missing; {_keys(record.cells)})"
    try:
        "".join((*text, label)).encode()
    except UnicodeEncodeError:
        problem = "not valid Unicode"
    return Row(text, label, name, record.first, problem)


def _keys(cells: Mapping[str, Any]) -> str:
    return f"keys: {some([short(key) for key in cells], 5)}" if cells else "no keys"
