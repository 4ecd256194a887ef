"""Trials of promises."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BrokenPromiseError(AssertionError):
    """A trial failed: the promise does not hold."""


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        name: description of the trial, unique within its promise.
        function: function that is called with an empty folder and `arguments`. It raises `BrokenPromiseError` if the
            promise does not hold, and returns measured values or None.
        arguments: further arguments of the function.
        alone: True if no other trial may run at the same time, because the trial measures time or memory.
    """

    name: str
    function: Callable[..., dict[str, float] | None]
    arguments: tuple[Any, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Promise:
    """A promise and its trials.

    Attributes:
        number: number of the promise, from 1.
        title: short title.
        text: statement of the promise.
        tried: description of the trials in the short and in the long form.
        trials: function that yields the trials; its argument is True for the long form.
        not_covered: limits of the promise.
    """

    number: int
    title: str
    text: str
    tried: str
    trials: Callable[[bool], Iterator[Trial]]
    not_covered: str = ""


def require(holds: bool, otherwise: str) -> None:
    """Raise `BrokenPromiseError` with the text `otherwise` unless `holds`."""
    if not holds:
        raise BrokenPromiseError(otherwise)


def emptied(folder: Path, name: str) -> Path:
    """Return the path of a new entry of `folder`."""
    path = folder / name
    assert not path.exists(), path
    return path
