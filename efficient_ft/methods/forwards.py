"""Another forward pass for a module object; several methods can give one to the same module.

It is one attribute of the object, `forward`. Nothing else of the model changes, so that it can be copied, pickled,
saved and changed back. Forwards are nested: each calls the one inside it, the innermost calls the module's class.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class OwnForward:
    """Base of the callables that a method gives to a module object as its `forward`.

    Args:
        module: the module it becomes the forward of.
    """

    inner: OwnForward | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # abstract

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """Run what the module does without this forward."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def forwards_of(module: nn.Module) -> list[OwnForward]:
    """Return the forwards of a module, from the outermost to the innermost."""
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
    """Make `forward` the innermost: the other forwards run around it."""
    others = forwards_of(module)
    if others:
        others[-1].inner = forward
    else:
        module.forward = forward  # type: ignore[assignment]


def take_away(module: nn.Module, kind: type[OwnForward]) -> None:
    """Remove the forwards of a kind from a module."""
    if not forwards_of(module):
        return
    rest = [forward for forward in forwards_of(module) if not isinstance(forward, kind)]
    del module.forward
    for forward in reversed(rest):
        put_around(module, forward)
