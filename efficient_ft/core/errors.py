"""Errors that a user can fix. The message names the setting, the constraint, the value, and a remedy.

Mistakes in this package are assertions. This module does not import torch, because configurations are checked first.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager


class UserError(ValueError):
    """An error that the user can fix. The command line shows only its message, with exit status 2."""


class DivergedError(UserError):
    """The training loss is not finite. A study records this as a result of the settings."""


class SettingError(UserError):
    """A setting has an invalid value: "<setting> must be <constraint>, got <value>."

    Args:
        setting: full name as on the command line, e.g. ``method.lbp_wht.order``.
        value: the given value.
        allowed: the constraint (``"an integer >= 1"``), or the allowed values.
        do: a sentence with the remedy; None if `allowed` is sufficient.
    """

    def __init__(self, setting: str, value: object, allowed: str | Iterable[str], do: str | None = None):
        self.setting, self.value = setting, value
        if isinstance(allowed, str):
            text = f"{setting} must be {allowed}, got {value}."
        else:
            names = [str(a) for a in allowed]
            text = f"{setting} must be one of {', '.join(names)}, got {value}."
            text += did_you_mean(str(value), names)
        super().__init__(text if do is None else f"{text} {do}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the most similar of the `known` names, or an empty string."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message, at most 300 characters, or the name of its type if the message is
    empty.
    """
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def why_unreadable(error: BaseException) -> str:
    """Return why a file of tensors cannot be loaded, without torch's advice to load unsafe files."""
    if "weights only" in str(error).lower() or "weights_only" in str(error):
        return "it holds Python objects other than tensors and plain values, which are not loaded: they could run code"
    return first_line(error)


def replace_unprintable() -> None:
    """Print ``?`` for characters that the terminal or file cannot encode, instead of failing."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def single_values() -> Iterator[None]:
    """Replace the error of a BatchNorm layer that gets one value per channel with a message that names the settings.

    Raises:
        UserError: a batch of one image reached such a layer.
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            "BatchNorm cannot take the statistics of a batch with one image, whose channels have one value each. Use"
            " model.frozen_bn=true, or a data.batch_size >= 2 that leaves no last batch with one image."
        ) from error


class TerminatedRun(SystemExit):
    """A signal other than SIGINT ended the command. The exit status is 128 plus its number, as in shells.

    Args:
        number: number of the signal; default: SIGTERM.
    """

    def __init__(self, number: int = 15) -> None:
        super().__init__(128 + number)
