"""The result of inspecting a data set: facts for the record, lines for a person, warnings and problems."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any, TypeVar

import numpy as np

#: Number of samples whose headers (sizes, modes) a quick inspection reads, and number that it decodes.
HEADERS, DECODED = 1024, 48


@dataclass
class Inspection:
    """The result of inspecting the samples of a data set.

    Attributes:
        facts: plain containers for results.json: sizes, modes, value range, share of unlabeled pixels, rows, lengths.
        lines: the same facts for the terminal, one short line each.
        warnings: properties of the data that are likely to harm training, one sentence each, with the setting to
            change.
        problems: reason by path or place, for samples that training would reject.
    """

    facts: dict[str, Any] = field(default_factory=dict)
    lines: list[str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    problems: dict[str, str] = field(default_factory=dict)


def spread(size: int, count: int) -> np.ndarray:
    """Return at most `count` indices below `size`, evenly spread and sorted: int64 (min(size, count),)."""
    return np.unique(np.linspace(0, max(size - 1, 0), min(size, count)).round().astype(np.int64))


def decoding_threads(pixels: int, most: int) -> int:
    """Return the number of images to decode at a time, so that together they have at most `most` pixels.

    Args:
        pixels: of the largest image.
        most: pixels of the images that are decoded at a time.
    """
    return max(1, min(8, os.cpu_count() or 1, most // max(pixels, 1)))


_Item = TypeVar("_Item")
_Found = TypeVar("_Found")


def in_threads(
    function: Callable[[_Item], _Found], items: Sequence[_Item], threads: int | None = None
) -> Iterable[_Found]:
    """Apply a function to all items in threads, and yield the results in order; Pillow decodes without the GIL.

    Args:
        function: applied to each item.
        items: the items.
        threads: number of threads; None: one per processor, at most 8.
    """
    with ThreadPoolExecutor(max_workers=threads or min(8, os.cpu_count() or 1)) as pool:
        yield from pool.map(function, items)
