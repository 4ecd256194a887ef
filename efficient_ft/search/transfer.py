"""Transfer studied recipes to networks with other numbers of blocks or tokens."""

from __future__ import annotations

import inspect
import re
from collections.abc import Sequence

from efficient_ft.methods import METHODS
from efficient_ft.planning.prior import Studied

#: Settings of methods that contain positions of blocks.
_POSITIONS = ("blocks", "drop_at")


def transferred(row: Studied, blocks: int, tokens: int | None) -> tuple[str, ...] | None:
    """Return the arguments of a studied row for another network, or None if the recipe cannot be transferred.

    The number of trained last blocks and the number of blocks that are trained per step (`num_layers`) are scaled with
    the number of blocks. Other positions of blocks cannot be transferred. ToMe merges the same fraction of the tokens,
    ``r * blocks / tokens``, up to the end of the network.

    Args:
        row: studied row.
        blocks: number of blocks of the network.
        tokens: number of patch tokens in the blocks, or None if the network has no token grid.
    """
    arguments = list(row.arguments)
    for name in methods_of(row.arguments):
        if name not in METHODS:
            continue
        for setting, parameter in inspect.signature(METHODS[name]).parameters.items():
            key = f"method.{name}.{setting}"
            place = next((k for k, word in enumerate(arguments) if word.startswith(f"{key}=")), None)
            value = str(parameter.default) if place is None else arguments[place].partition("=")[2]
            changed = _value(name, setting, value.replace(" ", ""), row, blocks, tokens)
            if changed is None:
                return None
            if changed == value.replace(" ", ""):
                continue
            if place is None:
                arguments.append(f"{key}={changed}")
            else:
                arguments[place] = f"{key}={changed}"
    return tuple(arguments)


def methods_of(arguments: Sequence[str]) -> tuple[str, ...]:
    """Return the methods in the arguments of a recipe."""
    value = next(word.partition("=")[2] for word in arguments if word.startswith("method="))
    return tuple(value.strip("[]").split(","))


def studied_tokens(row: Studied) -> int | None:
    """Return the number of patch tokens of the network in a study, or None if its patch size is unknown."""
    patch = re.search(r"patch(\d+)", row.model)
    return None if patch is None or row.image_size is None else (row.image_size // int(patch[1])) ** 2


def _value(method: str, setting: str, value: str, row: Studied, blocks: int, tokens: int | None) -> str | None:
    """Return the transferred value of a setting of a method, or None if the value cannot be transferred."""
    if setting == "num_layers" and row.blocks != blocks:
        return str(max(1, round(int(value) * blocks / row.blocks)))
    if setting in _POSITIONS and row.blocks != blocks:
        return _last_blocks(value, row.blocks, blocks) if (method, setting) == ("blocks", "blocks") else None
    if (method, setting) == ("tome", "r"):
        return _merged(value, row, blocks, tokens)
    return value


def _last_blocks(value: str, studied: int, blocks: int) -> str | None:
    """Scale a list of positions, e.g. ``[9,10,11]``, or return None if it does not contain exactly the last blocks."""
    positions = [int(position) for position in value.strip("[]").split(",")]
    if positions != list(range(studied - len(positions), studied)):
        return None
    count = max(1, round(len(positions) * blocks / studied))
    return f"[{','.join(map(str, range(blocks - count, blocks)))}]"


def _merged(value: str, row: Studied, blocks: int, tokens: int | None) -> str | None:
    """Return the number of tokens that ToMe merges in each block, or None if at most half a token would be merged."""
    studied = studied_tokens(row)
    if not value.isdigit() or studied is None or tokens is None:
        return None
    merged = round(int(value) * row.blocks / studied * tokens / blocks)
    return str(merged) if merged else None
