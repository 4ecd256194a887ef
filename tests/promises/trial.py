"""A trial of a promise: a function that raises where the promise does not hold."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any


class BrokenPromiseError(AssertionError):
    """A trial saw something else than what is promised."""


@dataclass(frozen=True)
class Trial:
    """One trial.

    Attributes:
        name: unique within its promise; says what is tried.
        function: called with an empty folder and `arguments`; it raises `BrokenPromiseError` where the promise is
            broken, and returns what it measured, or None.
        arguments: further arguments.
        alone: run it when no other trial runs: it measures time or memory.
    """

    name: str
    function: Callable[..., dict[str, float] | None]
    arguments: tuple[Any, ...] = ()
    alone: bool = False


@dataclass(frozen=True)
class Promise:
    """A promise and its trials.

    Attributes:
        number: from 1.
        title: the promise in a few words.
        text: what is promised, one sentence.
        tried: what the trials do, in the short and in the long form.
        trials: yields the trials; called with True for the long form.
        not_covered: what the promise does not say, in whole sentences.
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
    """Return the path of an entry of `folder` that does not exist yet."""
    path = folder / name
    assert not path.exists(), path
    return path
