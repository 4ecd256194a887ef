"""Replacements for the forward passes of individual module instances.

Several methods can replace the forward pass of the same module. The attribute `forward` of the module is the method
`__call__` of the replacement. The rest of the model is unchanged, so that the model can still be copied, pickled, saved
and restored. Replacements are nested: each replacement calls the next inner replacement. The innermost replacement
calls the forward pass of the module's class, or a forward pass that another library has assigned to the module
instance.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, ClassVar, TypeVar

import torch
from torch import nn

from efficient_ft.core.errors import UserError


class OwnForward:
    """Base class of callables that replace the `forward` method of a module instance.

    A subclass implements ``__call__``, which takes the arguments of the module and calls `within` to run the module.

    Args:
        module: module whose forward pass is replaced.

    Attributes:
        same_values: True if the replacement returns the same values as the module, so that other methods can ignore the
            replacement.
        not_compiled: reason why blocks that contain the replacement run without ``torch.compile``, or an empty string.
        recomputes: True if the replacement runs the module again in the backward pass. Code is then compiled inside the
            replacement.
        inner: next inner replacement, or a forward pass that another library has assigned. If None, the forward pass of
            the module's class is used.
    """

    same_values: ClassVar[bool] = False
    not_compiled: ClassVar[str] = ""
    recomputes: ClassVar[bool] = False
    inner: Callable[..., Any] | None = None

    def __init__(self, module: nn.Module) -> None:
        self.module = module

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError  # abstract

    def within(self, *args: Any, **kwargs: Any) -> Any:
        """Run the next inner replacement, or the forward pass of the module's class."""
        if self.inner is not None:
            return self.inner(*args, **kwargs)
        return type(self.module).forward(self.module, *args, **kwargs)

    def all_inside(self) -> list[OwnForward]:
        """Return all replacements inside this replacement, from the outermost to the innermost."""
        found: list[OwnForward] = []
        inner = self.inner
        while isinstance(inner, OwnForward):
            found.append(inner)
            inner = inner.inner
        return found


def refuse_export(what: str, instead: str) -> None:
    """Raise UserError if a model is being exported by ``torch.export``, ``torch.jit.trace`` or ``torch.onnx.export``.

    The message consists of `what`, which states why the model cannot be exported, and `instead`, which suggests a
    remedy.
    """
    if torch.compiler.is_exporting() or torch.jit.is_tracing() or torch.onnx.is_in_onnx_export():
        raise UserError(f"{what} {instead}")


_Kind = TypeVar("_Kind", bound=OwnForward)


def forwards_of(module: nn.Module) -> list[OwnForward]:
    """Return the replacements for the forward pass of a module, from the outermost to the innermost."""
    forward = own_forward(vars(module).get("forward"))
    return [] if forward is None else [forward, *forward.all_inside()]


def own_forward(forward: Any) -> OwnForward | None:
    """Return the replacement that is stored in the attribute `forward` of a module, or None if there is none.

    The attribute can contain the method `__call__` of the replacement or the replacement itself.
    """
    own = forward if isinstance(forward, OwnForward) else getattr(forward, "__self__", None)
    return own if isinstance(own, OwnForward) else None


def foreign_forward(module: nn.Module) -> Callable[..., Any] | None:
    """Return the forward pass that another library has assigned to the module instance, or None if none is assigned."""
    replacements = forwards_of(module)
    found: Callable[..., Any] | None = replacements[-1].inner if replacements else vars(module).get("forward")
    return found


def put_around(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the outermost replacement of `module`."""
    before = vars(module).get("forward")
    forward.inner = own_forward(before) or before
    _store(module, forward)


def _store(module: nn.Module, forward: OwnForward) -> None:
    # torch.compile recompiles for each callable object, but shares code between bound methods of different objects.
    module.forward = forward.__call__  # type: ignore[method-assign]


def put_inside(module: nn.Module, forward: OwnForward) -> None:
    """Make `forward` the innermost replacement of `module`."""
    others = forwards_of(module)
    forward.inner = foreign_forward(module)
    if others:
        others[-1].inner = forward
    else:
        _store(module, forward)


def take_away(model: nn.Module, kind: type[_Kind], of: Callable[[_Kind], bool] = lambda _: True) -> None:
    """Remove the replacements of type `kind` for which `of` returns True from `model` and all its submodules.

    The order of the other replacements is preserved.
    """
    for module in model.modules():
        forwards = forwards_of(module)
        rest = [forward for forward in forwards if not (isinstance(forward, kind) and of(forward))]
        if len(rest) == len(forwards):
            continue
        foreign = foreign_forward(module)
        del module.forward
        if foreign is not None:
            module.forward = foreign  # type: ignore[method-assign]
        for forward in reversed(rest):
            put_around(module, forward)
