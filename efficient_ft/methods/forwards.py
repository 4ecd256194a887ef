"""Replacement forward passes of module objects; several methods can give one to the same module.

A replacement is stored in one attribute of the module, `forward`. Nothing else of the model changes, so that it can be
copied, pickled, saved and changed back. Replacements are nested: each calls the one inside it, and the innermost calls
the forward pass of the module's class, or the one that another library has given to the module object.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from efficient_ft.core.errors import UserError


class OwnForward:
    """Base of the callables that replace the `forward` of a module object.

    A subclass implements ``__call__`` with the module's own arguments, and calls `within` to run the module.

    Args:
        module: the module it becomes the forward of.

    Attributes:
        same_values: it computes what the module computes without it, so that others need not know of it.
        inner: the next replacement inside this one, or the forward of another library; None: the class's.
    """

    same_values: ClassVar[bool] = False
    inner: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # abstract

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """Run the next replacement inside this one, or the forward pass of the module's class."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def all_inside(self) -> list[OwnForward]:
        """Return the replacements inside this one, from the outermost to the innermost."""
        found: list[OwnForward] = []
        inner = self.inner
        while isinstance(inner, OwnForward):
            found.append(inner)
            inner = inner.inner
        return found


def refuse_export(what: str, instead: str) -> None:
    """Raise UserError while a model is exported: by ``torch.export``, ``torch.jit.trace`` or to ONNX.

    Args:
        what: a sentence that says why it cannot be exported.
        instead: a sentence that says what to do.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        raise UserError(f"{what} {instead}")


_Kind = TypeVar("_Kind", bound=OwnForward)


def forwards_of(module: nn.Module) -> list[OwnForward]:
    """Return the replacements of a module, from the outermost to the innermost."""
    forward = vars(module).get("forward")
    return [forward, *forward.all_inside()] if isinstance(forward, OwnForward) else []


def foreign_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward pass that another library has given to the module object; None: it has that of its class."""
    replacements = forwards_of(module)
    found: Callable[..., Any] | None = replacements[-1].inner if replacements else vars(module).get("forward")
    return found


def put_around(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the outermost replacement of `module`."""
    forward.inner = vars(module).get("forward")
    module.forward = forward  # type: ignore[assignment]


def put_inside(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the innermost replacement of `module`: the others run around it."""
    others = forwards_of(module)
    forward.inner = foreign_forward(module)
    if others:
        others[-1].inner = forward
    else:
        module.forward = forward  # type: ignore[assignment]


def take_away(module: nn.Module, kind: type[_Kind], of: Callable[[_Kind], bool] = lambda _: True) -> None:
    """Remove the replacements of a class, those for which `of` is true, from a module; others stay in their order."""
    if not forwards_of(module):
        return
    rest = [forward for forward in forwards_of(module) if not (isinstance(forward, kind) and of(forward))]
    foreign = foreign_forward(module)
    del module.forward
    if foreign is not None:
        module.forward = foreign  # type: ignore[method-assign]
    for forward in reversed(rest):
        put_around(module, forward)
