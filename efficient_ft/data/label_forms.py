"""The forms of the labels in a label file: one class, several labels, or numbers for each image."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from efficient_ft.config.schema import LabelsConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.file_list import Paths
from efficient_ft.data.label_columns import cell_text, find_separator, flag, is_number, labels_in, named
from efficient_ft.data.listing import Samples
from efficient_ft.data.tables import MISSING, Records, short

#: Number of groups of equal size into which targets are sorted before images are held out.
_QUANTILES = 10


class LabelForm(ABC):
    """The form of the labels of one kind of task.

    Attributes:
        noun: plural noun for the labels.
        names: common names of the label column in lower case without punctuation, in order of preference.
        has_classes: True if the labels are names of classes, and False if the label columns are the outputs.
        one_class: True if each image has exactly one class.
        required: True if each row must have a label.
        hint: sentence for an image that is listed with different labels.
    """

    noun: ClassVar[str] = "labels"
    names: ClassVar[Sequence[str]] = (
        "label", "labels", "class", "classes", "classname", "labelname", "category", "categories", "target", "targets",
        "tag", "tags", "species", "breed", "diagnosis",
    )  # fmt: skip
    has_classes: ClassVar[bool] = True
    one_class: ClassVar[bool] = False
    required: ClassVar[bool] = True
    hint: ClassVar[str] = ""

    def __init__(self, settings: LabelsConfig) -> None:
        self._settings = settings
        self.columns: list[str] = []

    def recognize(self, read: Records, others: Sequence[str]) -> list[str]:
        """Return the label columns, given the columns without images and splits, or [] if they are not known."""
        column = named(others, self.names)
        return [column] if column is not None else list(others) if len(others) == 1 else []

    def begin(self, path: Path, read: Records, columns: Sequence[str]) -> list[str]:
        """Prepare to read a file with the given label columns, and return notes. Raise `UserError`."""
        self.columns = list(columns)
        if self._settings.separator is not None:
            known = "null with one label or number per cell"
            raise SettingError("data.labels.separator", repr(self._settings.separator), known)
        return []

    @abstractmethod
    def parse(self, cells: Mapping[str, Any], place: str) -> tuple[Any, ...]:
        """Return the labels in the cells of a row. Raise `UserError` if a cell cannot be used."""

    def merged(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...] | None:
        """Return the labels of an image that has two rows, or None if the rows contradict each other."""
        return first if first == second else None

    @abstractmethod
    def samples(self, paths: Sequence[str], labels: Sequence[tuple[Any, ...]], numbers: Mapping[str, int]) -> Samples:
        """Return the images with their labels. `numbers` maps the names of classes to indices."""

    @abstractmethod
    def groups(self, labels: np.ndarray) -> np.ndarray:
        """Return the group of each image, int64 (N,), from which the same fraction is held out."""


class OneClass(LabelForm):
    """One class for each image, int64 (N,). The images are sorted by class and path, as in class folders."""

    one_class, hint = True, " For several labels per image, set task=multilabel."

    def begin(self, path: Path, read: Records, columns: Sequence[str]) -> list[str]:
        if len(columns) > 1:
            do = "For one column per class, set task=multilabel."
            raise SettingError("data.labels.label", list(columns), "one column if each image has one class", do)
        return super().begin(path, read, columns)

    def parse(self, cells: Mapping[str, Any], place: str) -> tuple[Any, ...]:
        (cell,) = cells.values()
        if isinstance(cell, list | dict):
            raise UserError(f"{place}: the label is a list.{self.hint}")
        return (cell_text(cell),)

    def samples(self, paths: Sequence[str], labels: Sequence[tuple[Any, ...]], numbers: Mapping[str, int]) -> Samples:
        indices = np.asarray([numbers[label] for (label,) in labels], dtype=np.int64)
        order = np.argsort(indices, kind="stable")
        return Samples(Paths(paths[i] for i in order), indices[order])

    def groups(self, labels: np.ndarray) -> np.ndarray:
        return labels


class SeveralLabels(LabelForm):
    """Any number of labels for each image, float32 (N, classes) with the values 0 and 1."""

    required = False

    def recognize(self, read: Records, others: Sequence[str]) -> list[str]:
        found = super().recognize(read, others)
        flags = [column for column in others if all(flag(one.cells.get(column)) is not None for one in read.records)]
        return found or (flags if len(flags) > 1 else [])

    def begin(self, path: Path, read: Records, columns: Sequence[str]) -> list[str]:
        if len(columns) > 1:
            return [*super().begin(path, read, columns), "Each label has a column with the values 0 and 1."]
        self.columns = list(columns)
        cells = [one.cells.get(columns[0]) for one in read.records]
        name = printable(path.name)
        self._separator, notes = find_separator(cells, self._settings.separator, columns[0], name)
        return notes

    def parse(self, cells: Mapping[str, Any], place: str) -> tuple[Any, ...]:
        if len(cells) == 1:
            (cell,) = cells.values()
            return tuple(dict.fromkeys(labels_in(cell, self._separator, place)))
        for column, cell in cells.items():
            if flag(cell) is None:
                shown = short(cell_text(cell)) or "an empty cell"
                do = "Replace -1 with 0." if shown == "-1" else "Write 0 if the image does not have the label."
                raise UserError(f"{place}: column {column!r} must contain 0 or 1, got {shown}. {do}")
        return tuple(column for column, cell in cells.items() if flag(cell))

    def merged(self, first: tuple[Any, ...], second: tuple[Any, ...]) -> tuple[Any, ...]:
        return tuple(dict.fromkeys((*first, *second)))

    def samples(self, paths: Sequence[str], labels: Sequence[tuple[Any, ...]], numbers: Mapping[str, int]) -> Samples:
        matrix = np.zeros((len(paths), len(numbers)), dtype=np.float32)
        for row, of_image in enumerate(labels):
            matrix[row, [numbers[label] for label in of_image]] = 1
        return Samples(Paths(paths), matrix)

    def groups(self, labels: np.ndarray) -> np.ndarray:
        """Return the rarest label of each image, or the number of classes for images without labels."""
        rarity = np.where(labels > 0, labels.sum(0), np.inf)
        return np.where(labels.any(1), rarity.argmin(1), labels.shape[1]).astype(np.int64)


class Numbers(LabelForm):
    """One or more targets for each image, float64 (N, targets)."""

    noun, has_classes = "targets", False
    names = ("target", "targets", "value", "score", "label", "labels", "number", "age", "price")

    def recognize(self, read: Records, others: Sequence[str]) -> list[str]:
        known = {column: [cell_text(one.cells.get(column)) for one in read.records] for column in others}
        filled = {column: [cell for cell in cells if cell not in MISSING] for column, cells in known.items()}
        numeric = [column for column, cells in filled.items() if cells and all(map(is_number, cells))]
        return super().recognize(read, others if named(others, self.names) else numeric)

    def parse(self, cells: Mapping[str, Any], place: str) -> tuple[Any, ...]:
        numbers = []
        for column, cell in cells.items():
            try:
                number = float("none" if isinstance(cell, bool | list | dict) or "_" in str(cell) else cell)
            except (TypeError, ValueError):
                shown = short(str(cell))
                raise UserError(f"{place}: the target in column {column!r} must be a number, got {shown}.") from None
            if not math.isfinite(number):
                raise UserError(f"{place}: the target in column {column!r} must be finite, got {number}.")
            numbers.append(number)
        return tuple(numbers)

    def samples(self, paths: Sequence[str], labels: Sequence[tuple[Any, ...]], numbers: Mapping[str, int]) -> Samples:
        return Samples(Paths(paths), np.asarray(labels, dtype=np.float64))

    def groups(self, labels: np.ndarray) -> np.ndarray:
        """Return the quantile of the first target of each image."""
        ranks = np.argsort(np.argsort(labels[:, 0], kind="stable"), kind="stable")
        return (ranks * min(_QUANTILES, max(len(ranks) // 2, 1)) // len(ranks)).astype(np.int64)


#: Form of the labels for each kind of task.
FORMS: dict[str, type[LabelForm]] = {"classification": OneClass, "multilabel": SeveralLabels, "regression": Numbers}
