"""Replacements of a module object's forward pass, which several methods can stack on one module.

A replacement is stored in the attribute `forward` of the object. Nothing else of the model changes, so it can be
copied, pickled, saved and changed back. Each replacement calls the one inside it; the innermost calls the own forward
of the module.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class OwnForward:
    """Base of the callables that replace the `forward` of a module object."""

    inner: OwnForward | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # abstract

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module without this replacement."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def forwards_of(module: nn.Module) -> list[OwnForward]:
    """List the replaced forwards of `module`, outermost first."""
    found: list[OwnForward] = []
    forward = module.__dict__.get("forward")
    while isinstance(forward, OwnForward):
        found.append(forward)
        forward = forward.inner
    return found


def put_around(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the outermost replacement."""
    outermost = forwards_of(module)[:1]
    forward.inner = outermost[0] if outermost else None
    module.forward = forward  # type: ignore[assignment]


def put_inside(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the innermost replacement: the others call it as the module's own."""
    others = forwards_of(module)
    if others:
        others[-1].inner = forward
    else:
        module.forward = forward  # type: ignore[assignment]


def take_away(module: nn.Module, kind: type[OwnForward]) -> None:
    """Remove the replacements that are instances of `kind`."""
    if not forwards_of(module):
        return
    rest = [forward for forward in forwards_of(module) if not isinstance(forward, kind)]
    del module.forward
    for forward in reversed(rest):
        put_around(module, forward)
