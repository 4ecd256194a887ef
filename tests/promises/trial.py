"""Promises and their trials."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BrokenPromiseError(AssertionError):
    """Raised if a trial finds that a promise does not hold."""


@dataclass(frozen=True)
class Trial:
    """A trial of a promise.

    Attributes:
        name: Description of the trial, unique within its promise.
        function: Function that is called with an empty folder and `arguments`. It raises `BrokenPromiseError` if the
            promise does not hold, and returns measured values or None.
        arguments: Further arguments of the function.
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
        number: Number of the promise, from 1.
        title: Short title.
        text: Statement of the promise.
        tried: Description of the trials in the short and in the long form.
        trials: Function that yields the trials. Its argument is True for the long form.
        not_covered: Limits of the promise.
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
