"""List texts with their classes and splits, from a user's files and folders."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import and_more, counted, some, verb
from efficient_ft.data.listing import hold_out_test, splits_of
from efficient_ft.data.splits import Chosen, show
from efficient_ft.data.text_folders import LAYOUT, SplitRows
from efficient_ft.data.text_labels import (
    in_order,
    refuse_unknown,
    refuse_unlabeled,
    require_classes,
    require_texts,
    spellings,
)  # fmt: skip
from efficient_ft.data.text_places import Reader, origin
from efficient_ft.data.text_rows import Row


@dataclass
class Texts:
    """Texts or pairs of texts, with labels.

    Attributes:
        texts: N tuples of one or two texts.
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
        """Return a digest (16 hex digits) of the texts and labels."""
        hasher = hashlib.blake2b(self.labels.astype("<i8").tobytes(), digest_size=8)
        for text in self.texts:
            hasher.update("\0".join((*text, "")).encode(errors="surrogateescape"))
        return hasher.hexdigest()


@dataclass
class TextListing:
    """The samples of a text data set by split (official or user-defined splits); see `listing.Listing`.

    Attributes:
        class_names: class names by label.
        skipped: reason by place, for rows and files that cannot be used.
    """

    class_names: list[str]
    train: Texts
    val: Texts | None = None
    test: Texts | None = None
    notes: list[str] = field(default_factory=list)
    skipped: dict[str, str] = field(default_factory=dict)
    origins: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    @property
    def size(self) -> int:
        """Number of texts, including unusable texts."""
        return len(self.skipped) + sum(map(len, splits_of(self).values()))

    def digest(self) -> str:
        """Return a digest (8 hex digits) of the texts, labels and class names."""
        hasher = hashlib.blake2b("\n".join(self.class_names).encode(errors="surrogateescape"), digest_size=4)
        for name, part in splits_of(self).items():
            hasher.update(f"{name} {part.content_digest()}".encode())
        return hasher.hexdigest()


def missing_text_folder(root: Path) -> str | None:
    """Return the error message if `data.root` does not exist, otherwise None."""
    return None if root.exists() else f"data.root={printable(root)}: no such file or folder. {LAYOUT}"


def read_texts(
    root: Path, settings: TextConfig, follow_links: bool = False, splits: Chosen | None = None
) -> TextListing:
    """List the texts of a file or a folder. See `read_folder` for the arguments.

    If there is neither a validation nor a test split, one fifth of every class is held out for testing, the same texts
    for every seed.

    Raises:
        UserError: If a file or column does not exist, a file cannot be read, the labels are not classes, the folder is
            ambiguous, or a link leads out of `root` and `follow_links` is False.
        SettingError: If a setting does not fit the files.
    """
    problem = missing_text_folder(root)
    if problem is not None:
        raise UserError(problem)
    if root.is_dir():
        return listing_of(Reader(root, settings, follow_links).read(splits), root, settings)
    if not root.is_file():
        raise UserError(f"data.root={printable(root)} is neither a file nor a folder. {LAYOUT}")
    if splits is not None:
        raise SettingError("data.splits", show(splits), "null if data.root is a file", "Pass the folder as data.root.")
    reader = Reader(root.parent, settings, follow_links)
    read = reader.rows_of(root)
    reader.found.rows["train"], reader.found.columns = read.rows, read.columns
    reader.found.origins["train"] = f"{printable(root.name)} ({origin(read)})"
    reader.note_siblings(root)
    return listing_of(reader.found, root, settings)


def listing_of(found: SplitRows, root: Path, settings: TextConfig) -> TextListing:
    """Map labels to classes, and hold out test texts if there is neither a validation nor a test split.

    The rows of the training split must come first. Messages name the file or folder `root`.

    Raises:
        UserError: If a split has no usable texts, or the labels are not classes.
    """
    top = printable(root.absolute())
    usable: dict[str, list[Row]] = {}
    skipped: dict[str, str] = {}
    for split, rows in found.rows.items():
        usable[split] = [row for row in rows if row.problem is None]
        unusable = [row for row in rows if row.problem is not None]
        here = {row.place: f"{row.place}: {row.problem}." for row in unusable}
        skipped |= here
        source = top if root.is_file() else f"{top}, {found.origins.get(split, split)}"
        missing = sum(str(row.problem).startswith("no label") for row in unusable)
        if missing == len(unusable):
            refuse_unlabeled([row.label for row in usable[split]], missing, split, source, found.without(split))
        if not usable[split]:
            why = f": {reasons_of(here)}. First: {next(iter(here.values()))}" if here else "."
            raise UserError(f"{source} has no usable text for {split}{why}{found.without(split)}")
    try:
        column = settings.label if found.columns else None
        require_classes([row.label for row in usable["train"]], top, column, found.columns)
        names, notes = _classes(usable, top, settings, found)
    except UserError as error:
        if not skipped:
            raise
        raise UserError(f"{error} {counted(len(skipped), 'text')} cannot be used: {reasons_of(skipped)}.") from error
    class_names = sorted({names[row.label] for row in usable["train"]}, key=in_order)
    ids = {name: number for number, name in enumerate(class_names)}
    numbers = {label: ids[name] for label, name in names.items()}
    parts = {
        split: Texts([row.text for row in rows], np.asarray([numbers[row.label] for row in rows], dtype=np.int64))
        for split, rows in usable.items()
    }
    train, val, test = parts["train"], parts.get("val"), parts.get("test")
    origins, left_out = dict(found.origins), dict(found.left_out)
    if val is None and test is None:
        whole = len(train)
        train, test = hold_out_test(train)
        notes.append(
            f"{len(test)} of {whole} texts {verb(len(test), 'is', 'are')} held out for testing, the same for every"
            " seed."
        )
        origins["test"] = f"held out of {re.sub(' [(][^)]*[)]', '', origins.get('train', 'train'))}"
    return TextListing(class_names, train, val, test, [*notes, *found.notes], skipped, origins, left_out)


def _classes(
    usable: Mapping[str, Sequence[Row]], top: str, settings: TextConfig, found: SplitRows
) -> tuple[dict[str, str], list[str]]:
    """Return the class of each label, and notes on the labels."""
    raw = {split: Counter(row.label for row in rows) for split, rows in usable.items()}
    names, notes = spellings(sum(raw.values(), Counter[str]()), settings.ignore_case)
    counts: dict[str, Counter[str]] = {split: Counter() for split in raw}
    places: dict[str, dict[str, str]] = {split: {} for split in raw}
    for split, rows in usable.items():
        for row in rows:
            counts[split][names[row.label]] += 1
            places[split].setdefault(names[row.label], row.place)
    require_texts(counts["train"], top, places["train"])
    known = sorted(counts["train"], key=in_order)
    for split in ("val", "test"):
        if split in counts:
            refuse_unknown(counts[split], places[split], known, split, found.without(split))
            absent = [name for name in known if name not in counts[split]]
            if absent:
                notes.append(f"Classes without {split} texts: {some(absent)} ({len(absent)} of {len(known)}).")
    return names, notes


def reasons_of(skipped: Mapping[str, str]) -> str:
    """Return the most frequent reasons in `TextListing.skipped` as text, with counts."""
    counts = Counter(why.removeprefix(f"{place}: ").rstrip(".") for place, why in skipped.items())
    shown = ", ".join(f"{why} ×{count:,}" for why, count in counts.most_common(4))
    return shown + and_more(len(counts) - 4, "reason")
