"""Functions for the setting `skip`. A method does not change layers whose names match an entry of `skip`."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from efficient_ft.core.errors import SettingError


def refuse_skip(skip: Sequence[str] | None) -> None:
    """Raise SettingError unless `skip` is None or a list of non-empty strings."""
    if skip is not None and (isinstance(skip, str) or not all(isinstance(part, str) and part for part in skip)):
        raise SettingError("skip", skip, "null or a list of parts of layer names, for example [attention,fc2]")


def is_skipped(name: str, skip: Sequence[str] | None) -> bool:
    """Return True if `name` matches an entry of `skip`.

    An entry consists of one part or several consecutive parts of a name. Parts are separated by dots. For example, the
    entries ``mlp``, ``fc2`` and ``mlp.fc2`` match the name ``mlp.fc2``. The entry ``*`` matches any part, as in
    ``layer.*.output``.
    """
    parts = name.split(".")
    for pattern in skip or ():
        wanted = pattern.split(".")
        for start in range(len(parts) - len(wanted) + 1):
            if all(map(fnmatchcase, parts[start:], wanted)):
                return True
    return False
