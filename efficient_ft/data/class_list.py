"""Read the classes of masks from class lists (classes.txt and similar files) and from settings."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import plain_line, printable
from efficient_ft.data.counts import counted
from efficient_ft.data.file_list import unreadable
from efficient_ft.data.masks import UNKNOWN, Classes, Color
from efficient_ft.data.tables import MARKS

#: Names of class list files, in order of preference. Classes are read from the first existing file. If this file
#: contains no colors, a later file may provide the colors.
FILES = ("classes.txt", "label_colors.txt", "class_dict.csv", "labelmap.txt", "labels.txt", "class_names.txt")
#: Names of entries that denote unlabeled pixels instead of a class.
NO_CLASS = frozenset(
    ["void", "unlabeled", "unlabelled", "ignore", "ignored", "ignore_label", "no label", "no_label", "unlabeled_pixels"]
)
#: Column names that may occur in a header line.
_HEADER = frozenset(["name", "class", "class_name", "label", "id", "index", "value", "color", "color_rgb", "rgb",
                     "r", "g", "b", "red", "green", "blue", "parts", "actions", "train_id", "category"])  # fmt: skip
_GAP = r"[\s,;:=|]+"
_HEX = re.compile(r"#[0-9a-fA-F]{6}")


@dataclass(frozen=True)
class Entry:
    """An entry of a class list, which defines a class or denotes unlabeled pixels (see `NO_CLASS`)."""

    name: str  # class name
    id: int  # pixel value in masks that contain ids
    color: Color | None = None  # pixel color in color masks, or None if unknown

    @property
    def is_class(self) -> bool:
        """Return True unless the entry denotes unlabeled pixels."""
        return is_class(self.name)


@dataclass(frozen=True)
class ClassList:
    """The entries of a class list and their source."""

    entries: tuple[Entry, ...]  # entries, sorted by id
    source: str  # name of the file or setting that contains the entries
    notes: tuple[str, ...] = ()  # notes for the user, one sentence each


def is_class(name: str) -> bool:
    """Return True unless the name denotes unlabeled pixels."""
    return name.strip().casefold() not in NO_CLASS


def read_class_list(root: Path) -> ClassList | None:
    """Read the class list in a folder, or return None if there is no class list.

    Raise `UserError` if a list is unreadable or ambiguous.
    """
    present = [name for name in FILES if (root / name).is_file()]
    if not present:
        return None
    chosen = parse_class_list(root / present[0])
    if chosen.entries[0].color is None:
        for other in present[1:]:
            colors = {entry.name.casefold(): entry.color for entry in parse_class_list(root / other).entries}
            if all(colors.get(entry.name.casefold()) for entry in chosen.entries if entry.is_class):
                entries = tuple(replace(e, color=colors.get(e.name.casefold())) for e in chosen.entries)
                return ClassList(entries, f"{chosen.source} and {other}", chosen.notes)
    if not present[1:]:
        return chosen
    unused = f"The classes are read from {present[0]}. The following files are not used: {', '.join(present[1:])}."
    return replace(chosen, notes=(*chosen.notes, unused))


def listed_names(names: Sequence[str], source: str) -> ClassList:
    """Create a class list that assigns the ids 0, 1, … to names.

    Raise `UserError` if two names are equal or differ only in case.
    """
    found = ClassList(tuple(Entry(_clean(name), number) for number, name in enumerate(names)), source)
    _refuse_equal(found.entries, source)
    return found


def parse_class_list(file: Path) -> ClassList:
    """Read a class list from a file. Raise `UserError` if the list is unreadable or ambiguous.

    Each line contains one of the following: a name; an id and a name (``3: cell``); a name and a color (``sky 128 128
    128``, ``128 128 128 sky``, ``sky,#808080``); or an id, a name and a color. If the list contains no ids, its entries
    are numbered consecutively, starting at 0. A line that begins with ``#`` is a comment, unless the line begins with a
    color such as ``#808080``. A ``#`` that is surrounded by spaces also begins a comment.
    """
    place = printable(file)
    lines = _lines(file)
    parsed = [(number, _parse(text, f"{place}, line {number}")) for number, text in lines if text]
    if not parsed:
        raise UserError(
            f"The class list {place} contains no class. Write one class name per line, in the order of the ids 0, 1, …"
        )
    kinds = {found[0] for _, found in parsed}
    entries, notes = _entries(parsed, kinds, place)
    if "id" not in kinds and "id color" not in kinds:
        empty = [number for number, text in lines if not text and number < parsed[-1][0]]
        if empty:
            raise UserError(
                f"{place}: line {empty[0]} is empty, so the ids of the classes after this line are ambiguous."
                " Remove the empty line, write 'void' if the id has no class, or begin each line with an id ('0 NAME')."
            )
    _refuse_equal(entries, place)
    return ClassList(tuple(sorted(entries, key=lambda entry: entry.id)), file.name, tuple(notes))


def _rgb(color: str | Color) -> Color:
    if not isinstance(color, str):
        return color
    assert _HEX.fullmatch(color), "refused by `config.check`"
    return int(color[1:3], 16), int(color[3:5], 16), int(color[5:], 16)


def _lines(file: Path) -> list[tuple[int, str]]:
    """Return the lines of a file with line numbers. Empty lines are included; comments and the header are omitted."""
    try:
        raw = file.read_bytes()
        mark, encoding = next(((mark, name) for mark, name in MARKS if raw.startswith(mark)), (b"", "utf-8"))
        if not mark and b"\0" in raw:
            encoding = "utf-16-be" if raw[:1] == b"\0" else "utf-16-le"
        text = raw[len(mark) :].decode(encoding)
    except UnicodeDecodeError as error:
        raise UserError(
            f"The file {printable(file)} is not UTF-8 ({error.reason}). Save the file as UTF-8 or UTF-16."
        ) from error
    except OSError as error:
        raise unreadable(file, error) from error
    if "\0" in text:
        raise UserError(f"The file {printable(file)} is not a text file. Save the file as UTF-8 or UTF-16.")
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


_Line = tuple[str, str, int | None, Color | None]  # kind, name, id and color of a line
#: Descriptions of the line kinds for messages. In every kind except "name id", the id precedes the name.
_KINDS = {"name": "a name", "id": "an id and a name", "name id": "a name and a number", "number": "a number",
          "color": "a name and a color", "id color": "an id, a name and a color"}  # fmt: skip


def _parse(text: str, place: str) -> _Line:
    whole = text
    color = None
    for found in _HEX.finditer(text):
        before, after = text[: found.start()].strip(" \t,;:=|"), text[found.end() :].strip(" \t,;:=|")
        if not before or not after:
            color, text = _rgb(found[0]), before or after
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
        return ("number", text.strip(), first[0] if len(first) == 1 else None, color)
    counts = (len(first), len(last))
    if color is None and counts in ((3, 0), (4, 0), (0, 3), (1, 3), (3, 1)):
        red, green, blue = first[-3:] if len(first) >= 3 else last[:3]
        color = (red, green, blue)
        first, last = (first[:-3], last) if len(first) >= 3 else (first, last[3:])
        counts = (len(first), len(last))
    if color is not None and max(color) > 255:
        raise UserError(f"{place}: colors must be integers from 0 to 255, got {plain_line(whole)}.")
    if counts == (0, 0):
        return ("name" if color is None else "color", name, None, color)
    if counts == (1, 0):
        return ("id" if color is None else "id color", name, first[0], color)
    if counts == (1, 1) and color is None:  # an id, and a name that ends with a number, such as '1 class 1'
        return ("id", _clean(rest), first[0], None)
    if counts == (0, 1):
        plain = color is None and re.search(r"[,;:=|\t]\s*\d+$", text) is None  # 'class 1' may be a name without an id
        return ("name id" if plain else "id" if color is None else "id color", name, last[0], color)
    if color is None and max(counts) < 3:
        return ("name", _clean(whole), None, None)
    raise UserError(
        f"{place}: the entry {plain_line(whole)} is not a valid class. The supported formats are 'NAME', 'ID NAME'"
        " ('3 sky'), 'NAME RED GREEN BLUE' ('sky 128 128 128') and 'ID NAME RED GREEN BLUE'."
    )


def _entries(parsed: Sequence[tuple[int, _Line]], kinds: set[str], place: str) -> tuple[list[Entry], list[str]]:
    """Convert parsed lines to entries, and return the entries and notes for the user.

    Raise `UserError` if the formats of the lines are incompatible.
    """
    rows = [row for _, row in parsed]
    names: list[str] | None = None
    if kinds == {"number"}:
        if [number for _, _, number, _ in rows] != list(range(len(rows))):
            raise UserError(f"{place} contains numbers without names. Write an id and a name on each line ('3 sky').")
        names = [name for _, name, _, _ in rows]
    elif kinds <= {"name", "name id", "number"}:
        stems, ids = {name.casefold() for _, name, _, _ in rows}, {number for _, _, number, _ in rows}
        if kinds == {"name id"} and len(stems) == len(ids) == len(rows) > 1:
            kinds = {"id"}  # the numbers are ids ('sky 0') and not parts of names ('class 1')
        else:
            names = [f"{name} {number}" if kind == "name id" else name for kind, name, number, _ in rows]
    elif kinds == {"id", "name"} and rows[0][0] == "name":  # the list contains names such as '4 wheeler'
        names = [name if kind == "name" else f"{number} {name}" for kind, name, number, _ in rows]
    if names is not None:
        return [Entry(name, number) for number, name in enumerate(names)], []
    if len(kinds) > 1:
        line, first = parsed[0]
        other, row = next((number, row) for number, row in parsed if row[0] != first[0])
        raise UserError(
            f"{place}: line {line} contains {_KINDS[first[0]]}, but line {other} contains {_KINDS[row[0]]}"
            f" ({plain_line(row[1])}). Use the same format on all lines."
        )
    entries = [Entry(name, at if given is None else given, color) for at, (_, name, given, color) in enumerate(rows)]
    numbers = [entry.id for entry in entries]
    if not kinds & {"id", "id color"} or numbers == list(range(len(numbers))):
        return entries, []
    return entries, [f"The class ids in {Path(place).name} range from {min(numbers)} to {max(numbers)}."]


def _refuse_equal(entries: Sequence[Entry], place: str) -> None:
    names: dict[str, Entry] = {}
    ids: dict[int, Entry] = {}
    colors: dict[Color, Entry] = {}
    for entry in entries:
        same = names.setdefault(entry.name.casefold(), entry)
        if same is not entry and entry.is_class:
            why = "occurs twice" if same.name == entry.name else f"differs from {same.name} only in case"
            raise UserError(f"{place}: the class {plain_line(entry.name)} {why}. Each class must have a unique name.")
        same = ids.setdefault(entry.id, entry)
        if same is not entry:
            raise UserError(
                f"{place} assigns the id {entry.id} to both {same.name} and {entry.name}. Each id must be unique."
            )
        if entry.id >= 1 << 16:
            raise UserError(f"{place}: ids must be less than 65536, got {entry.id} for {plain_line(entry.name)}.")
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


def folder_classes(root: Path, settings: MaskConfig, values_found: Callable[[], str]) -> tuple[Classes, list[str]]:
    """Return the mask classes of a folder and notes for the user.

    Raise `UserError` if there is no class list, or if the list is invalid or contains fewer than two classes, and
    `SettingError` if a setting is invalid. If there is no class list, the message contains the result of
    `values_found`.
    """
    found = _listed(root, settings, values_found)
    entries = list(found.entries)
    if settings.colors is not None:
        entries = _colored(entries, {name: _rgb(color) for name, color in settings.colors.items()})
    names = [entry.name for entry in entries if entry.is_class]
    place = printable(root.absolute())
    if isinstance(settings.values, Mapping):
        classes = _by_values(entries, dict(sorted(settings.values.items())), settings)
    else:
        without = {entry.id for entry in entries if not entry.is_class} | set(settings.ignored)
        explicit = [entry.id for entry in entries] != list(range(len(entries)))
        kept = [e for e in entries if e.is_class and e.id not in without and (explicit or e.id != IGNORED)]
        ids = tuple(entry.id for entry in kept)
        ignored = frozenset(without | ({IGNORED} - set(ids)))
        chosen = settings.values is not None or IGNORED in without or IGNORED in ids
        classes = Classes(tuple(entry.name for entry in kept), ids, ignored, chosen=chosen)
        names = list(classes.names)
    if len(names) < 2:
        hint = " List the background as well." if len(names) == 1 and is_class(names[0]) else ""
        raise UserError(
            f"The data set in {place} has {counted(len(names), 'class')} ({found.source}). Segmentation requires at"
            f" least two classes.{hint}"
        )
    if len(names) > UNKNOWN:
        raise UserError(f"The data set in {place} has {len(names)} classes, but at most 254 classes are supported.")
    return _with_colors(classes, entries, settings), list(found.notes)


def _listed(root: Path, settings: MaskConfig, values_found: Callable[[], str]) -> ClassList:
    if settings.classes is not None:
        return listed_names(settings.classes, "data.masks.classes")
    found = read_class_list(root)
    if found is not None:
        return found
    if isinstance(settings.values, Mapping):
        named = [target for _, target in sorted(settings.values.items()) if isinstance(target, str)]
        if len(named) == len(settings.values):
            unique = dict.fromkeys(name for name in named if is_class(name))
            return listed_names(list(unique), "data.masks.values")
    elif settings.colors is not None:
        # The names are sorted, so that the class ids do not depend on the order of the mapping.
        return listed_names(sorted(name for name in settings.colors if is_class(name)), "data.masks.colors")
    others = sorted(one.name for one in root.iterdir() if one.suffix.lower() in (".txt", ".json", ".csv", ".yaml"))
    has = f" The folder contains {', '.join(map(printable, others[:3]))}." if others else ""
    raise UserError(
        f"The folder {printable(root.absolute())} has no classes.txt. This file must list the class names, one per"
        f" line, in the order of the mask ids (0, 1, …).{has}{values_found()} Create classes.txt, set"
        " data.masks.classes=[NAME,…], or map the ids with data.masks.values={VALUE: NAME, …}."
    )


def _colored(entries: list[Entry], colors: Mapping[str, Color]) -> list[Entry]:
    """Return the entries with the colors from `data.masks.colors`.

    Names in `data.masks.colors` that denote unlabeled pixels are added as entries if they are missing.
    """
    seen: dict[Color, str] = {}
    for name, color in colors.items():
        if seen.setdefault(color, name) != name and (is_class(name) or is_class(seen[color])):
            advice = f"The names {seen[color]} and {name} have the same color."
            raise SettingError("data.masks.colors", list(color), "a mapping from names to unique colors", advice)
    left = {name.strip().casefold(): color for name, color in colors.items()}
    found = []
    for entry in entries:
        own = left.pop(entry.name.casefold(), None if entry.is_class else entry.color)
        if own is None and entry.is_class:
            known, advice = "a mapping with a color for each class", f"Add a color for the class {entry.name}."
            raise SettingError("data.masks.colors", list(colors), known, advice)
        found.append(replace(entry, color=own))
    free = max((entry.id for entry in entries), default=-1) + 1
    for number, (name, color) in enumerate(left.items(), free):
        if is_class(name):
            raise SettingError("data.masks.colors", name, [entry.name for entry in entries if entry.is_class])
        found.append(Entry(name, number, color))
    return found


def _by_values(entries: list[Entry], values: dict[int, str | int], settings: MaskConfig) -> Classes:
    by_name = {entry.name.casefold(): entry for entry in entries}
    by_id = {entry.id: entry for entry in entries}
    kept = [entry for entry in entries if entry.is_class]
    index = {entry.id: number for number, entry in enumerate(kept)}
    known = [entry.name for entry in kept]
    ids: dict[int, int] = {}
    further = []
    without = set(settings.ignored)
    for value, target in values.items():
        entry = by_id.get(target) if isinstance(target, int) else by_name.get(target.strip().casefold())
        if entry is None:
            if isinstance(target, str) and target.strip().casefold() in NO_CLASS:
                without.add(value)
                continue
            choices = f"one of {', '.join(known)}, or void" + (", or a class id" if isinstance(target, int) else "")
            near = did_you_mean(str(target), known).strip() or None
            raise SettingError(f"data.masks.values.{value}", target, choices, near)
        if not entry.is_class:
            without.add(value)
        elif value in settings.ignored:
            raise SettingError("data.masks.ignored", value, "a value that data.masks.values does not map to a class")
        elif entry.id not in ids:
            ids[entry.id] = value
        else:
            further.append((value, index[entry.id]))
    lacking = [entry.name for entry in kept if entry.id not in ids]
    if lacking:
        rest = ", ".join(entry.name for entry in kept if entry.id in ids)
        advice = f"Add {', '.join(lacking[:5])}, or list only the other classes with data.masks.classes=[{rest}]."
        raise SettingError("data.masks.values", values, "a mapping with a value for each class", advice)
    ignored = frozenset(without | ({IGNORED} - ({*values} - without)))
    return Classes(tuple(known), tuple(ids[entry.id] for entry in kept), ignored, tuple(further), chosen=True)


def _with_colors(classes: Classes, entries: list[Entry], settings: MaskConfig) -> Classes:
    colors = {entry.name: entry.color for entry in entries if entry.is_class}
    given = [colors[name] for name in classes.names]
    complete = tuple(color for color in given if color is not None)
    if len(complete) < len(given) or settings.values is not None:
        if settings.palette == "color":
            advice = "Add colors to classes.txt ('NAME RED GREEN BLUE'), or set data.masks.colors."
            known = "index or auto, because the classes have no colors"
            if settings.values is not None:
                advice, known = "Remove data.masks.values.", "index or auto, because data.masks.values is set"
            raise SettingError("data.masks.palette", "color", known, advice)
        complete = ()
    ignored = {entry.color for entry in entries if entry.name not in classes.names and entry.color is not None}
    without = frozenset(ignored if complete else ())
    chosen = classes.chosen or settings.colors is not None
    return replace(classes, colors=complete, ignored_colors=without, palette=settings.palette, chosen=chosen)
