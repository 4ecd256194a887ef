"""The functions that fill in blocks and numbers, by the names that markers use."""

from __future__ import annotations

from collections.abc import Callable

#: By name, functions of a block's arguments. Those with a parameter ``page`` get the path of the page as well.
BLOCKS: dict[str, Callable[..., str]] = {}


def block(function: Callable[..., str]) -> Callable[..., str]:
    """Make a function available in markers under its own name, with - for _."""
    BLOCKS[function.__name__.replace("_", "-")] = function
    return function
