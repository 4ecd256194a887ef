"""Recognize the columns of a label file, and the labels of an image in its cells."""

from __future__ import annotations

import ast
import json
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from efficient_ft.config.schema import LabelsConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, some
from efficient_ft.data.images import is_image
from efficient_ft.data.splits import split_of
from efficient_ft.data.tables import (
    PARQUET,
    TABLES,
    Record,
    Records,
    TableFormat,
    clean_name,
    read_records,
    require_columns,
    short,
    suffix_of,
)  # fmt: skip

#: Common names of columns in lower case without punctuation, in order of preference.
FILES = (
    "file", "filename", "filepath", "path", "image", "imagefile", "imagefilename", "imagename", "imagepath", "img",
    "imgfile", "imgname", "imgpath", "imageid", "imgid", "idcode", "id", "name", "photo", "picture",
)  # fmt: skip
_SPLITS = ("split", "set", "subset", "partition", "fold", "phase", "usage")
#: Separators of labels in a cell that are recognized, and values of `data.labels.separator` with a meaning.
_SEPARATORS = ("|", ";", ",")
_NAMED: dict[str, str | None] = {"none": None, "space": " "}
_TRUE, _FALSE = frozenset({"1", "1.0", "true"}), frozenset({"0", "0.0", "false"})


def read_table(path: Path, settings: LabelsConfig) -> Records:
    """Read a label file, and check that the columns in `settings` exist. Raise `UserError` or `SettingError`."""
    given = settings.label
    labels = [] if given is None else [given] if isinstance(given, str) else given
    split = [] if settings.split in (None, "none") else [str(settings.split)]
    columns = [name for name in (settings.image, *labels, *split) if name is not None]
    about = (settings.names, settings.delimiter, settings.quotes, settings.encoding)
    form = TableFormat("data.labels", columns, "", *about, parquet=True)
    read = read_records(path, form)
    if (data := next(filter(_is_image, read.columns), None)) is not None and without_header(path, settings):
        raise no_header(path, read, data, "an image file", image=data)
    wanted = [*(("image", one) for one in (settings.image,) if one), *(("label", one) for one in labels)]
    require_columns(path, read, form, [*wanted, *(("split", one) for one in split)], _advice(path, read, settings))
    return read


def find_image(path: Path, read: Records, settings: LabelsConfig) -> str:
    """Return the column with the image files. Raise `UserError` if the column cannot be recognized."""
    column = settings.image or named(read.columns, FILES)
    if column is None:  # the first column whose values are all names of image files
        column = next((c for c in read.columns if all(_is_image(one.cells.get(c)) for one in read.records)), None)
    if column is None:
        raise unknown_column(path, read, settings, "image", "the column with the image files")
    return column


def find_split(columns: Sequence[str], settings: LabelsConfig) -> str | None:
    """Return the column with the splits, or None if there is no such column."""
    return named(columns, _SPLITS) if settings.split is None else None if settings.split == "none" else settings.split


def named(columns: Sequence[str], names: Sequence[str]) -> str | None:
    """Return the column that has the first matching name, regardless of case and punctuation, or None."""
    plain = {re.sub(r"[\W_]+", "", column.casefold()): column for column in reversed(columns)}
    return next((plain[name] for name in names if name in plain), None)


def _is_image(value: Any) -> bool:
    return isinstance(value, str) and is_image(value.strip())


def without_header(path: Path, settings: LabelsConfig) -> bool:
    """Return True if the first line of a file is read as column names, but could contain data."""
    return settings.names is None and suffix_of(path) in TABLES


def no_header(path: Path, read: Records, data: str, what: str, image: str | None = None) -> UserError:
    """Create the error for a column name `data` that is `what`, for example an image file."""
    return UserError(
        f"{printable(path)}: the first line is read as column names, but {short(data)!r} is {what}. If the first line"
        f" contains data, set {_names(read.columns, image)}."
    )


def _advice(path: Path, read: Records, settings: LabelsConfig) -> str:
    """Return advice on a Parquet file with unread columns or on a file that may have no header, or an empty string."""
    if suffix_of(path) == PARQUET:
        return "".join(f" {note}" for note in read.notes)
    if not without_header(path, settings) or len(read.columns) < 2 or named(read.columns, (*FILES, *_SPLITS)):
        return ""
    return f" If the first line contains data, set {_names(read.columns)}."


def _names(columns: Sequence[str], image: str | None = None) -> str:
    """Suggest a value of ``data.labels.names`` for a file without a header, given its first line."""
    image = image or next(filter(_is_image, columns), columns[0])
    names: list[str] = []
    for number, cell in enumerate(columns):
        likely = "file" if cell == image else "split" if split_of(cell) else "label"
        names.append(f"other{number}" if likely in names else likely)
    return f"data.labels.names=[{','.join(names)}]"


def is_number(value: Any) -> bool:
    """Return True if a cell contains a number other than NaN."""
    try:
        return not isinstance(value, bool) and "_" not in str(value) and float(value) == float(value)
    except (TypeError, ValueError):
        return False


def unknown_column(path: Path, read: Records, settings: LabelsConfig, setting: str, what: str) -> UserError:
    """Create the error for a column that cannot be recognized."""
    shown = some([short(one) or "(no name)" for one in read.columns], 10)
    several = " or [NAME,NAME,…]" if setting == "label" and settings._task != "classification" else ""
    return UserError(
        f"{printable(path)}: {what} cannot be recognized. The columns are {shown}."
        f" Set data.labels.{setting}=NAME{several}.{_advice(path, read, settings)}"
    )


def cell_text(value: Any) -> str:
    """Return the value of a cell as text. Whole numbers have no decimal point, and missing values are empty."""
    if value is None or value != value:
        return ""
    if isinstance(value, float) and value.is_integer():
        value = int(value)
    return clean_name(str(value))


def flag(value: Any) -> bool | None:
    """Return the value of a cell with 0 or 1, or None if the cell contains something else."""
    text = cell_text(value).casefold()
    return True if text in _TRUE else False if text in _FALSE else None


def find_separator(cells: Sequence[Any], given: str | None, column: str, name: str) -> tuple[str | None, list[str]]:
    """Return the separator of the labels in the cells of a column, and notes that state how the cells are read.

    The separator is None if each cell contains one label or a list. `given` is the value of `data.labels.separator`,
    and `name` is the name of the file.

    Raises:
        UserError: If `given` is None and the cells can be read in several ways: if different separators occur, or if
            spaces could also separate labels.
    """
    texts = Counter(text for cell in cells if not isinstance(cell, list) and (text := cell_text(cell)))
    texts = Counter({text: count for text, count in texts.items() if not text.startswith("[")})
    if not texts:
        lists = any(cell_text(cell) for cell in cells)
        return None, [f"Each cell of column {column!r} contains a list of labels."] if lists else []
    setting = "data.labels.separator"
    separator = _only_separator(texts, f"{name}, column {column!r}") if given is None else _NAMED.get(given, given)
    example = next((text for text in texts if separator is None or separator in text), None)
    if separator is not None and example is not None:
        return separator, [
            f"The labels of an image are separated by {separator!r}, as in {short(example)!r} ({setting})."
        ]
    example = next((text for text in texts if re.search(r"[ |;,]", text)), next(iter(texts)))
    why = "" if separator is None else f"No cell contains {setting}={separator!r}. "
    note = f"{why}Each cell of column {column!r} contains one label, for example {short(example)!r}."
    return separator, [
        f"{note} If spaces separate labels, set {setting}=space." if " " in example and given is None else note
    ]


def _only_separator(texts: Counter[str], place: str) -> str | None:
    """Return the separator in the cells, or None if there is no separator. `texts` counts the rows with each cell.

    Without a separator, a cell with spaces is one label only if none of its words occurs in another cell.
    """
    setting = "data.labels.separator"
    used = {
        one: next(text for text in texts if one in text) for one in _SEPARATORS if any(one in text for text in texts)
    }
    if len(used) > 1:
        shown = ", ".join(
            f"{one!r} in {counted(sum(count for text, count in texts.items() if one in text), 'row')}"
            f" ({short(example)!r})"
            for one, example in used.items()
        )
        raise UserError(
            f"{place}: the cells contain several separators: {shown}. Write all labels with one separator. If the other"
            f" characters are part of the labels, set {setting} to the separator."
        )
    separator = next(iter(used), None)
    labels = dict.fromkeys(label for text in texts for label in _split(text, separator))
    words = Counter(word for label in labels for word in set(label.split()))
    for label in labels:
        parts = label.split()
        if len(parts) == 1:
            continue
        if separator is None and any(words[part] > 1 for part in parts):
            raise UserError(
                f"{place}: {short(label)!r} could be one label, or {len(parts)} labels separated by spaces. If each"
                f" cell contains one label, set {setting}=none. If spaces separate labels, set {setting}=space."
            )
        if separator is not None and all(part in labels for part in parts):
            raise UserError(
                f"{place}: the labels are separated by {separator!r}, but {short(label)!r} could be one label, or"
                f" {len(parts)} labels separated by spaces, because each of its words is also a label. If it is one"
                f" label, set '{setting}=\"{separator}\"'. Otherwise, write all labels with one separator."
            )
    return separator


def _split(text: str, separator: str | None) -> list[str]:
    if separator is None:
        return [text] if text else []
    return [name for one in text.split(None if separator == " " else separator) if (name := clean_name(one))]


def labels_in(cell: Any, separator: str | None, place: str) -> list[str]:
    """Return the labels in a cell: a list, a list in JSON or Python notation, or labels with a separator."""
    if isinstance(cell, Mapping):
        raise UserError(f"{place}: the label is an object instead of a text or a list. Write a list of labels.")
    if isinstance(cell, list):
        return [text for one in cell if (text := cell_text(one))]
    text = cell_text(cell)
    if text.startswith("[") and text.endswith("]"):
        for parse in (json.loads, ast.literal_eval):
            try:
                parsed = parse(text)
            except (ValueError, SyntaxError, RecursionError):
                continue
            return [name for one in parsed if (name := cell_text(one))]
        raise UserError(f'{place}: the list {short(text)} is not valid JSON. Write, for example, ["cat", "dog"].')
    return _split(text, separator)


def place_of(path: Path, record: Record) -> str:
    """Return the name of the file and the line or row of a record, for messages."""
    unit = "row" if suffix_of(path) == PARQUET else "line"
    return f"{printable(path.name)}, {unit} {record.first}"
