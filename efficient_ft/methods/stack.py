"""Functions that check whether methods are compatible with each other and with a model."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from efficient_ft.core.errors import SettingError, UserError, hint
from efficient_ft.methods.declarations import MUST_COME_BEFORE, Adds, Axis, Needs
from efficient_ft.methods.quantized import quantized_parameters, refuse_quantized
from efficient_ft.methods.tokens.block_forms import why_not
from efficient_ft.models.marks import Mark, marks_of
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.models.view.probe import NO_MAPS


class _Method(Protocol):
    """Attributes of `Method`, which cannot be imported here, because `methods.base` imports this module."""

    @property
    def name(self) -> str: ...
    @property
    def axes(self) -> tuple[Axis, ...]: ...
    @property
    def adds(self) -> frozenset[Adds]: ...
    @property
    def conflicts(self) -> Mapping[str, str]: ...
    @property
    def needs(self) -> frozenset[Needs]: ...
    @property
    def hints(self) -> Mapping[Needs, str]: ...
    @property
    def state_key(self) -> str: ...
    @property
    def applied(self) -> object | None: ...
    def full_name(self, setting: str) -> str: ...
    def trained_in_some_step(self) -> Iterable[nn.Parameter]: ...


#: Mapping from each model to the methods that are applied to it. The mapping is used to find parameters that are frozen
#: in the current step but trained in other steps.
_applied: WeakKeyDictionary[nn.Module, WeakSet[_Method]] = WeakKeyDictionary()


def check_stack(methods: Sequence[_Method], model: nn.Module | None = None) -> None:
    """Check that methods can be combined with each other and with the methods that are already applied to `model`.

    Each axis may have at most one method, and no two methods may conflict. A method that must precede another method
    cannot be applied after that method. For example, a selection method must precede adapters.

    Args:
        methods: methods that are not yet applied to any model, or that are applied to `model`.
        model: model to which the methods will be applied. If None, the methods are only compared with each other.

    Raises:
        UserError: If two methods cannot be combined. The message names both methods and suggests a remedy.
    """
    for a, b in itertools.combinations(methods, 2):
        axis = _shared_axis(a, b)
        if axis is not None:
            advice = ""
            if axis == Axis.SELECTION:
                advice = (
                    " The method full trains all parameters. If no selection method is named, each method uses its"
                    " default selection."
                )
            raise UserError(f"method: {a.name} and {b.name} both {axis.does}. Name only one of these methods.{advice}")
        why = _conflict(a, a.name, b, b.name)
        if why is not None:
            raise UserError(f"method: {a.name} and {b.name} cannot be combined: {why}. Name only one of these methods.")
    if model is None:
        return
    _refuse_recomputation(methods, model)
    own = {method.state_key for method in methods if method.applied is not None}
    for mark in (mark for mark in marks_of(model) if mark.key not in own):
        for method in (method for method in methods if method.applied is None):
            _check_against(method, mark, type(model).__name__)


def _refuse_recomputation(methods: Sequence[_Method], model: nn.Module) -> None:
    """Raise UserError if `model` recomputes its blocks and one of the methods does not support recomputation."""
    flags = ("grad_checkpointing", "gradient_checkpointing")  # attributes that `timm` and `transformers` set
    if not any(getattr(module, flag, False) for module in model.modules() for flag in flags):
        return
    for method in methods:
        why = None
        if Axis.MEMORY in method.axes:
            why = "recomputed blocks save no activations, so that the method would not reduce the memory"
        elif Adds.LOSS in method.adds:
            why = "the recomputation would add the method's loss again"
        if why is not None:
            raise UserError(
                f"method {method.name}: the model {type(model).__name__} uses its own checkpointing, and {why}. Call"
                " model.set_grad_checkpointing(False) (or model.gradient_checkpointing_disable() for transformers"
                f" models), or remove the method {method.name}."
            )


def _check_against(method: _Method, mark: Mark, model: str) -> None:
    applied = f"method {method.name}: {mark.method} has been applied to this {model}"
    axis = _shared_axis(method, mark)
    if axis is not None:
        raise UserError(
            f"{applied}, and both methods {axis.does}. Use only one of these methods, or remove {mark.method} first."
        )
    why = _conflict(method, method.name, mark, mark.method)
    if why is not None:
        raise UserError(f"{applied}, and the two methods cannot be combined: {why}. Use only one of these methods.")
    if any(MUST_COME_BEFORE.get(axis, frozenset()) & set(mark.axes) for axis in method.axes):
        raise UserError(
            f"{applied}, but must be applied after {method.name}. Pass both methods to apply_methods, which sorts the"
            f" methods, or remove {mark.method} first."
        )


def check_removal(method: _Method, model: nn.Module) -> None:
    """Raise UserError if `method` is not applied to `model`, or if another method must be removed first."""
    if all(mark.key != method.state_key for mark in marks_of(model)):
        raise UserError(f"method {method.name}: the method is not applied to this model, so it cannot be removed.")
    after = frozenset().union(*(MUST_COME_BEFORE.get(axis, frozenset()) for axis in method.axes))
    for mark in marks_of(model):
        if mark.key != method.state_key and after & set(mark.axes):
            raise UserError(
                f"method {method.name}: {mark.method} was applied after {method.name}. Remove {mark.method} first."
            )


def _shared_axis(a: _Method, b: _Method | Mark) -> Axis | None:
    return next((Axis(axis) for axis in a.axes if axis in b.axes), None)


def _conflict(a: _Method, a_name: str, b: _Method | Mark, b_name: str) -> str | None:
    for this, other, name in ((a, b, b_name), (b, a, a_name)):
        for what, why in this.conflicts.items():
            if what in (*other.axes, *other.adds, name):
                return why
    return None


def check_needs(method: _Method, view: ModelView) -> None:
    """Raise UserError if the model does not meet a requirement that `method` declares.

    Raise SettingError if a token grid is required and an image consists of a single patch, or if the blocks that the
    user specifies are not in the order of the forward pass. Raise UserError for adapters if the head is quantized.
    """
    view.check_block_order()
    if Axis.ADAPTERS in method.axes and quantized_parameters(view.model):
        refuse_quantized(method.name, view.model, view.new_parameters(), "train")
    if Needs.BLOCKS in method.needs:
        if view.shared_blocks and {Axis.TOKENS, Axis.PATCHES} & set(method.axes):
            raise UserError(
                f"method {method.name}: {_shared_in_words(view)}. Tokens can be dropped or merged only if each block"
                " occurs once. Choose another method."
            )
        try:
            view.check_towers(one=bool({Axis.TOKENS, Axis.PATCHES} & set(method.axes)))
        except UserError as error:
            raise UserError(f"method {method.name}: {error}") from None
    for need in Needs:
        if need in method.needs:
            why = _missing(need, method, view)
            if why is not None:
                advice = re.sub(r"\{(\w+)\}", lambda found: method.full_name(found[1]), method.hints.get(need, ""))
                if need == Needs.BLOCKS:
                    advice = re.sub("^Use", hint("Otherwise, use", "Use"), advice)
                raise UserError(f"method {method.name}: {why}. {advice}".rstrip())
    if {Adds.TOKEN_DROPPING, Adds.TOKEN_MERGING} & method.adds and view.has_dense_output:
        raise UserError(
            f"method {method.name}: {view.name} has a dense output (for example, one class per pixel), which requires"
            " the tokens of all positions. Tokens can be dropped or merged only in classification networks."
        )


def _missing(need: Needs, method: _Method, view: ModelView) -> str | None:
    if need == Needs.BLOCKS and not view.blocks:
        other = "" if need in method.hints else ". Use a method that does not require blocks, for example full or head"
        return f"no blocks were recognized in {view.name}" + hint(
            ". If the network has blocks, pass their names, for example blocks='encoder.layers.*'",
            other,
        )
    if need == Needs.CLASSIFIER and not view.head:
        return f"{view.name} has no classifier that can be trained" + hint(
            ". Create the model with num_classes=N, where N >= 1, or pass the name of its classifier module:"
            " classifier='NAME'"
        )
    if need == Needs.CLASS_TOKEN and not view.has_class_token:
        return f"{view.name} has no class token, but the method ranks patch tokens by the attention of the class token"
    if need == Needs.TOKEN_GRID:
        if view.single_patch:
            height, width = view.image_size
            raise SettingError(
                hint("image_size", "model.image_size"),
                f"{height}×{width}",
                f"larger than one patch of {view.name} with method {method.name}",
            )
        if view.block_grid is None:
            return _no_grid(view)
    return None


def assumptions(method: _Method, view: ModelView) -> list[str]:
    """Return phrases for the report that state the inferred properties of the network on which `method` depends."""
    notes = []
    if view.prefix_note and (Needs.TOKEN_GRID in method.needs or Adds.LOW_RANK_LAYERS in method.adds):
        notes.append(view.prefix_note)
    if view.size_note and ({Needs.TOKEN_GRID} & method.needs or Adds.LOW_RANK_LAYERS in method.adds):
        notes.append(view.size_note)
    elif view.size_note:
        notes.append(f"{view.size_note}, which affects only the choice of layers")
    if view.shared_blocks and Needs.BLOCKS in method.needs:
        notes.append(_shared_in_words(view))
    freezes = {Axis.SELECTION, Axis.ADAPTERS} & set(method.axes)
    if freezes and any(not p.requires_grad for p in view.model.parameters()):
        if view.head_note:
            advice = hint(" (to use another classifier, pass its name as the argument classifier)")
            notes.append(f"{view.head_note}{advice}")
        elif not (view.head or view.outside):
            advice = hint(" (if there is one, pass its name as the argument classifier)")
            notes.append(f"no classifier was found{advice}")
    return notes


def _shared_in_words(view: ModelView) -> str:
    """Return a phrase that states which blocks the network contains several times."""
    shared = view.shared_blocks
    name, names = next(iter(shared.items()))
    more = f", and {len(shared) - 1} more" if len(shared) > 1 else ""
    return f"{view.name} contains blocks several times with shared weights ({name}: {len(names)} times{more})"


#: Remedies if the token grid or the blocks of a network are not recognized.
_PREFIX = (
    " If the number of prefix tokens (class, distillation and register tokens) is incorrect, pass the correct number:"
    " prefix_tokens=N."
)
_BLOCKS = " If the network has blocks, pass their names, for example blocks='encoder.layers.*'."


def nothing_to_change(method: _Method, view: ModelView, skipped: Iterable[Skipped]) -> UserError:
    """Return the error for a method that cannot change any part of a network, with the reasons in `skipped`."""
    reasons = {str(why): why.reason for why in skipped}
    prefix = any(reason is Reason.NO_GRID and not text.endswith(NO_MAPS) for text, reason in reasons.items())
    shown = sorted(reasons)[:3]
    if prefix:
        shown.append(f"number of prefix tokens: {view.prefix_tokens}")
    advice = hint((_PREFIX if prefix else "") + ("" if view.blocks else _BLOCKS))
    return UserError(
        f"method {method.name}: no part of the model {type(view.model).__name__} can be changed"
        + (f" ({'; '.join(shown)})." if shown else ".")
        + f"{advice} {'Otherwise, choose' if advice else 'Choose'} another method. For example, the method full trains"
        " all parameters."
    )


def _no_grid(view: ModelView) -> str:
    """Return the reason why the blocks of a network do not share one token grid."""
    for kind in {type(view.model.get_submodule(name)): None for name in view.blocks}:
        if (reason := why_not(kind)) is not None:
            return f"tokens cannot be dropped or merged in the blocks of {view.name} ({kind.__name__}): {reason}"
    text = f"the blocks of {view.name} do not share one token grid"
    inside = tuple(f"{block}." for block in view.blocks)
    layers = (layer for layer in view.layers if layer.name.startswith(inside))
    reasons = {str(layer.why_not): layer.why_not.reason for layer in layers if layer.why_not is not None}
    if list(reasons.values()) == [Reason.NO_GRID]:
        (reason,) = reasons
        if reason.endswith(NO_MAPS):
            return f"{text}: a layer receives {reason}"
        return (
            f"{text}: the patch tokens do not form a grid ({reason}, number of prefix tokens: {view.prefix_tokens})"
            + hint(f".{_PREFIX}".removesuffix("."))
        )
    return text if view.has_attention else f"{view.name} has no attention blocks"


def no_method(wrong: object) -> SettingError:
    """Return the error for an argument that is neither a method nor a list of methods."""
    do = "Create method objects: from efficient_ft.methods import LoRA; apply_methods(model, [LoRA(rank=8)])."
    got = f"{wrong!r:.60}"
    if isinstance(wrong, type) and hasattr(wrong, "apply"):
        do = f"Create an object of the class: {wrong.__name__}()."
    elif isinstance(wrong, nn.Module):
        got, do = type(wrong).__name__, "The model is the first argument: apply_methods(model, methods)."
    return SettingError("methods", got, "a Method object or a list of Method objects", do)


def note_applied(model: nn.Module, method: _Method) -> None:
    """Record that `method` has been applied to `model`."""
    _applied.setdefault(model, WeakSet()).add(method)


def check_optimizer(model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
    """Check that the optimizers contain all parameters of `model` that are trained in at least one step.

    Call this function once, after the optimizer is created. The callbacks for Lightning and Hugging Face call this
    function automatically.

    Args:
        model: model to which the methods were applied.
        optimizers: one optimizer or several optimizers.

    Raises:
        UserError: If a parameter is missing from the optimizers. In this case, the optimizer was created before the
            methods were applied, or inside a step in which the methods freeze some parameters.
    """
    several = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
    held = {id(p) for optimizer in several for group in optimizer.param_groups for p in group["params"]}
    of_methods = {id(p) for method in _applied.get(model, ()) for p in method.trained_in_some_step()}
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad or id(p) in of_methods}
    missing = [name for name, parameter in wanted.items() if id(parameter) not in held]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(wanted)} trainable parameters are not in any optimizer ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}). The optimizer was created before the methods were applied, or after"
            " the first step_begin. Create the optimizer after the methods are applied and before the first step_begin,"
            " with all parameters whose requires_grad is True. To exclude a parameter, call its method"
            " requires_grad_(False)."
        )
