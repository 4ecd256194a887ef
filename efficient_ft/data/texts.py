"""Lists of texts with classes: files of rows (CSV, TSV, JSONL), folders of text files, and their splits."""

from __future__ import annotations

import csv
import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.data.images import printable
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
        places: where each is: a file, with its line.
    """

    texts: list[tuple[str, ...]]
    labels: np.ndarray
    places: list[str]

    def __len__(self) -> int:
        return len(self.texts)

    def take(self, indices: np.ndarray) -> Texts:
        """Return the samples at `indices`, in that order."""
        return Texts([self.texts[i] for i in indices], self.labels[indices], [self.places[i] for i in indices])

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

    def digest(self) -> str:
        """8 hex digits that tell two copies apart."""
        found = hashlib.blake2b("\n".join(self.class_names).encode(), digest_size=4)
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
    """Say what belongs where there is nothing; None: there is a file or a folder."""
    return None if root.exists() else f"data.root={printable(root)}: no such file or folder. {_LAYOUT}"


def read_texts(root: Path, settings: TextConfig) -> TextListing:
    """List the texts of a file, or below a folder.

    Without validation and test texts a fifth of every class is held out for testing, the same for every seed.

    Args:
        root: the file or folder.
        settings: the columns of files.

    Raises:
        UserError: there is no such file or column, a file cannot be read, or there are fewer than two classes.
    """
    problem = missing_text_folder(root)
    if problem is not None:
        raise UserError(problem)
    if root.is_file():
        return listing_of({"train": list(read_rows(root, settings))}, root)
    found: dict[str, list[Row]] = {}
    for split, names in _SPLITS.items():
        files = [root / f"{name}{extension}" for name in names for extension in EXTENSIONS]
        here = [path for path in (*files, *(root / name for name in names)) if path.exists()]
        if len(here) > 1:
            raise UserError(f"{printable(root.absolute())} has {' and '.join(path.name for path in here)}. Keep one.")
        if here:
            found[split] = list(read_rows(here[0], settings) if here[0].is_file() else _class_folders(here[0]))
    if not found:
        found["train"] = list(_class_folders(root))
    if "train" not in found:
        raise UserError(f"{printable(root.absolute())} has no training texts. {_LAYOUT}")
    return listing_of(found, root)


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
        parts[split] = Texts([row.text for row in rows], labels, [row.place for row in rows])
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
    try:
        return (0, float(name), name)
    except ValueError:
        return (1, 0.0, name)


def read_rows(path: Path, settings: TextConfig, **dialect: Any) -> Iterator[Row]:
    """Read the rows of a .csv, .tsv or .jsonl file.

    Args:
        path: the file.
        settings: its columns.
        dialect: further arguments of `csv.DictReader`.

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
        yield Row(text, name, place, problem and f"{place}: {problem}.")
    if not number:
        raise UserError(f"{printable(path)} has no rows.")


def _open(path: Path) -> list[str]:
    """The lines of a file, with their ends."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            return file.readlines()
    except UnicodeDecodeError as error:
        raise UserError(
            f"{printable(path)} is not UTF-8 (byte {error.start}: {error.object[error.start]:#04x}). Convert it, e.g."
            " by iconv -f latin1 -t utf-8."
        ) from error
    except OSError as error:
        raise UserError(f"{printable(path)} cannot be read ({error.strerror}).") from error


def _csv_rows(path: Path, delimiter: str, dialect: Mapping[str, Any]) -> Iterator[tuple[int, dict[str, Any]]]:
    reader = csv.DictReader(iter(_open(path)), delimiter=delimiter, strict=True, **dialect)
    try:
        for row in reader:
            if None in row or None in row.values():
                cells = len(row) - 1 + len(row[None]) if None in row else sum(v is not None for v in row.values())
                raise UserError(
                    f"{printable(path)}, line {reader.line_num}: {cells} cells, where the first line names"
                    f" {len(reader.fieldnames or ())} columns. A text with a separator in it belongs in quotes."
                )
            yield reader.line_num, row
    except csv.Error as error:
        raise UserError(f"{printable(path)}, line {reader.line_num}: not readable as a table ({error}).") from error


def _json_rows(path: Path) -> Iterator[tuple[int, dict[str, Any]]]:
    for number, line in enumerate(_open(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except json.JSONDecodeError as error:
            raise UserError(f"{printable(path)}, line {number}: not JSON ({error.msg}).") from error
        if not isinstance(row, dict):
            raise UserError(f'{printable(path)}, line {number}: a line holds one object, {{"text": …, "label": …}}.')
        yield number, row


def _class_folders(folder: Path) -> Iterator[Row]:
    """The text files in the class folders of a folder, at any depth."""
    classes = sorted(p for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
    found = False
    for place in classes:
        for inner, folders, files in os.walk(place):
            folders[:] = sorted(name for name in folders if not name.startswith("."))
            for name in sorted(files):
                if name.lower().endswith(".txt") and not name.startswith("."):
                    found, path = True, Path(inner) / name
                    text = "".join(_open(path)).strip()
                    yield Row((text,), place.name, printable(path), None if text else f"{printable(path)}: no text.")
    if not found:
        raise UserError(f"{printable(folder.absolute())} has no texts. {_LAYOUT}")
