"""The one check of which methods can be stacked, and of what they need of a model, from what they declare."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.declarations import MUST_COME_BEFORE, Adds, Axis, Needs
from efficient_ft.models.marks import Mark, marks_of
from efficient_ft.models.view import ModelView


class _Declared(Protocol):
    """The declarations that methods and marks have in common."""

    @property
    def axes(self) -> tuple[str, ...]: ...
    @property
    def adds(self) -> frozenset[str]: ...
    @property
    def conflicts(self) -> Mapping[str, str]: ...


class _Method(_Declared, Protocol):
    """A method as this module reads it; `methods.base` imports this module."""

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> tuple[Axis, ...]: ...
    @property
    def needs(self) -> frozenset[Needs]: ...
    @property
    def hints(self) -> Mapping[Needs, str]: ...
    @property
    def state_key(self) -> str: ...
    @property
    def applied(self) -> object | None: ...


def check_stack(methods: Sequence[_Method], model: nn.Module | None = None) -> None:
    """Check that methods can be applied together, and on top of those that `model` already has.

    At most one method decides on each axis; no method conflicts with another one; and a method that must come before
    another (a selection before adapters) is not applied after it.

    Args:
        methods: not applied yet, or applied to `model`.
        model: the model they are for; None: only the methods themselves are checked.

    Raises:
        UserError: two that cannot be stacked; the text names both and says what to do.
    """
    for a, b in itertools.combinations(methods, 2):
        axis = _shared_axis(a, b)
        if axis is not None:
            hint = ""
            if axis == Axis.SELECTION:
                hint = " (full: everything; with no selection named, the other methods bring their own)"
            raise UserError(f"method: {a.name} and {b.name} both {axis.does}; name one of them{hint}.")
        why = _conflict(a, a.name, b, b.name)
        if why is not None:
            raise UserError(f"method: {a.name} and {b.name} cannot be stacked: {why}. Name one of them.")
    if model is None:
        return
    _refuse_recomputation(methods, model)
    own = {method.state_key for method in methods if method.applied is not None}
    for mark in (mark for mark in marks_of(model) if mark.key not in own):
        for method in (method for method in methods if method.applied is None):
            _check_against(method, mark, type(model).__name__)


def _refuse_recomputation(methods: Sequence[_Method], model: nn.Module) -> None:
    """Raise UserError where `model` recomputes its blocks, and the second forward pass would change what is trained."""
    flags = ("grad_checkpointing", "gradient_checkpointing")  # of timm, and of transformers
    if not any(getattr(module, flag, False) for module in model.modules() for flag in flags):
        return
    for method in methods:
        why = None
        if Axis.MEMORY in method.axes:
            why = "it packs activations, of which recomputation keeps none"
        elif Adds.LOSS in method.adds:
            why = "the second forward pass would count its loss again"
        if why is not None:
            raise UserError(
                f"method {method.name}: this {type(model).__name__} has checkpointing of its own, and {why}. Call"
                " model.set_grad_checkpointing(False) (transformers: gradient_checkpointing_disable()), or leave out"
                f" {method.name}."
            )


def _check_against(method: _Method, mark: Mark, model: str) -> None:
    """Raise UserError where `method` cannot follow the one that left `mark`."""
    applied = f"method {method.name}: {mark.method} has been applied to this {model} already"
    axis = _shared_axis(method, mark)
    if axis is not None:
        raise UserError(f"{applied}, and both {axis.does}; use one of them, or remove {mark.method} first.")
    why = _conflict(method, method.name, mark, mark.method)
    if why is not None:
        raise UserError(f"{applied}, and the two cannot be stacked: {why}. Use one of them.")
    if any(MUST_COME_BEFORE.get(axis, frozenset()) & set(mark.axes) for axis in method.axes):
        raise UserError(
            f"{applied}, but must come after {method.name}. Apply both with apply_methods, which knows the order, or"
            f" remove {mark.method} first."
        )


def check_removal(method: _Method, model: nn.Module) -> None:
    """Check that nothing which must come after `method` is still applied to `model`.

    Raises:
        UserError: something is; the text names it.
    """
    after = frozenset().union(*(MUST_COME_BEFORE.get(axis, frozenset()) for axis in method.axes))
    for mark in marks_of(model):
        if mark.key != method.state_key and after & set(mark.axes):
            raise UserError(
                f"method {method.name}: {mark.method} was applied on top of it; remove {mark.method} first."
            )


def _shared_axis(a: _Declared, b: _Declared) -> Axis | None:
    """The first axis on which both decide."""
    return next((Axis(axis) for axis in a.axes if axis in b.axes), None)


def _conflict(a: _Declared, a_name: str, b: _Declared, b_name: str) -> str | None:
    """The reason why one of them declares a conflict with the other; None: there is none."""
    for this, other, name in ((a, b, b_name), (b, a, a_name)):
        for what, why in this.conflicts.items():
            if what in (*other.axes, *other.adds, name):
                return why
    return None


def check_needs(method: _Method, view: ModelView) -> None:
    """Check that the model has what `method` declares to need of it.

    Raises:
        UserError: it has not; the text names method, model and reason.
        SettingError: the images are of a single patch.
    """
    for need in Needs:
        if need in method.needs:
            why = _missing(need, method, view)
            if why is not None:
                hint = method.hints.get(need)
                raise UserError(f"method {method.name}: {why}." + (f" {hint}" if hint else ""))


def _missing(need: Needs, method: _Method, view: ModelView) -> str | None:
    """The reason why a model does not meet a need; None: it does."""
    if need == Needs.BLOCKS and not view.blocks:
        return f"no blocks were recognized in {view.name}"
    if need == Needs.CLASSIFIER and not view.head:
        return (
            f"{view.name} has no classifier to train; create it with num_classes=N (N >= 1), or name the module that is"
            " its classifier: apply(model, classifier='NAME')"
        )
    if need == Needs.CLASS_TOKEN and not view.has_class_token:
        return f"{view.name} has no class token, whose attention ranks the patch tokens"
    if need == Needs.TOKEN_GRID:
        if view.single_patch:
            height, width = view.image_size
            raise SettingError(
                "model.image_size",
                f"{height}×{width}",
                f"larger than one patch of {view.name} with method {method.name}",
            )
        if view.block_grid is None:
            return f"the tokens of {view.name} are not on one grid from block to block"
    return None


def no_method(wrong: object) -> SettingError:
    """Return the error for an argument that is neither a method nor a list of methods."""
    hint = "Make the objects first: from efficient_ft.methods import LoRA; apply_methods(model, [LoRA(rank=8)])."
    if isinstance(wrong, type) and hasattr(wrong, "apply"):
        hint = f"Make an object of the class: {wrong.__name__}()."
    elif isinstance(wrong, nn.Module):
        hint = "The model is the first argument: apply_methods(model, methods)."
    return SettingError("methods", f"{wrong!r:.60}", "a Method object or a list of them", hint)
