"""Read text files in various encodings, and reject files that are not text."""

from __future__ import annotations

import codecs
import gzip
import re
import zlib
from pathlib import Path

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.file_list import unreadable

#: Byte order marks. UTF-32 precedes UTF-16, because the mark of UTF-32 begins with the mark of UTF-16.
MARKS = (
    (codecs.BOM_UTF8, "utf-8"),
    (codecs.BOM_UTF32_LE, "utf-32-le"),
    (codecs.BOM_UTF32_BE, "utf-32-be"),
    (codecs.BOM_UTF16_LE, "utf-16-le"),
    (codecs.BOM_UTF16_BE, "utf-16-be"),
)
#: First bytes of files that are not text.
_OTHERS = (
    (b"PK\x03\x04", "a ZIP archive (.xlsx spreadsheets are ZIP archives). Unpack it, or save the sheet as .csv"),
    (b"\xd0\xcf\x11\xe0", "an old spreadsheet or document. Save it as .csv"),
    (b"PAR1", "a Parquet file. Convert it, e.g. by pandas' read_parquet(…).to_json(…, orient='records', lines=True)"),
    (b"BZh", "compressed (bzip2). Unpack it"),
    (b"\xfd7zXZ", "compressed (xz). Unpack it"),
    (b"\x28\xb5\x2f\xfd", "compressed (zstd). Unpack it"),
    (b"%PDF", "a PDF file. Extract its text"),
    (b"version https://git-lfs", "a Git LFS pointer instead of the file. Run: git lfs pull"),
    (b"SQLite format 3", "a database. Export the table as .csv"),
)


def read_text(path: Path, encoding: str | None) -> tuple[str, str | None]:
    """Read a text file, which may be compressed with gzip. A byte order mark takes precedence over `encoding`.

    Returns:
        The text without a byte order mark, and a sentence about its encoding (None for plain UTF-8).

    Raises:
        UserError: If the file cannot be read, is not text, or has a different encoding, which the message suggests.
    """
    raw = _bytes(path)
    name = printable(path)
    marked = next(((mark, known) for mark, known in MARKS if raw.startswith(mark)), None)
    chosen = marked[1] if marked else encoding or "utf-8"
    zeros = raw[:2000:2].count(0), raw[1:2000:2].count(0)
    if not marked and encoding is None and sum(zeros) > min(len(raw), 2000) / 5:
        likely = "utf-16-le" if zeros[1] > zeros[0] else "utf-16-be"
        raise UserError(f"{name} looks like {likely} without a byte order mark: set data.text.encoding={likely}.")
    try:
        text = (raw[len(marked[0]) :] if marked else raw).decode(chosen)
    except (LookupError, ValueError) as error:
        if isinstance(error, UnicodeDecodeError):
            raise _undecodable(name, raw, error, chosen) from error
        raise SettingError("data.text.encoding", chosen, "a Python encoding such as cp1252") from error
    if "\0" in text:
        line = text.count("\n", 0, text.index("\0")) + 1
        count = counted(text.count("\0"), "NUL character")
        raise UserError(
            f"{name}, line {line}: found {count}. The file is damaged or has a different encoding. Remove these"
            " characters, or set data.text.encoding."
        )
    if encoding is not None and not marked and codecs.lookup(encoding).name != "utf-8" and _is_utf8(raw):
        return text, f"{name} is valid UTF-8, but is read as {encoding} (data.text.encoding)."
    return text, f"{name} is read as {chosen} (byte order mark)." if marked and chosen != "utf-8" else None


def _bytes(path: Path) -> bytes:
    try:
        raw = path.read_bytes()
        if raw.startswith(b"\x1f\x8b"):
            raw = gzip.decompress(raw)
    except (EOFError, zlib.error, gzip.BadGzipFile) as error:
        raise UserError(f"{printable(path)} is a damaged gzip file ({error}). Copy it again.") from error
    except OSError as error:
        raise unreadable(path, error) from error
    except MemoryError as error:
        raise UserError(f"{printable(path)} does not fit into memory. Split it into several files.") from error
    for first, kind in _OTHERS:
        if raw.startswith(first):
            raise UserError(f"{printable(path)} is {kind}.")
    return raw


def _is_utf8(raw: bytes) -> bool:
    """Return True if the bytes are UTF-8 and contain a non-ASCII character."""
    try:
        return not raw.decode().isascii()
    except UnicodeDecodeError:
        return False


def _undecodable(name: str, raw: bytes, error: UnicodeDecodeError, chosen: str) -> UserError:
    """Create the error for bytes that are invalid in the encoding. The message suggests a likely encoding."""
    line = raw.count(b"\n", 0, error.start) + 1
    where = f"{name}, line {line}: invalid {'UTF-8' if chosen == 'utf-8' else chosen} (byte {raw[error.start]:#04x})."
    if chosen != "utf-8":
        return UserError(f"{where} Set data.text.encoding to the file's encoding, or to null for UTF-8.")
    replaced = raw.decode(errors="replace")
    bad = replaced.count("\ufffd")
    good = sum(not character.isascii() for character in replaced) - bad
    if good > bad:
        return UserError(
            f"{where} The file is damaged or mixes encodings: {counted(good, 'non-ASCII character')}"
            f" {verb(good, 'is', 'are')} UTF-8, {bad} {verb(bad, 'is', 'are')} not."
            " Correct these lines, or remove the invalid bytes: iconv -c -f utf-8 -t utf-8."
        )
    high = sum(byte >= 0x80 for byte in raw)
    letters = sum(byte in range(0x41, 0x7B) for byte in raw)
    if high > letters / 2 or _is_eastern(raw):
        guess = "Set data.text.encoding to its encoding, e.g. cp1251 (Cyrillic), gb18030 (Chinese) or shift_jis."
    else:
        western = "latin-1"
        try:
            raw.decode("cp1252")
            western = "cp1252"
        except UnicodeDecodeError:
            pass
        guess = f"It looks like {western}: set data.text.encoding={western}, and check the accented letters."
    return UserError(f"{where} {guess} Or convert the file: iconv -f ENCODING -t utf-8.")


def _is_eastern(raw: bytes) -> bool:
    """Return True if most non-ASCII bytes are adjacent, as in multi-byte encodings and unlike accented letters."""
    runs = re.findall(rb"[\x80-\xff]+", raw)
    return sum(len(run) for run in runs if len(run) >= 4) * 2 > sum(map(len, runs))
