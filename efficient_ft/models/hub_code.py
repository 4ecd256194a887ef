"""Ignore or reject entries of `transformers` configurations that refer to code.

`transformers` downloads and imports the kernels that ``config.json`` names (``attn_implementation: "owner/name"``) and
the classes in ``auto_map``. This package treats a folder of weights as data, and does not load such code.
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

#: Pattern for the names of entries that select an implementation. The implementation may be a kernel on the hub.
_IMPLEMENTATION = re.compile(r"_*\w*implementations?(_internal|_autoset)?")
#: Values of these entries that select an implementation in PyTorch.
_OWN = (None, "eager", "sdpa", True, False)
#: Other entries that refer to code, or that allow `transformers` to load code.
_CODE = {"auto_map", "trust_remote_code", "custom_pipelines", "use_kernels", "kernel_config", "kernels",
         "custom_generate"}  # fmt: skip


def read_json(file: Path) -> dict[str, Any]:
    """Read a configuration file, and remove the entries that refer to code.

    The removed entries are logged once per file. Raise a UserError if the file cannot be read, is not a mapping, or
    declares quantized weights.
    """
    try:
        held = json.loads(file.read_bytes().decode("utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise UserError(f"The file {file} cannot be used: {first_line(error)}.") from error
    if not isinstance(held, dict):
        raise UserError(
            f"The file {file} cannot be used, because it does not contain a mapping. Set model.weights to a folder that"
            " save_pretrained of transformers has written."
        )
    plain = without_code(held)
    _report(file, tuple(names_of_code(held)))
    if any(name == "quantization_config" and value for name, value in _entries(held)):
        why = "the weights are quantized (quantization_config)"
        raise UserError(f"The file {file} cannot be used, because {why}. Use the original weights.")
    return plain


def without_code(held: Any) -> Any:
    """Return a copy of nested mappings and lists without the entries that refer to code."""
    if isinstance(held, dict):
        return {name: without_code(value) for name, value in held.items() if not _names_code(name, value)}
    return [without_code(value) for value in held] if isinstance(held, list) else held


def refuse_code(kwargs: dict[str, Any]) -> None:
    """Raise a UserError if `model.kwargs` or a configuration nested in it has an entry that refers to code."""
    if named := next(names_of_code(kwargs), None):
        raise UserError(f"model.kwargs: the entry {named} refers to code, which is not loaded. Remove the entry.")


def names_of_code(held: Any) -> Iterator[str]:
    """Yield ``name=value`` for each entry that `without_code` removes."""
    for name, value in _entries(held):
        if _names_code(name, value):
            yield plain_line(f"{name}={value if isinstance(value, str) else json.dumps(value)}")[:100]


def _names_code(name: Any, value: Any) -> bool:
    if name in _CODE:
        return bool(value)
    is_own = value is None or (isinstance(value, str | bool) and value in _OWN)
    return isinstance(name, str) and _IMPLEMENTATION.fullmatch(name) is not None and not is_own


def _entries(held: Any) -> Iterator[tuple[Any, Any]]:
    """Yield the entries (name, value) of all mappings in nested mappings and lists."""
    if isinstance(held, dict):
        yield from held.items()
    for inner in held.values() if isinstance(held, dict) else held if isinstance(held, list) else ():
        yield from _entries(inner)


@cache
def _report(file: Path, names: tuple[str, ...]) -> None:
    if names:
        log.warning("The file %s refers to code, which is not loaded: %s.", file, ", ".join(names))
