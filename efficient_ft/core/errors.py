"""The one kind of error a user's mistake gets: a setting, its value, what is allowed, what to do.

Our own mistakes are asserts. Nothing here imports torch: configuration is checked before anything heavy loads.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Iterable


class UserError(ValueError):
    """A mistake or a circumstance the user can mend. The command line prints its text alone, with exit status 2."""


class SettingError(UserError):
    """A setting that cannot be used.

    Args:
        setting: the full name as it is written on the command line, e.g. ``method.lbp_wht.order``.
        value: what was given.
        allowed: what may be given, in words or as a list of names.
        do: what to do about it, where that is not plain from ``allowed``.
    """

    def __init__(self, setting: str, value: object, allowed: str | Iterable[str], do: str | None = None):
        self.setting, self.value = setting, value
        if isinstance(allowed, str):
            text = f"{setting}={value}: allowed is {allowed}."
        else:
            names = [str(a) for a in allowed]
            text = f"{setting}={value}: allowed are {', '.join(names)}."
            text += did_you_mean(str(value), names)
        super().__init__(text if do is None else f"{text} {do}")


def did_you_mean(word: str, known: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` for the nearest of `known`, or an empty string when nothing is near."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return f" Did you mean '{near[0]}'?" if near else ""


def replace_unprintable() -> None:
    """Let output go on where the terminal or file has no Unicode (``> log.txt`` on Windows): signs become ``?``."""
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="replace")
