"""Lists of texts with classes: files of rows (CSV, TSV, JSONL), folders of text files, and their splits."""

from __future__ import annotations

import contextlib
import csv
import hashlib
import io
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from efficient_ft.core.errors import SettingError, UserError, did_you_mean, first_line
from efficient_ft.core.text import printable
from efficient_ft.data.below import Below, files_below, links_in
from efficient_ft.data.listing import hold_out_test

if TYPE_CHECKING:
    from efficient_ft.config.schema import TextConfig

_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation", "dev"), "test": ("test",)}
EXTENSIONS = (".csv", ".tsv", ".jsonl")
_LAYOUT = (
    "Expected: a file of rows (.csv, .tsv or .jsonl); or a folder with train, val and test of such files, or with"
    " CLASS/*.txt or {train,val,test}/CLASS/*.txt."
)

csv.field_size_limit(1 << 30)


@dataclass
class Texts:
    """Texts, or pairs of them, with labels.

    Attributes:
        texts: N texts, each a tuple of one or two.
        labels: int64 (N,).
    """

    texts: list[tuple[str, ...]]
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: np.ndarray) -> Texts:
        """Return the samples at `indices`, in that order."""
        return Texts([self.texts[i] for i in indices], self.labels[indices])

    def content_digest(self) -> str:
        """16 hex digits that tell any change apart."""
        found = hashlib.blake2b(self.labels.astype("<i8").tobytes(), digest_size=8)
        for text in self.texts:
            found.update("\0".join((*text, "")).encode(errors="surrogateescape"))
        return found.hexdigest()


@dataclass
class TextListing:
    """A data set of texts with the splits of its publisher or of the user's files; see `listing.Listing`.

    Attributes:
        class_names: by label.
        skipped: rows and files that cannot be used, with the reason.
    """

    class_names: list[str]
    train: Texts
    val: Texts | None = None
    test: Texts | None = None
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """8 hex digits that tell two copies apart."""
        found = hashlib.blake2b("\n".join(self.class_names).encode(errors="surrogateescape"), digest_size=4)
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if part is not None:
                found.update(f"{name} {part.content_digest()}".encode())
        return found.hexdigest()


@dataclass(frozen=True)
class Row:
    """A text or pair with the name of its class, and where it is; `problem` says why it cannot be used."""

    text: tuple[str, ...]
    label: str
    place: str
    problem: str | None = None


def missing_text_folder(root: Path) -> str | None:
    """Say what `data.root` may be if there is nothing; None: there is a file or a folder."""
    return None if root.exists() else f"data.root={printable(root)}: no such file or folder. {_LAYOUT}"


def read_texts(root: Path, settings: TextConfig, follow_links: bool = False) -> TextListing:
    """List the texts of a file, or below a folder.

    Without validation and test texts a fifth of every class is held out for testing, the same for every seed.

    Args:
        root: the file or folder; may be a link.
        settings: the columns of files.
        follow_links: use what links out of `root` lead to, and say so in the notes.

    Raises:
        UserError: there is no such file or column, a file cannot be read, there are fewer than two classes, or a link
            leads out of `root` and is not to be followed.
    """
    problem = missing_text_folder(root)
    if problem is not None:
        raise UserError(problem)
    if root.is_file():
        return listing_of({"train": list(read_rows(root, settings))}, root)
    found: dict[str, list[Row]] = {}
    notes: list[str] = []

    def class_folders(folder: Path) -> list[Row]:
        return list(_class_folders(folder, settings, root, follow_links, notes))

    for split, names in _SPLITS.items():
        files = [root / f"{name}{extension}" for name in names for extension in EXTENSIONS]
        here = [path for path in (*files, *(root / name for name in names)) if path.exists()]
        if len(here) > 1:
            raise UserError(f"{printable(root.absolute())} has {' and '.join(path.name for path in here)}. Keep one.")
        if here:
            notes += links_in(here, root, follow_links)
            found[split] = list(read_rows(here[0], settings)) if here[0].is_file() else class_folders(here[0])
    if not found:
        found["train"] = class_folders(root)
    if "train" not in found:
        raise UserError(f"{printable(root.absolute())} has no training texts. {_LAYOUT}")
    listing = listing_of(found, root)
    listing.notes += notes
    return listing


def listing_of(found: Mapping[str, Sequence[Row]], root: Path) -> TextListing:
    """Number the classes, and split.

    Raises:
        UserError: fewer than two classes, or a class that the training texts lack.
    """
    usable = {split: [row for row in rows if row.problem is None] for split, rows in found.items()}
    skipped = {row.place: row.problem for rows in found.values() for row in rows if row.problem is not None}
    for split, rows in usable.items():
        if not rows:
            first = f" The first row: {next(iter(skipped.items()))[1]}" if skipped else ""
            raise UserError(f"{printable(root.absolute())} has no usable text for {split}.{first}")
    names = sorted({row.label for row in usable["train"]}, key=_in_order)
    if len(names) < 2:
        raise UserError(f"{printable(root.absolute())} has the single class {names[0]!r}. Classification needs two.")
    numbers = {name: k for k, name in enumerate(names)}
    parts = {}
    for split, rows in usable.items():
        unknown = next((row for row in rows if row.label not in numbers), None)
        if unknown is not None:
            raise UserError(
                f"{unknown.place}: the class {unknown.label!r} is none of the training texts, which have"
                f" {', '.join(names[:8])}{', …' if len(names) > 8 else ''}."
            )
        labels = np.asarray([numbers[row.label] for row in rows], dtype=np.int64)
        parts[split] = Texts([row.text for row in rows], labels)
    train, val, test, notes = parts["train"], parts.get("val"), parts.get("test"), []
    if val is None and test is None:
        whole = len(train)
        train, test = hold_out_test(train)
        if not len(test):
            raise UserError("Every class has a single text: none can be held out for testing. Add texts.")
        notes.append(f"{len(test)} of {whole} texts are held out for testing, the same for every seed.")
    return TextListing(names, train, val, test, notes, skipped)


def _in_order(name: str) -> tuple[int, float, str]:
    """Numbers by their value, before words."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(name)):
            return (0, value, name)
    return (1, 0.0, name)


def read_rows(path: Path, settings: TextConfig, **dialect: Any) -> Iterator[Row]:
    """Read the rows of a .csv, .tsv or .jsonl file.

    Args:
        path: the file.
        settings: its columns.
        dialect: further arguments of `csv.reader`.

    Raises:
        UserError: another kind of file, not UTF-8, no such column, or a row that cannot be read.
    """
    columns, label = settings.columns, settings.label
    kind = path.suffix.lower()
    if kind not in EXTENSIONS:
        raise UserError(f"{printable(path)}: the file of texts must be one of {' '.join(EXTENSIONS)}.")
    records = _json_rows(path) if kind == ".jsonl" else _csv_rows(path, "\t" if kind == ".tsv" else ",", dialect)
    number = 0
    for number, record in records:
        for setting, column in (*(("columns", c) for c in columns), ("label", label)):
            if column not in record:
                names = [name for name in record if isinstance(name, str)]
                raise UserError(
                    f"{printable(path)}, line {number}: no column {column!r} (data.text.{setting}). It has"
                    f" {', '.join(names)}.{did_you_mean(column, names)}"
                )
        place = f"{printable(path)}, line {number}"
        text = tuple("" if record[c] is None else str(record[c]).strip() for c in columns)
        of_class = record[label]
        name = "" if of_class is None else str(of_class).strip()
        problem = "an empty text" if not all(text) else None if name else "no class"
        if not _is_unicode("".join((*text, name))):
            problem = "not valid Unicode"
        yield Row(text, name, place, problem and f"{place}: {problem}.")
    if not number:
        raise UserError(f"{printable(path)} has no rows.")


def _is_unicode(text: str) -> bool:
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _open(path: Path) -> list[str]:
    """The lines of a file, with their ends."""
    try:
        raw = path.read_bytes()
        return io.StringIO(raw.decode("utf-8-sig"), newline="").readlines()
    except UnicodeDecodeError as error:
        line = raw.count(b"\n", 0, error.start) + 1
        raise UserError(
            f"{printable(path)}, line {line}: not UTF-8 (byte {raw[error.start]:#04x}). Convert the file, e.g. by"
            " iconv -f ENCODING -t utf-8."
        ) from error
    except OSError as error:
        raise UserError(f"{printable(path)} cannot be read ({error.strerror}).") from error


def _csv_rows(path: Path, delimiter: str, dialect: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    lines = _open(path)
    start = next((number for number, line in enumerate(lines) if line.strip()), 0)
    reader = csv.reader(iter(lines[start:]), delimiter=delimiter, strict=True, **dialect)
    before, names = 0, None
    try:
        for cells in reader:
            number, before = start + before + 1, reader.line_num
            if names is None:
                names = [name.strip() for name in cells]
                twice = next((name for name in names if names.count(name) > 1), None)
                if twice is not None:
                    raise UserError(f"{printable(path)} has two columns {twice!r}. Rename one of them.")
                continue
            if not cells:
                continue
            if len(cells) != len(names):
                found = "1 cell" if len(cells) == 1 else f"{len(cells)} cells"
                raise UserError(
                    f"{printable(path)}, line {number}: {found}, where the first line names {len(names)} columns. A"
                    " text with a separator in it belongs in quotes."
                )
            yield number, dict(zip(names, cells, strict=True))
    except csv.Error as error:
        raise UserError(
            f"{printable(path)}, line {start + before + 1}: not readable as a table ({error}). A cell that begins with"
            ' a quote ends with one, and quotes in it are doubled ("").'
        ) from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_open(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except (ValueError, RecursionError) as error:
            raise UserError(f"{printable(path)}, line {number}: not JSON ({first_line(error)}).") from error
        if not isinstance(row, dict):
            raise UserError(f'{printable(path)}, line {number}: a line holds one object, {{"text": …, "label": …}}.')
        yield number, row


def _class_folders(
    folder: Path, settings: TextConfig, root: Path, follow_links: bool, notes: list[str]
) -> Iterator[Row]:
    """The text files in the class folders of a folder of the data set `root`, at any depth; `notes` are added to."""
    if len(settings.columns) > 1:
        raise SettingError(
            "data.text.columns", settings.columns, f"one column: {printable(folder)} has folders, a file for each text"
        )
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = False
    listed = frozenset(os.path.realpath(place) for place in classes)
    notes += links_in(classes, root, follow_links)
    for place in classes:
        below = files_below(place, Below(root=os.path.realpath(root), listed=listed, follow_links=follow_links))
        if below.links or below.special or below.again:
            raise UserError(below.notes(place)[0])
        notes += below.notes(place)
        for path in map(Path, below.files):
            if path.suffix.lower() == ".txt":
                found = True
                text = "".join(_open(path)).strip()
                yield Row((text,), place.name, printable(path), None if text else f"{printable(path)}: no text.")
    if not found:
        raise UserError(f"{printable(folder.absolute())} has no texts. {_LAYOUT}")
