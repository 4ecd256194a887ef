"""List the texts in files and folders, with their classes and splits."""

from __future__ import annotations

import contextlib
import hashlib
import math
import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from decimal import Decimal
from pathlib import Path
from typing import Any

import numpy as np

from efficient_ft.config.schema import TextConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.text import plain_line, printable, shortened
from efficient_ft.data.counts import counted, most_frequent, some, some_groups, verb
from efficient_ft.data.listing import AnyListing, hold_out_test, splits_of
from efficient_ft.data.splits import Chosen, show
from efficient_ft.data.tables import spelling
from efficient_ft.data.text_places import LAYOUT, Reader, SplitRows
from efficient_ft.data.text_rows import Row


@dataclass
class Texts:
    """Texts or pairs of texts, with labels."""

    texts: list[tuple[str, ...]]  # N tuples of one or two texts
    labels: np.ndarray  # int64 (N,)

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
class TextListing(AnyListing):
    """The samples of a text data set in each official or user-defined split. See `listing.Listing`."""

    class_names: list[str]
    train: Texts
    val: Texts | None = None
    test: Texts | None = None
    #: Reason for each unusable row or file, keyed by location.
    skipped: dict[str, str] = field(default_factory=dict, kw_only=True)

    def digest(self) -> str:
        """Return a digest (8 hex digits) of the texts, labels and class names."""
        hasher = hashlib.blake2b("\n".join(self.class_names).encode(errors="surrogateescape"), digest_size=4)
        for name, part in splits_of(self).items():
            hasher.update(f"{name} {part.content_digest()}".encode())
        return hasher.hexdigest()


def missing_text_folder(root: Path) -> str | None:
    """Return the error message if `data.root` does not exist, or None otherwise."""
    return None if root.exists() else f"data.root={printable(root)}: the file or folder does not exist. {LAYOUT}"


def read_texts(
    root: Path, settings: TextConfig, follow_links: bool = False, splits: Chosen | None = None
) -> TextListing:
    """List the texts of a file or a folder. See `read_folder` for the arguments.

    If there is neither a validation nor a test split, one fifth of every class is held out for testing. The held-out
    texts are the same for every seed.

    Raises:
        UserError: If a file or column does not exist, a file cannot be read, the labels are not suitable as classes,
            the folder is ambiguous, or a link points outside of `root` and `follow_links` is False.
        SettingError: If a setting is incompatible with the files.
    """
    if (problem := missing_text_folder(root)) is not None:
        raise UserError(problem)
    if root.is_dir():
        return listing_of(Reader(root, settings, follow_links).read(splits), root, settings)
    if not root.is_file():
        raise UserError(f"data.root={printable(root)}: the path is neither a file nor a folder. {LAYOUT}")
    if splits is not None:
        raise SettingError("data.splits", show(splits), "null if data.root is a file", "Pass the folder as data.root.")
    reader = Reader(root.parent, settings, follow_links)
    rows, read = reader.rows_of(root)
    reader.found.rows["train"], reader.found.columns = rows, read.columns
    reader.found.origins["train"] = f"{printable(root.name)} ({read.origin})"
    reader.note_siblings(root)
    return listing_of(reader.found, root, settings)


def listing_of(found: SplitRows, root: Path, settings: TextConfig) -> TextListing:
    """Map labels to classes, and hold out test texts if there is neither a validation nor a test split.

    The rows of the training split must come first. Error messages contain the path `root`. Raise `UserError` if a split
    has no usable texts, or the labels are not suitable as classes.
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
            why = f": {reasons_of(here)}. The first unusable text is {next(iter(here.values()))}" if here else "."
            raise UserError(f"{source} contains no usable text for the {split} split{why}{found.without(split)}")
    try:
        if found.columns:  # labels that are folder names are not checked
            require_classes([row.label for row in usable["train"]], top, settings.label, found.columns)
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
    origins = dict(found.origins)
    if val is None and test is None:
        whole = len(train)
        train, test = hold_out_test(train)
        notes.append(
            f"{len(test)} of {whole} texts {verb(len(test), 'is', 'are')} held out for testing. The held-out texts are"
            " the same for every seed."
        )
        origins["test"] = f"held out of {re.sub(' [(][^)]*[)]', '', origins.get('train', 'train'))}"
    facts: dict[str, Any] = {"notes": [*notes, *found.notes], "origins": origins, "left_out": dict(found.left_out)}
    return TextListing(class_names, train, val, test, skipped=skipped, **facts)


def _classes(
    usable: Mapping[str, Sequence[Row]], top: str, settings: TextConfig, found: SplitRows
) -> tuple[dict[str, str], list[str]]:
    names, notes = spellings(Counter(row.label for rows in usable.values() for row in rows), settings.ignore_case)
    counts = {split: Counter(names[row.label] for row in rows) for split, rows in usable.items()}
    places = {split: {names[row.label]: row.place for row in reversed(rows)} for split, rows in usable.items()}
    require_texts(counts["train"], top, places["train"])
    known = sorted(counts["train"], key=in_order)
    for split in ("val", "test"):
        if split in counts:
            refuse_unknown(counts[split], places[split], known, split, found.without(split))
            absent = [name for name in known if name not in counts[split]]
            if absent:
                has = verb(len(absent))
                notes.append(f"{len(absent)} of {len(known)} classes {has} no {split} texts: {some(absent)}.")
    return names, notes


def reasons_of(skipped: Mapping[str, str]) -> str:
    """Return the most frequent reasons in `TextListing.skipped` as text, with counts."""
    counts = Counter(why.removeprefix(f"{place}: ").rstrip(".") for place, why in skipped.items())
    return most_frequent(counts, 4, "reason")


_NUMBER = re.compile(r"[+-]?(\d+(\.\d*)?|\.\d+)([eE][+-]?\d{1,3})?", re.ASCII)
#: Maximum number of distinct numeric labels if some labels have a fractional part. For example, ratings in half stars
#: have ten values.
_DECIMALS = 20
_FREE = 10  # minimum number of distinct labels that may be considered free text
_SHOWN = 3  # maximum number of labels, or groups of labels, in a message


def is_number(name: str) -> bool:
    """Return True if a label is a number."""
    return _NUMBER.fullmatch(name) is not None


def in_order(name: str) -> tuple[int, float, str]:
    """Return a sort key that orders numbers by value, and places numbers before words."""
    with contextlib.suppress(ValueError):
        if math.isfinite(value := float(name)):
            return (0, value, name)
    return (1, 0.0, name)


def spellings(counts: Mapping[str, int], ignore_case: bool | None) -> tuple[dict[str, str], list[str]]:
    """Return the class of each label, and notes on merged labels. `counts` maps each label to its number of texts.

    Labels that are equal numbers form one class. Labels that differ only in case, quotes or equivalent Unicode
    characters are merged if `ignore_case` is True, and kept separate if `ignore_case` is False. If `ignore_case` is
    None, such labels raise a `UserError`.
    """
    same, notes = {name: name for name in counts}, []
    numbers: dict[Decimal, list[str]] = defaultdict(list)
    for name in counts:
        if _NUMBER.fullmatch(name):
            numbers[Decimal(name)].append(name)
    equal = [group for group in numbers.values() if len(group) > 1]
    for group in equal:
        best = min(group, key=lambda name: (not re.fullmatch("-?(0|[1-9][0-9]*)", name), -counts[name], name))
        same |= dict.fromkeys(group, best)
    if equal:
        notes.append(f"Labels that are equal numbers form one class: {some_groups(equal, counts)}.")
    similar: dict[str, dict[str, None]] = defaultdict(dict)
    for name in counts:
        similar[spelling(name)][same[name]] = None
    alike = [list(group) for group in similar.values() if len(group) > 1]
    if not alike:
        return same, notes
    shown = some_groups(alike, counts)
    if ignore_case is None:
        raise UserError(
            f"Some labels differ only in case or quotes: {shown}. If these labels form one class, set"
            " data.text.ignore_case=true. If the labels are separate classes, set data.text.ignore_case=false."
        )
    if ignore_case:
        for group in alike:
            best = min(group, key=lambda name: (-counts[name], name))
            same |= {name: best for name, current in same.items() if current in group}
        notes.append(f"Labels that differ only in case form one class (data.text.ignore_case): {shown}.")
    return same, notes


def require_classes(labels: Sequence[str], source: str, column: str, columns: Sequence[str]) -> None:
    """Raise `UserError` if the labels of the training texts in `source` are a quantity or free text.

    The message contains the names of the label column and of all other columns.
    """
    counts = Counter(labels)
    listed = ", ".join(map(plain_line, columns))
    choose = f"Set data.text.label to the column that contains the classes. The columns are {listed}."
    if all(_NUMBER.fullmatch(name) for name in counts):
        fractions = sum(Decimal(name) % 1 != 0 for name in counts)
        if fractions and (len(counts) > _DECIMALS or len(counts) > max(2, len(labels) / 2)):
            raise UserError(
                f"{source}: the labels in column {column!r} are {len(counts)} different decimal numbers in"
                f" {len(labels)} rows, for example {next(name for name in counts if Decimal(name) % 1)}. These labels"
                f" look like a quantity instead of classes. Map ranges of values to classes. {choose}"
            )
    single = sum(count == 1 for count in counts.values())
    if len(counts) >= _FREE and single > len(labels) / 2:
        raise UserError(
            f"{source}: the {len(labels)} rows have {len(counts)} different labels in column {column!r}, for example"
            f" {plain_line(shortened(max(counts, key=len), 40))!r}. These labels look like free text or identifiers."
            f" {choose}"
        )


def require_texts(counts: Mapping[str, int], source: str, places: Mapping[str, str]) -> None:
    """Raise `UserError` if there is only one class, or a class with a single training text."""
    if len(counts) < 2:
        name, count = next(iter(counts.items()))
        raise UserError(
            f"{source} contains only one class, {plain_line(name)!r} ({counted(count, 'text')}). Classification"
            " requires at least two classes."
        )
    single = [name for name, count in counts.items() if count == 1]
    if single:
        shown = some([f"{plain_line(name)!r} ({places[name]})" for name in single], _SHOWN)
        raise UserError(
            f"{source}: {counted(len(single), 'class')} {verb(len(single))} a single training text: {shown}. Each class"
            " must have at least two training texts. Add texts, or remove the class."
        )


def refuse_unknown(
    counts: Mapping[str, int], places: Mapping[str, str], train: Sequence[str], split: str, advice: str
) -> None:
    """Raise `UserError` if a class of a split has no training texts. `places` maps classes to example locations."""
    unknown = [name for name in counts if name not in train]
    if not unknown:
        return
    first = unknown[0]
    more = f" {len(unknown)} classes are unknown." if len(unknown) > 1 else ""
    raise UserError(
        f"{places[first]}: the class {plain_line(first)!r} ({counted(counts[first], f'{split} text')}) is unknown."
        f" The training classes are {', '.join(map(plain_line, train[:8]))}{', …' if len(train) > 8 else ''}."
        f"{did_you_mean(first, train)}{more} Correct the labels.{advice}"
    )


def refuse_unlabeled(labels: Sequence[str], missing: int, split: str, source: str, advice: str) -> None:
    """Raise `UserError` if the texts of a split have no labels.

    Labels that are all -1, as in the test sets of some benchmarks, also count as missing labels. `missing` is the
    number of texts without a label. The message ends with `advice`.
    """
    if set(labels) - {"-1"} or not (labels or missing):
        return
    why = (
        f"{'all ' * (len(labels) > 1)}{counted(len(labels), 'label')} {verb(len(labels), 'is', 'are')} -1"
        if labels
        else f"none of {counted(missing, 'text')} has a label"
    )
    raise UserError(f"{source} is unlabeled: {why}. Unlabeled texts cannot be the {split} split.{advice}")
