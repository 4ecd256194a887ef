"""The functions that fill in blocks, by the names that markers use."""

from __future__ import annotations

from collections.abc import Callable

Block = Callable[..., str]
BLOCKS: dict[str, Block] = {}


def block(function: Block) -> Block:
    """Make a function available in markers under its own name, with - for _."""
    BLOCKS[function.__name__.replace("_", "-")] = function
    return function
