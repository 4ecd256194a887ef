"""Read rows of texts from tables (.csv, .tsv) and JSON lines."""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import io
import json
import math
import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.core.text import plain_line, printable
from efficient_ft.data.counts import counted, shortened, some, verb
from efficient_ft.data.file_list import unreadable

#: Byte order marks and their encodings. UTF-32 precedes UTF-16, because the little-endian mark of UTF-32 begins with
#: the mark of UTF-16.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
#: First bytes of files that are not text, and descriptions shown in messages.
_OTHERS = (
    (b"PK\x03\x04", "a ZIP archive, like all .xlsx spreadsheets. Unpack the archive, or save the sheet as .csv"),
    (b"\xd0\xcf\x11\xe0", "a spreadsheet or document in an old format. Save the file as .csv"),
    (b"PAR1", "a Parquet file. Convert the file with pandas: read_parquet(…).to_json(…, orient='records', lines=True)"),
    (b"BZh", "compressed (bzip2). Unpack the file"),
    (b"\xfd7zXZ", "compressed (xz). Unpack the file"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd). Unpack the file"),
    (b"%PDF", "a PDF file. Extract the text from the file"),
    (b"version https://git-lfs", "a Git LFS pointer instead of the file. Download the file with git lfs pull"),
    (b"SQLite format 3", "a database. Export the table as .csv"),
)


def read_text(path: Path, encoding: str | None) -> tuple[str, str | None]:
    """Read a text file, which may be compressed with gzip. A byte order mark takes precedence over `encoding`.

    Return the text without a byte order mark, and a sentence about the encoding, or None for plain UTF-8. Raise
    `UserError` if the file cannot be read, is not text, or has a different encoding. If the encoding is different, the
    message suggests an encoding.
    """
    raw = _bytes(path)
    name = printable(path)
    marked = next(((mark, known) for mark, known in MARKS if raw.startswith(mark)), None)
    chosen = marked[1] if marked else encoding or "utf-8"
    zeros = raw[:2000:2].count(0), raw[1:2000:2].count(0)
    if not marked and encoding is None and sum(zeros) > min(len(raw), 2000) / 5:
        likely = "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
        text = f"The file {name} looks like {likely} without a byte order mark."
        raise UserError(f"{text} Set data.text.encoding={likely}.")
    try:
        text = (raw[len(marked[0]) :] if marked else raw).decode(chosen)
    except (LookupError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise _undecodable(name, raw, error, chosen) from error
        raise SettingError("data.text.encoding", chosen, "a Python encoding, for example cp1252") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        count = counted(text.count("\0"), "NUL character")
        raise UserError(
            f"{name}, line {line}: the text contains {count}. The file is damaged or has a different encoding. Remove"
            " these characters, or set data.text.encoding."
        )
    if encoding is not None and not marked and codecs.lookup(encoding).name != "utf-8" and _is_utf8(raw):
        return text, f"The file {name} is valid UTF-8, but is read as {encoding} (data.text.encoding)."
    return text, f"The file {name} is read as {chosen} (byte order mark)." if marked and chosen != "utf-8" else None


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"The file {printable(path)} is a damaged gzip file ({error}). Copy the file again.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except MemoryError as error:
        text = f"The file {printable(path)} does not fit into memory. Split the file into several files."
        raise UserError(text) from error
    for first, kind in _OTHERS:
        if raw.startswith(first):
            raise UserError(f"The file {printable(path)} is {kind}.")
    return raw


def _is_utf8(raw: bytes) -> bool:
    try:
        return not raw.decode().isascii()
    except UnicodeDecodeError:
        return False


def _undecodable(name: str, raw: bytes, error: UnicodeDecodeError, chosen: str) -> UserError:
    """Create the error for bytes that are invalid in the encoding `chosen`. The message suggests a likely encoding."""
    line = raw.count(b"\n", 0, error.start) + 1
    kind = "UTF-8" if chosen == "utf-8" else chosen
    where = f"{name}, line {line}: the text is not valid {kind} (byte {raw[error.start]:#04x})."
    if chosen != "utf-8":
        return UserError(f"{where} Set data.text.encoding to the encoding of the file, or to null for UTF-8.")
    replaced = raw.decode(errors="replace")
    bad = replaced.count("\ufffd")
    good = sum(not character.isascii() for character in replaced) - bad
    if good > bad:
        return UserError(
            f"{where} The file is damaged or mixes encodings: {counted(good, 'non-ASCII character')}"
            f" {verb(good, 'is', 'are')} valid UTF-8, but {bad} {verb(bad, 'is', 'are')} not."
            " Correct the invalid lines, or remove the invalid bytes with iconv -c -f utf-8 -t utf-8."
        )
    high = sum(byte >= 0x80 for byte in raw)
    letters = sum(byte in range(0x41, 0x7B) for byte in raw)
    if high > letters / 2 or _is_eastern(raw):
        known = "for example cp1251 (Cyrillic), gb18030 (Chinese) or shift_jis (Japanese)"
        guess = f"Set data.text.encoding to the encoding of the file, {known}."
    else:
        western = "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", raw) else "cp1252"  # undefined bytes of cp1252
        guess = f"The text may be {western}. Set data.text.encoding={western}, and check the accented letters."
    return UserError(f"{where} {guess} You can also convert the file with iconv -f ENCODING -t utf-8.")


def _is_eastern(raw: bytes) -> bool:
    """Return True if most non-ASCII bytes are adjacent.

    Adjacent bytes are typical of multi-byte encodings, but not of accented letters in single-byte encodings.
    """
    runs = re.findall(rb"[\x80-\xff]+", raw)
    return sum(len(run) for run in runs if len(run) >= 4) * 2 > sum(map(len, runs))


_TABLES, _JSON = (".csv", ".tsv"), (".jsonl", ".ndjson")
EXTENSIONS = (*_TABLES, *_JSON)
_DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
#: Values that common programs write for missing labels. ``data.text.missing`` adds further values.
_MISSING = frozenset(
    ["", "nan", "NaN", "NAN", "-nan", "<NA>", "NaT", r"\N", "#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NUM!",
     "#NULL!"]
)  # fmt: skip
_LETTERS = 40  # maximum length of a name in messages

csv.field_size_limit(1 << 30)


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


@dataclass
class Rows:
    """The rows of a file."""

    rows: list[Row] = field(default_factory=list)  # all rows, including unusable rows
    lines: int = 0  # number of lines in the file
    notes: list[str] = field(default_factory=list)  # assumptions made while reading the file, one sentence each
    columns: list[str] = field(default_factory=list)  # column names

    @property
    def origin(self) -> str:
        """The numbers of rows and lines as text."""
        return f"{counted(len(self.rows), 'row')} in {counted(self.lines, 'line')}"


@dataclass
class _Record:
    """The cells of a row, keyed by column, and the numbers of its first and last line.

    `width` is the number of cells if this number differs from the number of columns, or None otherwise.
    """

    cells: dict[str, Any]
    first: int
    last: int
    width: int | None = None


def suffix_of(path: Path) -> str:
    """Return the extension of a file in lower case, without ``.gz``."""
    return Path(path.name.lower().removesuffix(".gz")).suffix


@functools.lru_cache(maxsize=4096)
def clean_name(name: str) -> str:
    """Normalize a class name to NFC, and remove repeated, leading or trailing spaces and zero-width characters."""
    return " ".join(re.sub("[\ufeff\u200b\u2060]", "", unicodedata.normalize("NFC", name)).split())


def read_rows(path: Path, settings: TextConfig, advice: str = "") -> Rows:
    """Read the rows of a .csv, .tsv or .jsonl file, which may be compressed with gzip.

    Raise `UserError` if the format is not supported, a column is missing, or the rows are malformed, and `SettingError`
    if a setting is incompatible with the file. If a column is missing, the message ends with `advice`.
    """
    kind, name = suffix_of(path), printable(path)
    if kind not in EXTENSIONS:
        other = " Write one object per line, for example with jq -c '.[]' FILE > FILE.jsonl." if kind == ".json" else ""
        raise UserError(f"{name}: the extension must be one of {' '.join(EXTENSIONS)}.{other}")
    text, note = read_text(path, settings.encoding)
    if re.match(r"\s*<(!doctype html|html)", text, re.IGNORECASE):
        raise UserError(f"The file {name} is a web page instead of a file of rows. Download the file itself.")
    lines = io.StringIO(text, newline="").readlines()  # readlines does not split at Unicode line separators
    found = Rows(lines=len(lines), notes=[note] if note else [])
    if kind in _JSON:
        records = list(_json_records(name, lines))
        found.columns = list(dict.fromkeys(key for record in records for key in record.cells))
    else:
        records = _Table(name, kind, lines, settings, found).records()
    if not records:
        raise UserError(f"The file {name} contains no rows.")
    _require_columns(name, records[0].first, found.columns, settings, advice, table=kind in _TABLES)
    numbers: Counter[str] = Counter()
    missing = _MISSING.union(map(str, settings.missing))
    found.rows = [_row(name, record, settings, missing, numbers, len(found.columns)) for record in records]
    found.notes += [
        f"{name}: numbers and booleans in column {column!r} are converted to text in {counted(count, 'row')}."
        for column, count in numbers.items()
    ]
    return found


def _require_columns(
    name: str, line: int, columns: Sequence[str], settings: TextConfig, ending: str, *, table: bool
) -> None:
    for setting, column in (*(("columns", c) for c in settings.columns), ("label", settings.label)):
        if columns.count(column) > 1:
            raise UserError(f"The file {name} contains two columns {column!r}. Rename one of the columns.")
        if column in columns:
            continue
        place = name if table else f"{name}, line {line}"
        shown = some([_short(one) or "(no name)" for one in columns], 10)
        same = [one for one in columns if one.casefold() == column.casefold()]
        advice = f" Did you mean {same[0]!r}?" if same else did_you_mean(column, columns)
        if table and settings.names is None and column in (one.strip("\"'") for one in columns):
            advice += " The cells are in quotes. Set data.text.quotes=true."
        elif table and settings.names is None:
            advice += (
                " The first line is read as column names. Set data.text.columns=[NAME] and data.text.label=NAME. If the"
                f" first line contains data, set the names of all columns with {_names_of(columns, settings)}."
            )
        problem = f"the column {column!r} (data.text.{setting}) does not exist"
        raise UserError(f"{place}: {problem}. The columns are {shown}.{advice}{ending}")


def _names_of(cells: Sequence[str], settings: TextConfig) -> str:
    """Suggest ``data.text.names`` for a file without a header, assuming that the longest cell is the text."""
    if not 2 <= len(cells) <= 8 or len(settings.columns) != 1:
        return "data.text.names=[label,text]"
    order = sorted(range(len(cells)), key=lambda index: len(cells[index]))
    named = {order[-1]: settings.columns[0], order[0]: settings.label}
    return f"data.text.names=[{','.join(named.get(index, f'other{index}') for index in range(len(cells)))}]"


def _row(
    name: str, record: _Record, settings: TextConfig, missing: Container[str], numbers: Counter[str], width: int
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
            problem += f" ({label!r}{'' if label in _MISSING else '; data.text.missing'})"
        elif lacks:
            problem += f" (the key {lacks[0]!r} is missing; {_keys(record.cells)})"
    try:
        "".join((*text, label)).encode()
    except UnicodeEncodeError:
        problem = "not valid Unicode"
    return Row(text, label, name, record.first, problem)


def _keys(cells: Mapping[str, Any]) -> str:
    return f"keys: {some([_short(key) for key in cells], 5)}" if cells else "no keys"


def _short(text: str) -> str:
    return shortened(plain_line(text), _LETTERS)


def _json_records(name: str, lines: Sequence[str]) -> Iterator[_Record]:
    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found = dict(pairs)
        if len(found) < len(pairs):
            raise UserError(f"{name}, line {number}: a key occurs twice. Keep one of the values.")
        return found

    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line, object_pairs_hook=unique)
        except UserError:
            raise
        except (ValueError, RecursionError) as error:
            start = next(line for line in lines if line.strip()).strip()
            advice = " Write one object per line, for example with jq -c '.[]' FILE."
            whole = advice if start[0] == "[" or start == "{" else ""
            problem = f"the line is not valid JSON ({first_line(error)})"
            raise UserError(f"{name}, line {number}: {problem}.{whole}") from error
        if not isinstance(row, dict):
            raise UserError(f'{name}, line {number}: each line must be an object such as {{"text": …, "label": …}}.')
        yield _Record(row, number, number)


class _Table:
    """Reader of a table, which adds the column names and notes to `found`."""

    def __init__(self, name: str, kind: str, lines: Sequence[str], settings: TextConfig, found: Rows) -> None:
        self._name, self._kind, self._lines, self._settings, self._found = name, kind, lines, settings, found
        self._start = next((number for number, line in enumerate(lines) if line.strip()), 0)
        default = _DELIMITERS[settings.delimiter] if settings.delimiter else "\t" if kind == ".tsv" else ","
        sep = re.fullmatch(r'"?sep=(.)"?\s*', lines[self._start]) if lines else None
        if sep and settings.delimiter is None:  # spreadsheet programs write this line
            self._start, default = self._start + 1, sep[1]
        self._delimiter = default if settings.delimiter or sep else self._likely(default)
        if self._delimiter != default:
            names = {character: word for word, character in _DELIMITERS.items()}
            self._note(f"the delimiter is detected as {names[self._delimiter]} (data.text.delimiter)")

    def _note(self, text: str) -> None:
        self._found.notes.append(f"{self._name}: {text}.")

    def _quotes(self, delimiter: str) -> bool:
        quotes = self._settings.quotes
        return (self._kind == ".csv" or delimiter != "\t") if quotes is None else quotes

    def _cells(self, lines: Sequence[str], delimiter: str, *, quotes: bool) -> Any:
        quoting: Any = csv.QUOTE_MINIMAL if quotes else csv.QUOTE_NONE
        return csv.reader(iter(lines), delimiter=delimiter, quoting=quoting, strict=True, skipinitialspace=quotes)

    def _first_cells(self, delimiter: str) -> list[str]:
        rows = self._cells(self._lines[self._start :], delimiter, quotes=self._quotes(delimiter))
        try:
            return [cell.strip() for cell in next(rows)]
        except (csv.Error, StopIteration):
            return []

    def _likely(self, default: str) -> str:
        """Return the delimiter that yields the required columns, or else the delimiter that yields the most cells."""
        settings = self._settings

        def fits(delimiter: str) -> bool:
            cells = self._first_cells(delimiter)
            if settings.names is not None:
                return len(cells) == len(settings.names)
            return {*settings.columns, settings.label} <= set(cells)

        order = [default, *(one for one in _DELIMITERS.values() if one != default)]
        return next(filter(fits, order), max(order, key=lambda one: len(self._first_cells(one))))

    def records(self) -> list[_Record]:
        """Detect the columns, and return the rows."""
        quotes = self._quotes(self._delimiter)
        reader = self._cells(self._lines[self._start :], self._delimiter, quotes=quotes)
        before, found = 0, []
        names = self._settings.names
        try:
            for cells in reader:
                first, before = self._start + before + 1, reader.line_num
                if not any(cell.strip() for cell in cells):
                    continue
                if not self._found.columns:
                    self._found.columns = list(names) if names else [cell.strip() for cell in cells]
                    if names is None:
                        continue
                    self._require_names(cells, first)
                found.append(self._record(cells, first, self._start + before))
        except csv.Error as error:
            raise self._unreadable(self._start + before + 1, error) from error
        self._look_at_long_cells(found)
        self._note_cells(found, quotes=quotes)
        return found

    def _note_cells(self, records: Sequence[_Record], *, quotes: bool) -> None:
        if not quotes and self._settings.quotes is None:
            quoted = sum(any(re.fullmatch('".*"', cell.strip()) for cell in one.cells.values()) for one in records)
            if quoted:
                self._note(f"quotes around cells are part of the texts in {counted(quoted, 'row')} (data.text.quotes)")
        if "" in self._found.columns[1:]:  # a first column without a name may contain row numbers
            beyond = sum(bool(one.cells.get("", "").strip()) for one in records)
            if beyond:
                self._note(f"columns without a name contain values in {counted(beyond, 'row')}")

    def _record(self, cells: list[str], first: int, last: int) -> _Record:
        columns = self._found.columns
        while len(cells) > len(columns) and not cells[-1].strip():
            cells = cells[:-1]
        width = len(cells) if len(cells) != len(columns) else None
        cells_of = dict(zip(columns, cells, strict=False))
        if "" in cells_of:
            cells_of[""] = "".join(cell for name, cell in zip(columns[1:], cells[1:], strict=False) if not name)
        return _Record(cells_of, first, last, width)

    def _require_names(self, cells: Sequence[str], line: int) -> None:
        names = self._settings.names
        assert names is not None
        given = [cell.strip() for cell in cells]
        if len(given) != len(names):
            known = f"{len(given)} names, one for each cell of line {line} of {self._name}"
            raise SettingError("data.text.names", names, known)
        if sorted(given) == sorted(names) or {self._settings.label, *self._settings.columns} <= set(given):
            raise SettingError("data.text.names", names, f"null, because the first line of {self._name} is a header")

    def _unreadable(self, line: int, error: csv.Error) -> UserError:
        escaped = '\\"' in "".join(self._lines[line - 1 : line])
        return UserError(
            f"{self._name}, line {line}: the table cannot be read ({error}). A cell that begins with a quote must end"
            ' with a quote. Quotes inside such a cell must be doubled ("")'
            f"{' instead of being escaped with backslashes' if escaped else ''}."
            " If quotes are plain characters, set data.text.quotes=false."
        )

    def _look_at_long_cells(self, records: Sequence[_Record]) -> None:
        """Add a note about rows that span several lines.

        Raise `UserError` if the lines of such a row look like separate rows.
        """
        long = [record for record in records if record.last > record.first]
        if not long:
            return
        label, columns = self._settings.label, self._found.columns
        if label in columns and self._settings.quotes is None:
            short = [record for record in records if record.last == record.first and record.width is None]
            known = {clean_name(record.cells[label]) for record in short or long if label in record.cells} - {""}
            swallowed = [record for record in long if self._rows_in(record, known) > 1]
            if swallowed:
                places = some([f"{one.first}–{one.last}" for one in swallowed], 3)
                raise UserError(
                    f"{self._name}, lines {places}: a quote that opens in the first line closes only in the last"
                    f" line. {sum(one.last - one.first + 1 for one in swallowed)} lines that look like rows are read as"
                    f" {counted(len(swallowed), 'row')}. If quotes are plain characters, set data.text.quotes=false. If"
                    " quotes enclose cells, set data.text.quotes=true."
                )
        example = f"lines {long[0].first}–{long[0].last}"
        self._note(f"quoted cells span several lines in {counted(len(long), 'row')} (for example, {example})")

    def _rows_in(self, record: _Record, known: set[str]) -> int:
        """Count the lines of a row that would be separate rows with a known label if quotes were plain characters."""
        columns = self._found.columns
        at = columns.index(self._settings.label)
        cells = self._cells(self._lines[record.first - 1 : record.last], self._delimiter, quotes=False)
        return sum(len(one) == len(columns) and clean_name(one[at].strip('"')) in known for one in cells)
