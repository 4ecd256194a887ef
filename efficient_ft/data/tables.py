"""Read tables of the user: delimited text (.csv, .tsv), JSON lines and Parquet.

Delimiters, quotes, encodings and compression are detected or set. All messages name the settings of the section that
describes the table, for example ``data.text`` or ``data.labels``.
"""

from __future__ import annotations

import codecs
import csv
import functools
import gzip
import io
import json
import re
import unicodedata
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.core.text import plain_line, printable, shortened
from efficient_ft.data.counts import counted, some, verb
from efficient_ft.data.file_list import unreadable
from efficient_ft.data.parquet import read_parquet

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


def read_text(path: Path, encoding: str | None, section: str = "data.text") -> tuple[str, str | None]:
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
        raise UserError(f"{text} Set {section}.encoding={likely}.")
    try:
        text = (raw[len(marked[0]) :] if marked else raw).decode(chosen)
    except (LookupError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise _undecodable(name, raw, error, chosen, section) from error
        raise SettingError(f"{section}.encoding", chosen, "a Python encoding, for example cp1252") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        count = counted(text.count("\0"), "NUL character")
        raise UserError(
            f"{name}, line {line}: the text contains {count}. The file is damaged or has a different encoding. Remove"
            f" these characters, or set {section}.encoding."
        )
    if encoding is not None and not marked and codecs.lookup(encoding).name != "utf-8" and _is_utf8(raw):
        return text, f"The file {name} is valid UTF-8, but is read as {encoding} ({section}.encoding)."
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


def _undecodable(name: str, raw: bytes, error: UnicodeDecodeError, chosen: str, section: str) -> UserError:
    """Create the error for bytes that are invalid in the encoding `chosen`. The message suggests a likely encoding."""
    line = raw.count(b"\n", 0, error.start) + 1
    kind = "UTF-8" if chosen == "utf-8" else chosen
    where = f"{name}, line {line}: the text is not valid {kind} (byte {raw[error.start]:#04x})."
    if chosen != "utf-8":
        return UserError(f"{where} Set {section}.encoding to the encoding of the file, or to null for UTF-8.")
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
        guess = f"Set {section}.encoding to the encoding of the file, {known}."
    else:
        western = "latin-1" if re.search(rb"[\x81\x8d\x8f\x90\x9d]", raw) else "cp1252"  # undefined bytes of cp1252
        guess = f"The text may be {western}. Set {section}.encoding={western}, and check the accented letters."
    return UserError(f"{where} {guess} You can also convert the file with iconv -f ENCODING -t utf-8.")


def _is_eastern(raw: bytes) -> bool:
    """Return True if most non-ASCII bytes are adjacent.

    Adjacent bytes are typical of multi-byte encodings, but not of accented letters in single-byte encodings.
    """
    runs = re.findall(rb"[\x80-\xff]+", raw)
    return sum(len(run) for run in runs if len(run) >= 4) * 2 > sum(map(len, runs))


TABLES, _JSON = (".csv", ".tsv"), (".jsonl", ".ndjson")
EXTENSIONS = (*TABLES, *_JSON)
PARQUET = ".parquet"
_DELIMITERS = {"comma": ",", "semicolon": ";", "tab": "\t", "pipe": "|"}
#: Values that common programs write for missing labels. The setting ``missing`` of a section adds further values.
MISSING = frozenset(
    ["", "nan", "NaN", "NAN", "-nan", "<NA>", "NaT", r"\N", "#N/A", "#REF!", "#VALUE!", "#NAME?", "#DIV/0!", "#NUM!",
     "#NULL!"]
)  # fmt: skip
_LETTERS = 40  # maximum length of a name in messages

csv.field_size_limit(1 << 30)


@dataclass(frozen=True)
class TableFormat:
    """The format of a table, and the columns that it must contain.

    Attributes:
        section: section of the settings, for example ``data.text``. Messages name the settings of this section.
        columns: required columns, except for the label column.
        label: label column, or an empty string if the column is not known.
        names: names of all columns, or None if the first line contains the names.
        delimiter: ``comma``, ``semicolon``, ``tab`` or ``pipe``, or None to detect the delimiter.
        quotes: True if quotes enclose cells, or None if this depends on the extension of the file.
        encoding: Python name of the encoding, or None for UTF-8 or the encoding of the byte order mark.
        choose: sentence that tells the user how to choose other columns, or an empty string if no column is required.
        parquet: True if the file may also be a Parquet file.
    """

    section: str
    columns: Sequence[str] = ()
    label: str = ""
    names: Sequence[str] | None = None
    delimiter: str | None = None
    quotes: bool | None = None
    encoding: str | None = None
    choose: str = ""
    parquet: bool = False


@dataclass
class Record:
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


def spelling(name: str) -> str:
    """Return a key that is equal for labels that differ only in case, quotes or equivalent Unicode characters."""
    return unicodedata.normalize("NFKC", name).strip("\"'").casefold()


@dataclass
class Records:
    """The records of a file."""

    records: list[Record] = field(default_factory=list)
    lines: int = 0  # number of lines in the file
    notes: list[str] = field(default_factory=list)  # assumptions made while reading the file, one sentence each
    columns: list[str] = field(default_factory=list)  # column names

    @property
    def origin(self) -> str:
        """The numbers of rows and lines as text."""
        return f"{counted(len(self.records), 'row')} in {counted(self.lines, 'line')}"


def read_records(path: Path, form: TableFormat) -> Records:
    """Read the records of a .csv, .tsv or .jsonl file, which may be compressed with gzip, or of a .parquet file.

    Raise `UserError` if the format is not supported or the records are malformed, and `SettingError` if a setting is
    incompatible with the file.
    """
    kind, name = suffix_of(path), printable(path)
    if kind == PARQUET and form.parquet:
        rows, columns, notes = read_parquet(path)
        if not rows:
            raise UserError(f"The file {name} contains no rows.")
        return Records([Record(row, number, number) for number, row in enumerate(rows, 1)], len(rows), notes, columns)
    if kind not in EXTENSIONS:
        known = " ".join(EXTENSIONS + (PARQUET,) * form.parquet)
        other = " Write one object per line, for example with jq -c '.[]' FILE > FILE.jsonl." if kind == ".json" else ""
        raise UserError(f"{name}: the extension must be one of {known}.{other}")
    text, note = read_text(path, form.encoding, form.section)
    if re.match(r"\s*<(!doctype html|html)", text, re.IGNORECASE):
        raise UserError(f"The file {name} is a web page instead of a file of rows. Download the file itself.")
    lines = io.StringIO(text, newline="").readlines()  # readlines does not split at Unicode line separators
    found = Records(lines=len(lines), notes=[note] if note else [])
    if kind in _JSON:
        found.records = list(_json_records(name, lines))
        found.columns = list(dict.fromkeys(key for record in found.records for key in record.cells))
    else:
        found.records = _Table(name, kind, lines, form, found).records()
    if not found.records:
        raise UserError(f"The file {name} contains no rows.")
    return found


def require_columns(
    path: Path, found: Records, form: TableFormat, wanted: Sequence[tuple[str, str]], ending: str = ""
) -> None:
    """Raise `UserError` if a column does not exist, or if it exists twice.

    `wanted` contains pairs of a setting of the section and the name of its column. The message about a missing column
    ends with `ending`.
    """
    name, columns, kind = printable(path), found.columns, suffix_of(path)
    table = kind in TABLES
    for setting, column in wanted:
        if columns.count(column) > 1:
            raise UserError(f"The file {name} contains two columns {column!r}. Rename one of the columns.")
        if column in columns:
            continue
        place = name if table or kind == PARQUET else f"{name}, line {found.records[0].first}"
        shown = some([short(one) or "(no name)" for one in columns], 10)
        same = [one for one in columns if one.casefold() == column.casefold()]
        advice = f" Did you mean {same[0]!r}?" if same else did_you_mean(column, columns)
        if table and form.names is None and column in (one.strip("\"'") for one in columns):
            advice += f" The cells are in quotes. Set {form.section}.quotes=true."
        elif table and form.names is None and form.choose:
            advice += (
                f" The first line is read as column names. {form.choose} If the"
                f" first line contains data, set the names of all columns with {_names_of(columns, form)}."
            )
        problem = f"the column {column!r} ({form.section}.{setting}) does not exist"
        raise UserError(f"{place}: {problem}. The columns are {shown}.{advice}{ending}")


def _names_of(cells: Sequence[str], form: TableFormat) -> str:
    """Suggest a value of ``names`` for a file without a header, assuming that the longest cell is the text."""
    if not 2 <= len(cells) <= 8 or len(form.columns) != 1:
        return f"{form.section}.names=[{form.label},{form.columns[0]}]"
    order = sorted(range(len(cells)), key=lambda index: len(cells[index]))
    named = {order[-1]: form.columns[0], order[0]: form.label}
    return f"{form.section}.names=[{','.join(named.get(index, f'other{index}') for index in range(len(cells)))}]"


def short(text: str) -> str:
    """Shorten a cell or a column name for messages."""
    return shortened(plain_line(text), _LETTERS)


def _json_records(name: str, lines: Sequence[str]) -> Iterator[Record]:
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
        yield Record(row, number, number)


class _Table:
    """Reader of a table, which adds the column names and notes to `found`."""

    def __init__(self, name: str, kind: str, lines: Sequence[str], form: TableFormat, found: Records) -> None:
        self._name, self._kind, self._lines, self._form, self._found = name, kind, lines, form, found
        self._section = form.section
        self._start = next((number for number, line in enumerate(lines) if line.strip()), 0)
        default = _DELIMITERS[form.delimiter] if form.delimiter else "\t" if kind == ".tsv" else ","
        sep = re.fullmatch(r'"?sep=(.)"?\s*', lines[self._start]) if lines else None
        if sep and form.delimiter is None:  # spreadsheet programs write this line
            self._start, default = self._start + 1, sep[1]
        self._delimiter = default if form.delimiter or sep else self._likely(default)
        if self._delimiter != default:
            names = {character: word for word, character in _DELIMITERS.items()}
            self._note(f"the delimiter is detected as {names[self._delimiter]} ({form.section}.delimiter)")

    def _note(self, text: str) -> None:
        self._found.notes.append(f"{self._name}: {text}.")

    def _quotes(self, delimiter: str) -> bool:
        quotes = self._form.quotes
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
        form = self._form
        required = {*form.columns, form.label} - {""}

        def fits(delimiter: str) -> bool:
            cells = self._first_cells(delimiter)
            if form.names is not None:
                return len(cells) == len(form.names)
            return required <= set(cells) and (bool(required) or len(cells) > 1)

        order = [default, *(one for one in _DELIMITERS.values() if one != default)]
        return next(filter(fits, order), max(order, key=lambda one: len(self._first_cells(one))))

    def records(self) -> list[Record]:
        """Detect the columns, and return the rows."""
        quotes = self._quotes(self._delimiter)
        reader = self._cells(self._lines[self._start :], self._delimiter, quotes=quotes)
        before, found = 0, []
        names = self._form.names
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

    def _note_cells(self, records: Sequence[Record], *, quotes: bool) -> None:
        if not quotes and self._form.quotes is None:
            quoted = sum(any(re.fullmatch('".*"', cell.strip()) for cell in one.cells.values()) for one in records)
            if quoted:
                self._note(
                    f"quotes around cells are part of the texts in {counted(quoted, 'row')} ({self._section}.quotes)"
                )
        if "" in self._found.columns[1:]:  # a first column without a name may contain row numbers
            beyond = sum(bool(one.cells.get("", "").strip()) for one in records)
            if beyond:
                self._note(f"columns without a name contain values in {counted(beyond, 'row')}")

    def _record(self, cells: list[str], first: int, last: int) -> Record:
        columns = self._found.columns
        while len(cells) > len(columns) and not cells[-1].strip():
            cells = cells[:-1]
        width = len(cells) if len(cells) != len(columns) else None
        cells_of = dict(zip(columns, cells, strict=False))
        if "" in cells_of:
            cells_of[""] = "".join(cell for name, cell in zip(columns[1:], cells[1:], strict=False) if not name)
        return Record(cells_of, first, last, width)

    def _require_names(self, cells: Sequence[str], line: int) -> None:
        names = self._form.names
        assert names is not None
        given = [cell.strip() for cell in cells]
        if len(given) != len(names):
            known = f"{len(given)} names, one for each cell of line {line} of {self._name}"
            raise SettingError(f"{self._section}.names", names, known)
        required = {self._form.label, *self._form.columns} - {""}
        if sorted(given) == sorted(names) or (required and required <= set(given)):
            raise SettingError(
                f"{self._section}.names", names, f"null, because the first line of {self._name} is a header"
            )

    def _unreadable(self, line: int, error: csv.Error) -> UserError:
        escaped = '\\"' in "".join(self._lines[line - 1 : line])
        return UserError(
            f"{self._name}, line {line}: the table cannot be read ({error}). A cell that begins with a quote must end"
            ' with a quote. Quotes inside such a cell must be doubled ("")'
            f"{' instead of being escaped with backslashes' if escaped else ''}."
            f" If quotes are plain characters, set {self._section}.quotes=false."
        )

    def _look_at_long_cells(self, records: Sequence[Record]) -> None:
        """Add a note about rows that span several lines.

        Raise `UserError` if the lines of such a row look like separate rows.
        """
        long = [record for record in records if record.last > record.first]
        if not long:
            return
        label, columns = self._form.label, self._found.columns
        if label in columns and self._form.quotes is None:
            short = [record for record in records if record.last == record.first and record.width is None]
            known = {clean_name(record.cells[label]) for record in short or long if label in record.cells} - {""}
            swallowed = [record for record in long if self._rows_in(record, known) > 1]
            if swallowed:
                places = some([f"{one.first}–{one.last}" for one in swallowed], 3)
                raise UserError(
                    f"{self._name}, lines {places}: a quote that opens in the first line closes only in the last"
                    f" line. {sum(one.last - one.first + 1 for one in swallowed)} lines that look like rows are read as"
                    f" {counted(len(swallowed), 'row')}. If quotes are plain characters, set"
                    f" {self._section}.quotes=false. If quotes enclose cells, set {self._section}.quotes=true."
                )
        example = f"lines {long[0].first}–{long[0].last}"
        self._note(f"quoted cells span several lines in {counted(len(long), 'row')} (for example, {example})")

    def _rows_in(self, record: Record, known: set[str]) -> int:
        """Count the lines of a row that would be separate rows with a known label if quotes were plain characters."""
        columns = self._found.columns
        at = columns.index(self._form.label)
        cells = self._cells(self._lines[record.first - 1 : record.last], self._delimiter, quotes=False)
        return sum(len(one) == len(columns) and clean_name(one[at].strip('"')) in known for one in cells)
