"""Read the class lists of masks (classes.txt and similar files), with ids and colors, in any Unicode encoding."""

from __future__ import annotations

import codecs
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import plain_line, printable

Color = tuple[int, int, int]
#: Class list files in order of preference. The first existing file is read; the colors may come from a later one.
FILES = ("classes.txt", "label_colors.txt", "class_dict.csv", "labelmap.txt", "labels.txt", "class_names.txt")
#: Names that mark ids or colors without a class.
NO_CLASS = frozenset(
    ["void", "unlabeled", "unlabelled", "ignore", "ignored", "ignore_label", "no label", "no_label", "unlabeled_pixels"]
)
_MARKS = (
    (codecs.BOM_UTF8, "utf-8-sig"),
    (codecs.BOM_UTF32_LE, "utf-32"),
    (codecs.BOM_UTF32_BE, "utf-32"),
    (codecs.BOM_UTF16_LE, "utf-16"),
    (codecs.BOM_UTF16_BE, "utf-16"),
)
#: Cells of a header line.
_HEADER = frozenset(["name", "class", "class_name", "label", "id", "index", "value", "color", "color_rgb", "rgb",
                     "r", "g", "b", "red", "green", "blue", "parts", "actions", "train_id", "category"])  # fmt: skip
_GAP = r"[\s,;:=|]+"
_HEX = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True)
class Entry:
    """An entry of a class list: a class, or pixels without a label (`NO_CLASS`).

    Attributes:
        name: class name.
        id: value of its pixels.
        color: color of its pixels in color masks; None if the list gives none.
    """

    name: str
    id: int
    color: Color | None = None

    @property
    def is_class(self) -> bool:
        """False if the pixels have no label."""
        return is_class(self.name)


@dataclass(frozen=True)
class ClassList:
    """The entries of a class list, and their source.

    Attributes:
        entries: in the order of their ids.
        source: name of the file or the setting.
        notes: facts that a user should know, one sentence each.
    """

    entries: tuple[Entry, ...]
    source: str
    notes: tuple[str, ...] = ()


def is_class(name: str) -> bool:
    """Return True unless the name marks pixels without a label."""
    return name.strip().casefold() not in NO_CLASS


def read_class_list(root: Path) -> ClassList | None:
    """Read the class list in a folder; None if the folder has no list.

    Raises:
        UserError: a list is unreadable or ambiguous.
    """
    present = [name for name in FILES if (root / name).is_file()]
    if not present:
        return None
    chosen = parse_class_list(root / present[0])
    if chosen.entries[0].color is None:
        for other in present[1:]:
            colors = {entry.name.casefold(): entry.color for entry in parse_class_list(root / other).entries}
            if all(colors.get(entry.name.casefold()) for entry in chosen.entries if entry.is_class):
                entries = tuple(Entry(e.name, e.id, colors.get(e.name.casefold())) for e in chosen.entries)
                return ClassList(entries, f"{chosen.source} and {other}", chosen.notes)
    unused = [f"Not used: {', '.join(present[1:])}. The classes are read from {present[0]}."] if present[1:] else []
    return ClassList(chosen.entries, chosen.source, (*chosen.notes, *unused))


def listed_names(names: Sequence[str], source: str) -> ClassList:
    """Return a class list of the names with the ids 0, 1, …

    Raises:
        UserError: two names are equal, or differ only in case.
    """
    found = ClassList(tuple(Entry(_clean(name), number) for number, name in enumerate(names)), source)
    _refuse_equal(found.entries, source)
    return found


def parse_class_list(file: Path) -> ClassList:
    """Read one class list.

    Each line contains a name, an id and a name (``3: cell``), a name and a color (``sky 128 128 128``, ``128 128 128
    sky``, ``sky,#808080``), or all three. If the list has no ids, the lines are numbered 0, 1, … Lines that begin with
    ``#`` and a space are comments.

    Args:
        file: the list.

    Raises:
        UserError: see `read_class_list`.
    """
    place = printable(file)
    lines = _lines(file)
    parsed = [(number, _parse(text, f"{place}, line {number}")) for number, text in lines if text]
    if not parsed:
        raise UserError(f"{place} lists no class. Write one class name per line, in the order of the ids 0, 1, …")
    kinds = {found[0] for _, found in parsed}
    entries, notes = _entries(parsed, kinds, place)
    if "id" not in kinds and "id color" not in kinds:
        empty = [number for number, text in lines if not text and number < parsed[-1][0]]
        if empty:
            raise UserError(
                f"{place}, line {empty[0]} is empty, so the ids of the classes below it are ambiguous."
                " Remove the line, write 'void' for an id without a class, or begin each line with its id ('0 NAME')."
            )
    _refuse_equal(entries, place)
    return ClassList(tuple(sorted(entries, key=lambda entry: entry.id)), file.name, tuple(notes))


def parse_color(text: str) -> Color | None:
    """Parse a color ``#rrggbb``; None if the text is not a color."""
    if not _HEX.fullmatch(text):
        return None
    return int(text[1:3], 16), int(text[3:5], 16), int(text[5:], 16)


def _lines(file: Path) -> list[tuple[int, str]]:
    """Return the numbered lines without comments and headers; an empty line is an empty string."""
    try:
        raw = file.read_bytes()
        encoding = next((name for mark, name in _MARKS if raw.startswith(mark)), None)
        if encoding is None and b"\0" in raw:
            encoding = "utf-16-be" if raw[:1] == b"\0" else "utf-16-le"
        text = raw.decode(encoding or "utf-8")
    except UnicodeDecodeError as error:
        raise UserError(f"{printable(file)} is not UTF-8 ({error.reason}). Save it as UTF-8 or UTF-16.") from error
    except OSError as error:
        raise UserError(f"{printable(file)} cannot be read ({error.strerror}). Check its permissions.") from error
    if "\0" in text:
        raise UserError(f"{printable(file)} is not a text file. Save it as UTF-8 or UTF-16.")
    found: list[tuple[int, str]] = []
    for number, line in enumerate(text.replace("\r\n", "\n").replace("\r", "\n").split("\n"), 1):
        stripped = re.sub(r"\s#\s.*$", "", unicodedata.normalize("NFC", line)).strip()
        if re.match(r"#(?![0-9a-fA-F]{6}\b)", stripped):
            continue
        cells = [cell for cell in re.split(_GAP, stripped.casefold()) if cell]
        if not found and len(cells) > 1 and _HEADER.issuperset(cells):
            continue
        found.append((number, stripped))
    return found


#: (kind, name, id, color) of a line. Kinds: "name", "number", "id", "name id" (the id is last), "color", "id color".
_Line = tuple[str, str, int | None, Color | None]


def _parse(text: str, place: str) -> _Line:
    """Parse a line."""
    whole = text
    color = None
    for found in _HEX.finditer(text):
        before, after = text[: found.start()].strip(" \t,;:=|"), text[found.end() :].strip(" \t,;:=|")
        if not before or not after:
            color, text = parse_color(found[0]), before or after
    lead = re.match(rf"(?:\d+(?:{_GAP}|[.)]\s+|$))*", text)
    assert lead is not None
    first = [int(number) for number in re.findall(r"\d+", lead[0])]
    rest = text[lead.end() :]
    tail = re.search(rf"(?:{_GAP}\d+)*[\s,;:=|]*$", rest) if rest else None
    last = [int(number) for number in re.findall(r"\d+", tail[0])] if tail else []
    if re.search(r"\d\.\d+" + _GAP + r"\d*\.\d+", text):
        raise UserError(f"{place}: colors must be integers from 0 to 255, got {plain_line(whole)}.")
    name = _clean(rest[: tail.start()] if tail else rest)
    if not name:
        # A line with numbers only: they can be names if they equal the ids.
        return ("number", text.strip(), first[0] if len(first) == 1 else None, color)
    counts = (len(first), len(last))
    if color is None and counts in ((3, 0), (4, 0), (0, 3), (1, 3), (3, 1)):
        numbers = first[-3:] if len(first) >= 3 else last[:3]
        color = (numbers[0], numbers[1], numbers[2])
        first, last = (first[:-3], last) if len(first) >= 3 else (first, last[3:])
        counts = (len(first), len(last))
    if color is not None and max(color) > 255:
        raise UserError(f"{place}: colors must be integers from 0 to 255, got {plain_line(whole)}.")
    if counts == (0, 0):
        return ("name" if color is None else "color", name, None, color)
    if counts == (1, 0):
        return ("id" if color is None else "id color", name, first[0], color)
    if counts == (1, 1) and color is None:  # '1 class 1'
        return ("id", _clean(rest), first[0], None)
    if counts == (0, 1):
        plain = color is None and re.search(r"[,;:=|\t]\s*\d+$", text) is None  # 'class 1' may be a name
        return ("name id" if plain else "id" if color is None else "id color", name, last[0], color)
    if color is None and max(counts) < 3:
        return ("name", _clean(whole), None, None)
    raise UserError(
        f"{place} is not a valid class: {plain_line(whole)}. Write 'NAME', 'ID NAME' ('3 sky'), 'NAME RED GREEN BLUE'"
        " ('sky 128 128 128') or 'ID NAME RED GREEN BLUE'."
    )


def _entries(parsed: Sequence[tuple[int, _Line]], kinds: set[str], place: str) -> tuple[list[Entry], list[str]]:
    """Return the entries of parsed lines, which must all be of one kind, and notes."""
    notes: list[str] = []
    if kinds == {"number"}:
        if [found[2] for _, found in parsed] != list(range(len(parsed))):
            raise UserError(f"{place} has numbers without names. Write an id and a name on each line ('3 sky').")
        return [Entry(found[1], number) for number, (_, found) in enumerate(parsed)], notes
    if kinds <= {"name", "name id", "number"}:
        stems = {found[1].casefold() for _, found in parsed}
        ids = [found[2] for _, found in parsed]
        if kinds == {"name id"} and len(stems) == len(parsed) > 1 and len(set(ids)) == len(ids):
            kinds = {"id"}  # 'sky 0', 'road 1'; but 'class 1', 'class 2' are names
        else:
            names = [found[1] if found[0] != "name id" else f"{found[1]} {found[2]}" for _, found in parsed]
            return [Entry(name, number) for number, name in enumerate(names)], notes
    if kinds == {"id", "name"} and parsed[0][1][0] == "name":  # '4 wheeler' in a list of names
        names = [found[1] if found[0] == "name" else f"{found[2]} {found[1]}" for _, found in parsed]
        return [Entry(name, number) for number, name in enumerate(names)], notes
    if len(kinds) > 1:
        usual = parsed[0][1][0]
        line, found = next((line, found) for line, found in parsed if found[0] != usual)
        raise UserError(
            f"{place}: line {parsed[0][0]} has {_spoken(usual)}, but line {line} has {_spoken(found[0])}"
            f" ({plain_line(found[1])}). Use one format on all lines."
        )
    with_ids = kinds & {"id", "id color"}
    entries = [
        Entry(found[1], number if found[2] is None else found[2], found[3]) for number, (_, found) in enumerate(parsed)
    ]
    if with_ids and [entry.id for entry in entries] != list(range(len(entries))):
        low, high = min(e.id for e in entries), max(e.id for e in entries)
        notes.append(f"The class ids in {Path(place).name} are {low} to {high}.")
    return entries, notes


def _spoken(kind: str) -> str:
    return {"name": "a name", "id": "an id and a name", "name id": "a name and a number", "number": "a number",
            "color": "a name and a color", "id color": "an id, a name and a color"}[kind]  # fmt: skip


def _refuse_equal(entries: Sequence[Entry], place: str) -> None:
    names: dict[str, Entry] = {}
    ids: dict[int, Entry] = {}
    colors: dict[Color, Entry] = {}
    for entry in entries:
        same = names.setdefault(entry.name.casefold(), entry)
        if same is not entry and entry.is_class:
            why = "twice" if same.name == entry.name else f"and {same.name}, which differ only in case"
            raise UserError(f"{place} lists {plain_line(entry.name)} {why}. Each class must have a unique name.")
        same = ids.setdefault(entry.id, entry)
        if same is not entry:
            raise UserError(
                f"{place} assigns the id {entry.id} to both {same.name} and {entry.name}. Each id must have one class."
            )
        if entry.id >= 1 << 16:
            raise UserError(f"{place}: ids must be below 65536, got {entry.id} for {plain_line(entry.name)}.")
        if entry.color is not None:
            same = colors.setdefault(entry.color, entry)
            if same is not entry and (same.is_class or entry.is_class):
                raise UserError(
                    f"{place} assigns the color {' '.join(map(str, entry.color))} to both {same.name} and {entry.name}."
                    " Each class must have a unique color."
                )


def _clean(name: str) -> str:
    bare = re.sub(r"^[-*]\s+", "", unicodedata.normalize("NFC", name).strip(" \t,;:=|\ufeff"))
    return bare.strip("\"'").strip()
