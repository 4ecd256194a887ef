"""Classes for the results of data inspections, and functions for sampling, multithreading and progress bars."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import plain_line, printable, shortened
from efficient_ft.data.counts import counted, some, verb

HEADERS, DECODED = 1024, 48  # number of headers read and number of samples decoded in a quick inspection
_PARALLEL = 16_000_000  # maximum total number of pixels of images that are decoded in parallel


@dataclass
class Inspection:
    """The result of inspecting the samples of a data set."""

    facts: dict[str, Any] = field(default_factory=dict)  # facts for results.json
    lines: list[str] = field(default_factory=list)  # facts for the terminal, one short line each
    warnings: list[str] = field(default_factory=list)  # warnings about properties that may harm training
    problems: dict[str, str] = field(default_factory=dict)  # reason why each sample is unusable, keyed by path


def spread(size: int, count: int) -> np.ndarray:
    """Return at most `count` evenly spaced indices less than `size`, in ascending order: int64 (min(size, count),)."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, count)).round().astype(np.int64))


def decoding_threads(pixels: Iterable[int]) -> int:
    """Return the number of threads (1 to 8) that decode images with the given numbers of pixels in parallel.

    If the number is greater than 1, the images decoded in parallel have at most `_PARALLEL` pixels in total.
    """
    return max(1, min(8, os.cpu_count() or 1, _PARALLEL // max((1, *pixels))))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    function: Callable[[_Item], _Result], items: Iterable[_Item], threads: int | None = None
) -> Iterable[_Result]:
    """Yield ``function(item)`` for each item, in the order of the items.

    By default, one thread per processor is used, with at most 8 threads. Threads decode images in parallel, because
    Pillow releases the GIL.
    """
    with ThreadPoolExecutor(max_workers=threads or min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(function, items)


def progress(items: Iterable[_Item], total: int, description: str) -> Iterable[_Item]:
    """Iterate over items, and show a progress bar if the output is a terminal."""
    bar: Iterable[_Item] = tqdm(items, total=total, desc=description, leave=False, disable=None)
    return bar


def find_failures(function: Callable[[_Item], object], items: Sequence[_Item], description: str) -> dict[_Item, str]:
    """Call a function for all items in threads, and return the message of each raised `UserError`, keyed by item.

    A progress bar shows the description.
    """

    def message(item: _Item) -> str | None:
        try:
            function(item)
        except UserError as error:
            return str(error)
        return None

    messages = progress(in_threads(message, items), len(items), description)
    return {item: text for item, text in zip(items, messages, strict=True) if text is not None}


_NAMES, _LETTERS = 8, 60  # maximum number of class names in the output, and maximum total length of these names
_RECORDED = 100  # maximum number of skipped samples in the record


@dataclass(frozen=True)
class SplitSummary:
    """The size, the source and the class distribution of one split."""

    samples: int  # number of images or texts
    origin: str = ""  # short description of the source
    per_class: np.ndarray | None = None  # number of samples of each class, int64 (classes,), or None for masks


@dataclass
class Summary:
    """A description of a data set for the terminal and for records."""

    name: str  # name of the data set, or path of the user's own folder
    task: str  # ``classification``, ``segmentation`` or ``text``
    noun: str  # noun that denotes a sample
    class_names: Sequence[str]  # class names, indexed by label
    splits: Mapping[str, SplitSummary]  # summary of each split, in the order train, val, test
    best_split: str  # split on which the best epoch is selected
    inspection: Inspection  # result of inspecting the samples
    left_out: Mapping[str, int] = field(default_factory=dict)  # number of unused files, keyed by the reason
    skipped: Mapping[str, str] = field(default_factory=dict)  # reasons for skipping samples, keyed by path
    notes: Sequence[str] = ()  # notes for the user, one sentence each
    outputs: str = "classes"  # plural noun for the outputs of the network

    def lines(self) -> list[str]:
        """Return the summary as short lines, which are printed to the terminal before training."""
        count = len(self.class_names)
        outputs = verb(count, {"classes": "class"}.get(self.outputs, self.outputs.removesuffix("s")), self.outputs)
        found = [f"data: {self.name}, {self.task}, {count} {outputs}: {abridged(self.class_names)}"]
        for split, one in self.splits.items():
            parts = [counted(one.samples, self.noun)]
            if one.per_class is not None and len(one.per_class):
                low, high = int(one.per_class.min()), int(one.per_class.max())
                parts.append(f"{low:,} per class" if low == high else f"{low:,} to {high:,} per class")
            if one.origin:
                parts.append(one.origin)
            if split == self.best_split and "train" in self.splits and len(self.splits) > 2:
                parts.append("selects the best epoch")
            found.append(f"  {split}: {', '.join(parts)}")
        found += [f"  {line}" for line in self.inspection.lines]
        if self.left_out:
            reasons = ", ".join(f"{reason} ({count:,})" for reason, count in self.left_out.items())
            found.append(f"  not used: {reasons}")
        if self.skipped:
            path, reason = next(iter(self.skipped.items()))
            why = reason.removeprefix(f"{printable(path)}: ")
            found.append(f"  skipped: {some(list(self.skipped), 1)} ({why.rstrip('.')})")
        return found

    @property
    def warnings(self) -> list[str]:
        """Return warnings about properties of the data that are likely to harm training, one sentence each."""
        found = list(self.inspection.warnings)
        train = self.splits["train"]
        if train.per_class is not None:
            empty = [name for name, count in zip(self.class_names, train.per_class, strict=True) if not count]
            if empty:
                classes = f"{counted(len(empty), 'class')} {verb(len(empty))}"
                found.append(f"{classes} no training {self.noun}: {abridged(empty)}.")
        return found

    def record(self) -> dict[str, Any]:
        """Return the summary as a dictionary that can be written to a JSON file."""
        splits: dict[str, dict[str, Any]] = {}
        for split, one in self.splits.items():
            splits[split] = {"samples": one.samples, "origin": one.origin}
            if one.per_class is not None:
                splits[split]["per_class"] = one.per_class.tolist()
        return {
            "name": self.name,
            "task": self.task,
            "classes": len(self.class_names),
            "class_names": list(self.class_names),
            "splits": splits,
            "best_split": self.best_split,
            **self.inspection.facts,
            "not_used": dict(self.left_out),
            "skipped": {printable(path): self.skipped[path] for path in list(self.skipped)[:_RECORDED]},
            "warnings": self.warnings,
            "notes": list(self.notes),
        }


def abridged(names: Sequence[str]) -> str:
    """Join at most `_NAMES` names and `_LETTERS` characters with commas, and append the number of remaining names."""
    shown: list[str] = []
    for name in names[:_NAMES]:
        text = shortened(plain_line(name), _LETTERS)
        if shown and sum(map(len, shown)) + len(text) > _LETTERS:
            break
        shown.append(text)
    rest = len(names) - len(shown)
    if rest == 0:
        return ", ".join(shown)
    last = plain_line(names[-1])
    return ", ".join(shown) + (f", {last}" if rest == 1 and len(last) <= _LETTERS else f", … ({rest:,} more)")
