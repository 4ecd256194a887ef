"""Errors that a user can fix. Each message names the setting, the constraint, the value and a remedy.

Assertions report errors in the code of this package instead. This module does not import torch, because configurations
are checked before torch is imported.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar


class UserError(ValueError):
    """Error that the user can fix. The command line prints only the message of this error and exits with status 2."""


class DivergedError(UserError):
    """Error for a non-finite loss or non-finite weights. A study records this error as a result of the settings."""


class MemoryLimitError(UserError):
    """Error for a run that needs more memory than its budget or the device allows."""


class SettingError(UserError):
    """Error for an invalid value of a setting, with the message "<setting> must be <constraint>, got <value>."

    Args:
        setting: full name of the setting on the command line, for example ``method.lbp_wht.order``.
        value: invalid value.
        allowed: constraint (``"an integer >= 1"``), or the allowed values.
        do: sentence that describes a remedy, or None if no remedy is needed.
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


#: Number of open `on_command_line` blocks in this thread. Programs on the command line have at least one open block.
_command_lines: ContextVar[int] = ContextVar("_command_lines", default=0)


@contextmanager
def on_command_line() -> Iterator[None]:
    """Let messages name settings of the command line instead of arguments of Python functions (see `hint`).

    The blocks may end in any order. Other threads are not affected.
    """
    _command_lines.set(_command_lines.get() + 1)
    try:
        yield
    finally:
        _command_lines.set(_command_lines.get() - 1)


def hint(python: str, command_line: str = "") -> str:
    """Return the advice of a message: `command_line` inside `on_command_line`, and `python` otherwise."""
    return command_line if _command_lines.get() > 0 else python


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """Return `` Did you mean 'x'?`` for the most similar name in `known`, or an empty string if no name is similar."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def first_line(error: BaseException) -> str:
    """Return the first line of an error message (up to 300 characters), or the error type if the message is empty."""
    return (str(error).strip().splitlines() or [type(error).__name__])[0][:300]


def why_unreadable(error: BaseException) -> str:
    """Return the reason why a file of tensors cannot be loaded, without torch's advice to load unsafe files."""
    if "weights only" in str(error).lower() or "weights_only" in str(error):
        return "it contains Python objects that could run code when they are loaded"
    return first_line(error)


def replace_unprintable() -> None:
    """Make output streams print ``?`` for characters that they cannot encode, instead of raising an error."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")


@contextmanager
def single_values() -> Iterator[None]:
    """Replace the error of BatchNorm for one value per channel with a message that names the settings to change.

    Raises:
        UserError: If a BatchNorm layer received a batch with one value per channel (one image).
    """
    try:
        yield
    except ValueError as error:
        if "more than 1 value per channel" not in str(error):
            raise
        raise UserError(
            "BatchNorm cannot compute the statistics of a batch with one value per channel (one image). Use"
            " model.frozen_bn=true, or a data.batch_size >= 2 for which the last batch has more than one image."
        ) from error


class TerminatedRun(SystemExit):
    """Exception that ends the process after a signal other than SIGINT.

    As in shells, the exit status is 128 plus the number of the signal.

    Args:
        number: number of the signal. Default: 15 (SIGTERM).
    """

    def __init__(self, number: int = 15) -> None:
        super().__init__(128 + number)
