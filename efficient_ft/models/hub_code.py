"""Configurations of transformers that name code: the entries that are left out, and those that are rejected.

transformers fetches and imports a kernel that ``config.json`` names (``attn_implementation: "owner/name"``), and the
classes under ``auto_map``. A folder of weights is data, so none of them is loaded.
"""

from __future__ import annotations

import json
import logging
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.text import plain_line

log = logging.getLogger(__name__)

#: Entries that choose an implementation, which may be a kernel of the hub. transformers has several spellings.
_IMPLEMENTATION = re.compile(r"_*\w*implementations?(_internal|_autoset)?")
#: Implementations in PyTorch alone.
_OWN = (None, "eager", "sdpa", True, False)
#: Entries that name code, or allow it to be loaded.
_CODE = frozenset(
    ["auto_map", "trust_remote_code", "custom_pipelines", "use_kernels", "kernel_config", "kernels", "custom_generate"]
)


def read_json(file: Path) -> dict[str, Any]:
    """Read a configuration file without the entries that name code; they are reported once for a file.

    Raises:
        UserError: it cannot be read, is no mapping, or says that the weights are quantized.
    """
    try:
        held = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"{file} cannot be used ({first_line(error)}).") from error
    if not isinstance(held, dict):
        raise UserError(f"{file} cannot be used (it is not a mapping).")
    plain = without_code(held)
    _report(file, tuple(names_of_code(held)))
    if any(name == "quantization_config" and value for name, value in _entries(held)):
        raise UserError(
            f"{file} cannot be used: the weights are quantized (quantization_config). Use the original ones."
        )
    return plain


def without_code(held: Any) -> Any:
    """Return nested mappings and lists without the entries that name code."""
    if isinstance(held, dict):
        return {name: without_code(value) for name, value in held.items() if not _names_code(name, value)}
    return [without_code(value) for value in held] if isinstance(held, list) else held


def refuse_code(kwargs: dict[str, Any]) -> None:
    """Refuse `model.kwargs` that name code, also in a configuration within them.

    Raises:
        UserError: for the first such entry.
    """
    if named := next(names_of_code(kwargs), None):
        raise UserError(f"model.kwargs: {named} names code, which is not loaded. Leave it out.")


def names_of_code(held: Any) -> Iterator[str]:
    """Yield ``name=value`` of each entry that `without_code` leaves out."""
    for name, value in _entries(held):
        if _names_code(name, value):
            yield plain_line(f"{name}={value if isinstance(value, str) else json.dumps(value)}")[:100]


def _names_code(name: Any, value: Any) -> bool:
    if name in _CODE:
        return bool(value)
    return isinstance(name, str) and _IMPLEMENTATION.fullmatch(name) is not None and not _is_own(value)


def _is_own(value: Any) -> bool:
    return value is None or (isinstance(value, str | bool) and value in _OWN)


def _entries(held: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the entries of nested mappings and lists."""
    if isinstance(held, dict):
        yield from held.items()
    for inner in held.values() if isinstance(held, dict) else held if isinstance(held, list) else ():
        yield from _entries(inner)


@cache
def _report(file: Path, names: tuple[str, ...]) -> None:
    if names:
        log.warning("%s names code, which is not loaded: %s.", file, ", ".join(names))
