"""Helpers for inspecting data sets: results, sampling, threads and progress."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np
from tqdm import tqdm

from efficient_ft.core.errors import UserError

#: Number of samples whose headers (sizes, modes) a quick inspection reads, and number of samples that it decodes.
HEADERS, DECODED = 1024, 48


@dataclass
class Inspection:
    """The result of inspecting the samples of a data set."""

    facts: dict[str, Any] = field(default_factory=dict)  # facts for results.json, in plain containers
    lines: list[str] = field(default_factory=list)  # the same facts for the terminal, one short line each
    warnings: list[str] = field(default_factory=list)  # properties that may harm training, with the setting to change
    problems: dict[str, str] = field(default_factory=dict)  # reasons by path, for samples that training would reject


def spread(size: int, count: int) -> np.ndarray:
    """Return at most `count` evenly spread, sorted indices below `size`: int64 (min(size, count),)."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, count)).round().astype(np.int64))


def decoding_threads(pixels: int, limit: int) -> int:
    """Return the number of images with `pixels` pixels to decode in parallel, with at most `limit` pixels in total."""
    return max(1, min(8, os.cpu_count() or 1, limit // max(pixels, 1)))


_Item = TypeVar("_Item")
_Result = TypeVar("_Result")


def in_threads(
    function: Callable[[_Item], _Result], items: Sequence[_Item] | Iterable[_Item], threads: int | None = None
) -> Iterable[_Result]:
    """Yield the results of a function in order. By default, there is one thread per processor, but at most 8.

    Pillow decodes without the GIL.
    """
    with ThreadPoolExecutor(max_workers=threads or min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(function, items)


def progress(items: Iterable[_Item], total: int, description: str) -> Iterable[_Item]:
    """Show a progress bar on a terminal while iterating over items."""
    bar: Iterable[_Item] = tqdm(items, total=total, desc=description, leave=False, disable=None)
    return bar


def find_failures(
    function: Callable[[_Item], object], items: Sequence[_Item] | Iterable[_Item], total: int, description: str
) -> dict[_Item, str]:
    """Call a function for all items in threads, and return the messages of its user errors by item.

    The items are iterated twice. A progress bar shows the description and the total number of items.
    """

    def message(item: _Item) -> str | None:
        try:
            function(item)
        except UserError as error:
            return str(error)
        return None

    messages = progress(in_threads(message, items), total, description)
    return {item: text for item, text in zip(items, messages, strict=True) if text is not None}
