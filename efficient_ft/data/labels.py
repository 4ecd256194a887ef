"""Read the user's images and labels from a label file."""

from __future__ import annotations

import math
import os
import re
from collections import Counter, defaultdict
from collections.abc import Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from decimal import Decimal
from pathlib import Path
from typing import Any

from efficient_ft.config.schema import DataConfig, LabelsConfig
from efficient_ft.core.errors import SettingError, UserError, did_you_mean
from efficient_ft.core.text import plain_line, printable
from efficient_ft.data.class_list import parse_class_list
from efficient_ft.data.counts import counted, some, some_groups, verb
from efficient_ft.data.file_list import refuse_elsewhere
from efficient_ft.data.images import is_image
from efficient_ft.data.label_columns import (
    FILES,
    cell_text,
    find_image,
    find_split,
    is_number,
    named,
    no_header,
    place_of,
    read_table,
    unknown_column,
    without_header,
)  # fmt: skip
from efficient_ft.data.label_forms import FORMS
from efficient_ft.data.listing import Listing, Samples, hold_out_test
from efficient_ft.data.splits import SPLITS, Split, show, split_of
from efficient_ft.data.tables import MISSING, Records, short, spelling

#: Minimum number of different numbers in a label column for which the assumption that they are classes is reported.
_MANY = 20
#: Pattern of labels that are sorted by value if all labels match.
_WHOLE = re.compile(r"[+-]?\d+(\.0*)?", re.ASCII)
#: Split of rows that are not used.
_UNUSED = "unused"


@dataclass
class _Entry:
    """The labels of an image: one class, several classes, or several numbers. `place` is used in messages."""

    labels: tuple[Any, ...]
    split: Split | None
    place: str


def missing_labels(config: DataConfig) -> str | None:
    """Return an error message if `data.root` or the label file does not exist, or None otherwise."""
    assert config.labels is not None, "refused by `config.check`"
    root = Path(config.root).expanduser()
    if not root.is_dir():
        state = "is a file" if root.exists() else "does not exist"
        return f"data.root must be the folder that contains the label file, got {printable(root)} ({state})."
    for setting, path in _files(config.labels, root):
        if not path.is_file():
            tables = [
                one.name for one in root.iterdir() if one.suffix.lower() in (".csv", ".tsv", ".jsonl", ".parquet")
            ]
            found = f" {printable(root)} contains {some(sorted(tables), 5)}." if tables else ""
            near = did_you_mean(path.name, tables)
            return f"{setting} must be a file relative to data.root, got {printable(path)} (no such file).{found}{near}"
    return None


def _files(settings: LabelsConfig, root: Path) -> list[tuple[str, Path]]:
    """Return pairs of a setting and the path of its label file."""
    if isinstance(settings.file, str):
        return [("data.labels.file", root / settings.file)]
    return [(f"data.labels.file.{split}", root / name) for split, name in settings.file.items()]


def read_labels(config: DataConfig) -> Listing:
    """List the images of a label file.

    The order of the rows has no effect: the images are sorted by class and path, or by path if they have several labels
    or numbers. Without a test split and a validation split, one fifth of the images is held out for testing.

    Returns:
        The images with labels of the kind of task: int64 (N,) for classification, float32 (N, classes) with the values
        0 and 1 for several labels, and float64 (N, targets) for regression. The targets are the `class_names`.

    Raises:
        UserError: If a file or column does not exist, or if a row, a label or a split cannot be used.
        SettingError: If a setting is incompatible with the file.
    """
    assert config.labels is not None, "refused by `config.check`"
    if (problem := missing_labels(config)) is not None:
        raise UserError(problem)
    return _Reader(config, config.labels).listing()


class _Reader:
    """Reader of a label file."""

    def __init__(self, config: DataConfig, settings: LabelsConfig) -> None:
        self._config, self._settings, self._form = config, settings, FORMS[settings._task](settings)
        self._root = Path(config.root).expanduser()
        self._skips = config.on_corrupt == "skip" or settings._skips_rows
        self._skipped = Counter[str]()
        self._missing = MISSING.union(map(str, settings.missing))
        self._notes: list[str] = []
        self._warnings: list[str] = []
        self._unlabeled: set[str] = set()  # images of rows that are left out
        self._numbers = ""  # sentence on labels that are probably targets
        self._images = _Images(self._root / (settings.folder or "."))

    def listing(self) -> Listing:
        entries = self._entries()
        by_split: dict[Split, list[str]] = {}
        for path in sorted(entries):
            by_split.setdefault(entries[path].split or "train", []).append(path)
        if "train" not in by_split:
            raise UserError(
                f"{self._settings.file} lists no training images, but {some(list(by_split))} images. Add rows with the"
                " split train, or set data.labels.split=none."
            )
        form = self._form
        names = self._classes(entries, by_split) if form.has_classes else form.columns
        numbers = {name: number for number, name in enumerate(names)}
        parts: dict[str, Samples] = {
            split: form.samples(paths, [entries[path].labels for path in paths], numbers)
            for split, paths in by_split.items()
        }
        train, val, test = parts["train"], parts.get("val"), parts.get("test")
        file = " and ".join(printable(path.name) for _, path in _files(self._settings, self._root))
        origins: dict[str, str] = dict.fromkeys(by_split, file)
        if isinstance(self._settings.file, Mapping):
            origins |= {split: printable(Path(name).name) for split, name in self._settings.file.items()}
            file = origins["train"]
        if val is None and test is None:
            train, test = hold_out_test(train, form.groups(train.labels))
            origins["test"] = f"a fifth of {file}, held out"
        elif test is None:
            self._notes.append(
                "There is no test split. The val split is used to select the best epoch and to report the result."
            )
        for reason, count in self._skipped.items():
            self._notes.append(f"{counted(count, 'row')} {verb(count, 'is', 'are')} left out: {reason}.")
        unlisted = self._images.others({*entries, *self._unlabeled})
        left_out = {"images that the label file does not list": unlisted} if unlisted else {}
        about: dict[str, Any] = {"notes": self._notes, "warnings": self._warnings, "origins": origins}
        return Listing(list(names), train, val, test, **about, left_out=left_out)

    # The rows of the label files

    def _entries(self) -> dict[str, _Entry]:
        """Read the label files, and return the entry of each image, keyed by path."""
        entries: dict[str, _Entry] = {}
        several: list[str] = []
        lost: list[tuple[str, str]] = []
        repeated = 0
        for setting, path in _files(self._settings, self._root):
            of_file = setting.rpartition(".")[2]
            for value, labels, split, place in self._rows(path, next((s for s in SPLITS if s == of_file), None)):
                image = self._images.find(value, place)
                if image is None:
                    lost.append((value, place))
                    continue
                entry = _Entry(labels, split, place)
                if (other := entries.setdefault(image, entry)) is entry:
                    continue
                if other.split != split:
                    raise UserError(
                        f"{place}: the image {short(value)} is in the {split or 'train'} split, but in the"
                        f" {other.split or 'train'} split in {other.place}. Keep it in one split."
                    )
                merged = self._form.merged(other.labels, labels)
                if merged is None:
                    ours, theirs = (" and ".join(map(repr, one)) for one in (labels, other.labels))
                    raise UserError(
                        f"{place}: the image {short(value)} has the label {ours}, but the label {theirs} in"
                        f" {other.place}. Keep one of the rows.{self._form.hint}"
                    )
                repeated += merged == other.labels
                several += [image] if merged != other.labels else []
                other.labels = merged
        if lost:
            self._lose(lost)
        if repeated:
            self._notes.append(f"{counted(repeated, 'row')} {verb(repeated, 'repeats', 'repeat')} an earlier row.")
        if several:
            number = len(set(several))
            self._notes.append(f"{counted(number, 'image')} {verb(number)} several rows, whose labels are merged.")
        if not entries:
            raise UserError(f"No row of {self._settings.file} can be used: {some(list(self._skipped)) or 'no rows'}.")
        refuse_elsewhere(entries, self._root, self._config.follow_links)
        return entries

    def _rows(self, path: Path, split: Split | None) -> Iterator[tuple[str, tuple[Any, ...], Split | None, str]]:
        """Yield the image, the labels, the split and the place of each row of a label file."""
        read, settings, form = read_table(path, self._settings), self._settings, self._form
        image = find_image(path, read, settings)
        if without_header(path, settings) and named([image], FILES) is None and self._images.find(image, path.name):
            raise no_header(path, read, image, "the name of an image", image)
        own_split = find_split([column for column in read.columns if column != image], settings)
        labels = [settings.label] if isinstance(settings.label, str) else settings.label
        labels = labels or form.recognize(read, [c for c in read.columns if c and c not in (image, own_split)])
        if not labels:
            raise unknown_column(path, read, settings, "label", f"the column with the {form.noun}")
        if settings.label is None and len(labels) == 1 and is_number(labels[0]) and without_header(path, settings):
            raise no_header(path, read, labels[0], "a number", image)
        self._notes += [*read.notes, *form.begin(path, read, labels)]
        splits = self._splits(path, read, own_split)
        about = [f"images in {image!r}", f"{form.noun} in {some(list(map(repr, labels)), 4)}"]
        about += [] if splits is None else [f"splits in {own_split!r}"]
        unused = [repr(column) for column in read.columns if column and column not in (image, own_split, *labels)]
        about += [f"not used: {some(unused, 4)}"] if unused else []
        if unused or None in (settings.image, settings.label, settings.split if splits is not None else "none"):
            self._notes.append(f"Columns of {printable(path.name)}: {', '.join(about)} (data.labels).")
        for record, of_row in zip(read.records, splits or [None] * len(read.records), strict=True):
            place, value = place_of(path, record), cell_text(record.cells.get(image))
            if of_row == _UNUSED:
                self._unlabeled.add(self._images.find(value, place) or "")
                continue
            cells = {column: record.cells.get(column) for column in labels}
            texts = {column: cell_text(cell) for column, cell in cells.items() if not isinstance(cell, list)}
            empty = [column for column, text in texts.items() if text in self._missing]
            problem = None
            if record.width is not None:
                problem = f"{counted(record.width, 'cell')} for {counted(len(read.columns), 'column')}"
            elif not value:
                problem = f"no image in column {image!r}"
            elif empty and form.required:
                problem = f"no {form.noun.removesuffix('s')} in column {empty[0]!r}{_why_missing(texts[empty[0]])}"
            if problem is None:
                known = {c: "" if len(labels) == 1 and c in empty else cell for c, cell in cells.items()}
                yield value, form.parse(known, place), split or of_row, place
            elif self._skips:
                self._skipped[problem] += 1
                self._unlabeled.add(self._images.find(value, place) or "")
            else:
                do = "Correct the row, or skip such rows with data.on_corrupt=skip."
                raise UserError(f"{place}: {problem}. {do}")

    # Splits

    def _splits(self, path: Path, read: Records, column_name: str | None) -> Sequence[Any] | None:
        """Return the split of each row, or None if no split column is used.

        A split is a name, `_UNUSED`, or None for a row with a wrong number of cells. The values of the column are names
        of splits, or they are listed in `data.splits`.
        """
        chosen, complete = self._config.splits, [one for one in read.records if one.width is None]
        values = [cell_text(one.cells.get(column_name or "")) for one in complete]
        if column_name is None:
            if chosen is not None:
                null = "null without a split column"
                raise SettingError("data.splits", show(chosen), null, "Set data.labels.split=NAME.")
            return None
        column = f"column {column_name!r} (data.labels.split) of {printable(path.name)}"
        if chosen is not None:
            known: dict[str, Any] = {
                name: split for split, of in chosen.items() for name in ([of] if isinstance(of, str) else of)
            }
            absent = [name for name in known if name not in values]
            if absent:
                has = f"The column contains {_values(values)}."
                raise SettingError("data.splits", absent[0], f"a mapping to values of {column}", has)
            unused = [value for value in values if value not in known]
            if unused:
                self._skipped[f"data.splits does not list their split ({_values(unused)})"] += len(unused)
            of_value = {value: known.get(value, _UNUSED) for value in values}
            return self._of_rows(read, column_name, of_value)
        known = {value: split_of(value) for value in dict.fromkeys(values)}
        unknown = [value for value, split in known.items() if split is None]
        if unknown and len(unknown) == len(known) and self._settings.split is None:
            self._notes.append(
                f"The {column} is not used, because its values ({_values(unknown)}) are not names of splits. To use it,"
                " set data.splits={train: [VALUE, …], test: VALUE}."
            )
            return None
        if unknown:
            place = place_of(path, complete[values.index(unknown[0])])
            raise UserError(
                f"{place}: the split {unknown[0]!r} in {column} is unknown. Use the names train, val and test, list the"
                " values with data.splits={train: VALUE, val: VALUE}, or set data.labels.split=none."
            )
        return self._of_rows(read, column_name, known)

    def _of_rows(self, read: Records, column: str, of_value: Mapping[str, Any]) -> list[Any]:
        """Return the split of each row, given the split of each value of the split column."""
        return [of_value[cell_text(one.cells.get(column))] if one.width is None else None for one in read.records]

    # Classes and images

    def _classes(self, entries: Mapping[str, _Entry], by_split: Mapping[Split, Sequence[str]]) -> list[str]:
        """Return the names of the classes. If the labels are ids of the class list, convert them to names."""
        places: dict[str, str] = {}
        for entry in entries.values():
            for label in entry.labels:
                places.setdefault(label, entry.place)
        names, ids = self._listed_classes()
        if len(self._form.columns) > 1:  # one column for each class
            names = names or list(self._form.columns)
        if not names:
            names = sorted(places)
            if all(map(_WHOLE.fullmatch, names)):
                names.sort(key=Decimal)
            self._note_numbers(names)
            self._warn_alike(entries)
        unknown = [label for label in places if label not in set(names)]
        if unknown and ids and all(label.isdecimal() and int(label) in ids for label in places):
            named = {label: ids[int(label)] for label in places}
            for entry in entries.values():
                entry.labels = tuple(named[label] for label in entry.labels)
            self._notes.append("The labels are read as ids of the class list (data.labels.classes).")
        elif unknown:
            raise UserError(
                f"{places[unknown[0]]}: the label {plain_line(unknown[0])!r} is missing from the class list"
                f" (data.labels.classes), which contains {some(names)}.{did_you_mean(unknown[0], names)} Add the class"
                " to the list, or correct the label."
            )
        self._check_counts(names, entries, by_split)
        return names

    def _listed_classes(self) -> tuple[list[str], dict[int, str]]:
        """Return the class names of `data.labels.classes`, and the ids of the names."""
        classes = self._settings.classes
        if classes is None:
            return [], {}
        if isinstance(classes, list):
            if len(set(classes)) < len(classes):
                twice = next(name for name in classes if classes.count(name) > 1)
                raise SettingError("data.labels.classes", twice, "a list without repeated names")
            return classes, dict(enumerate(classes))
        path = self._root / classes
        if not path.is_file():
            known = "a list of names, or a file relative to data.root"
            raise SettingError("data.labels.classes", classes, known, f"There is no file {printable(path)}.")
        found = sorted(parse_class_list(path).entries, key=lambda one: one.id)
        return [one.name for one in found], {one.id: one.name for one in found}

    def _note_numbers(self, names: Sequence[str]) -> None:
        try:
            values = [float(name) for name in names]
        except ValueError:
            return
        if len(values) > _MANY or not all(math.isfinite(one) and one.is_integer() for one in values):
            self._numbers = (
                f"The labels in column {self._form.columns[0]!r} are {len(values)} different numbers, from"
                f" {min(values):g} to {max(values):g}, and each number is a class. To predict numbers, set"
                " task=regression."
            )
            self._notes.append(self._numbers)

    def _warn_alike(self, entries: Mapping[str, _Entry]) -> None:
        """Warn of labels that differ only in spelling. Each of these labels is a class."""
        counts = Counter(label for entry in entries.values() for label in entry.labels)
        groups: dict[Any, list[str]] = defaultdict(list)
        for label in sorted(counts):
            groups[Decimal(label) if _WHOLE.fullmatch(label) else spelling(label)].append(label)
        alike = [group for group in groups.values() if len(group) > 1]
        if alike:
            self._warnings.append(
                f"Some labels differ only in case, quotes or zeros: {some_groups(alike, counts)}. Each of these labels"
                " is a separate class. If they are the same class, correct the label file."
            )

    def _check_counts(
        self, names: Sequence[str], entries: Mapping[str, _Entry], by_split: Mapping[Split, Sequence[str]]
    ) -> None:
        counts = {s: Counter(label for one in of for label in entries[one].labels) for s, of in by_split.items()}
        images = "image of the class" if self._form.one_class else "image with the label"
        if len(names) < 2 and self._form.one_class:
            raise UserError(f"{self._settings.file} contains only the class {names[0]!r}. At least two are required.")
        absent = [name for name in names if not counts["train"][name]]
        if absent:
            others = [split for split, of in counts.items() if of[absent[0]]]
            where = f", but the {others[0]} split does" if others else ""
            raise UserError(
                f"The train split has no {images} {plain_line(absent[0])!r}{where}"
                f" ({counted(len(absent), 'such class')}). Add images, or remove the class from all splits and from"
                " data.labels.classes." + (self._numbers and f" {self._numbers}")
            )
        single = [name for name in names if counts["train"][name] == 1]
        if single and self._form.one_class:
            raise UserError(
                f"{counted(len(single), 'class')} {verb(len(single))} a single training image: {some(single)}. Each"
                " class needs at least two images. Add images, or remove the class."
                + (self._numbers and f" {self._numbers}")
            )
        for split in ("val", "test"):
            lacking = [name for name in names if split in counts and not counts[split][name]]
            if lacking and not self._form.one_class:
                self._notes.append(
                    f"The {split} split has no image with {counted(len(lacking), 'label')}: {some(lacking)}. The mean"
                    f" average precision does not include {verb(len(lacking), 'this label', 'these labels')}."
                )

    def _lose(self, lost: Sequence[tuple[str, str]]) -> None:
        """Raise `UserError` for listed images that do not exist, or skip them with ``data.on_corrupt=skip``."""
        if self._skips:
            self._skipped["the image does not exist"] += len(lost)
            return
        value, place = lost[0]
        base = self._root / (self._settings.folder or ".")
        near = [one.name for one in sorted(base.iterdir()) if one.is_dir()] if base.is_dir() else []
        at = next((name for name in near if _Images(base / name).find(value, place)), None)
        folder = f"{self._settings.folder}/{at}" if self._settings.folder else at
        do = f"Set data.labels.folder={folder}." if at else "Correct the rows, or skip them with data.on_corrupt=skip."
        raise UserError(
            f"{place}: the image {short(value)} does not exist in {printable(base)}"
            f" ({counted(len(lost), 'such row')}). {do}"
        )


class _Images:
    """The image files below a folder, which are found by their path with or without extension."""

    def __init__(self, base: Path) -> None:
        self._base = os.fspath(base)
        self._folders: dict[str, tuple[frozenset[str], dict[str, list[str]]]] = {}

    def find(self, value: str, place: str) -> str | None:
        """Return the path of an image, or None if there is no such file. Raise `UserError` if several files match."""
        value = value.replace("\\", "/")
        if os.path.isabs(value):  # the paths of an image are equal, regardless of how they are written
            value = os.path.relpath(value, os.path.abspath(self._base))
        path = os.path.normpath(os.path.join(self._base, value))
        folder, name = os.path.split(path)
        names, stems = self._listed(folder)
        if name in names:
            return path
        found = stems.get(name, ())
        if len(found) > 1:
            raise UserError(f"{place}: {short(value)} could be {some(found)}. Add the file extension.")
        return os.path.join(folder, found[0]) if found else None

    def _listed(self, folder: str) -> tuple[frozenset[str], dict[str, list[str]]]:
        if folder not in self._folders:
            names = frozenset(os.listdir(folder) if os.path.isdir(folder) else ())
            stems: dict[str, list[str]] = {}
            for name in sorted(filter(is_image, names)):
                stems.setdefault(os.path.splitext(name)[0], []).append(name)
            self._folders[folder] = names, stems
        return self._folders[folder]

    def others(self, used: Container[str]) -> int:
        """Return the number of images in the searched folders that are not in `used`."""
        every = ((folder, name) for folder, (_, stems) in self._folders.items() for of in stems.values() for name in of)
        return sum(os.path.join(folder, name) not in used for folder, name in every)


def _why_missing(text: str) -> str:
    """Return why a cell that is not empty counts as missing, or an empty string."""
    return f" ({text!r}{'' if text in MISSING else '; data.labels.missing'})" if text else ""


def _values(values: Iterable[str]) -> str:
    """Return the different values of a column as text."""
    return some([value or "(empty)" for value in dict.fromkeys(values)])
