"""A forward pass of one's own for a module object, which several methods can give to the same one.

It is one attribute of the object, `forward`. Nothing else of the model changes, so that it can be copied, pickled,
saved and changed back. Each of several runs the one inside it; the innermost runs in the place of the module's own.
"""

from __future__ import annotations

from typing import Any

from torch import nn


class OwnForward:
    """Base of the callables that a method gives to a module object as its `forward`."""

    inner: OwnForward | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # abstract

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """What the module does without this one."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)


def forwards_of(module: nn.Module) -> list[OwnForward]:
    """Those of a module, from the outermost."""
    found: list[OwnForward] = []
    forward = module.__dict__.get("forward")
    while isinstance(forward, OwnForward):
        found.append(forward)
        forward = forward.inner
    return found


def put_around(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the outermost."""
    outermost = forwards_of(module)[:1]
    forward.inner = outermost[0] if outermost else None
    module.forward = forward  # type: ignore[assignment]


def put_inside(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the innermost: what the others see of the module."""
    others = forwards_of(module)
    if others:
        others[-1].inner = forward
    else:
        module.forward = forward  # type: ignore[assignment]


def take_away(module: nn.Module, kind: type[OwnForward]) -> None:
    """Take those of a kind away."""
    if not forwards_of(module):
        return
    rest = [forward for forward in forwards_of(module) if not isinstance(forward, kind)]
    del module.forward
    for forward in reversed(rest):
        put_around(module, forward)
