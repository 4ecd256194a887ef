"""Functions that check whether methods are compatible with each other and with a model."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.methods.declarations import MUST_COME_BEFORE, Adds, Axis, Needs
from efficient_ft.models.marks import Mark, marks_of
from efficient_ft.models.view import ModelView, Reason


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
            hint = ""
            if axis == Axis.SELECTION:
                hint = (
                    " The method full trains all parameters. If no selection method is named, each method uses its"
                    " default selection."
                )
            raise UserError(f"method: {a.name} and {b.name} both {axis.does}. Name only one of these methods.{hint}")
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
            why = "recomputation saves no activations that the method could pack"
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
    """Raise UserError if another method that must be removed before `method` is still applied to `model`."""
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

    Raise SettingError if a token grid is required and an image consists of a single patch.
    """
    for need in Needs:
        if need in method.needs:
            why = _missing(need, method, view)
            if why is not None:
                hint = method.hints.get(need)
                raise UserError(f"method {method.name}: {why}." + (f" {hint}" if hint else ""))


def _missing(need: Needs, method: _Method, view: ModelView) -> str | None:
    if need == Needs.BLOCKS and not view.blocks:
        return (
            f"no blocks were recognized in {view.name}. If the network has blocks, pass their names in"
            " Python: apply(model, blocks='encoder.layers.*')"
        )
    if need == Needs.CLASSIFIER and not view.head:
        return (
            f"{view.name} has no classifier that can be trained. Create the model with num_classes=N, where N >= 1, or"
            " pass the name of its classifier module: apply(model, classifier='NAME')"
        )
    if need == Needs.CLASS_TOKEN and not view.has_class_token:
        return f"{view.name} has no class token, but the method ranks patch tokens by the attention of the class token"
    if need == Needs.TOKEN_GRID:
        if view.single_patch:
            height, width = view.image_size
            raise SettingError(
                "model.image_size",
                f"{height}×{width}",
                f"larger than one patch of {view.name} with method {method.name}",
            )
        if view.block_grid is None:
            return _no_grid(view)
    return None


def _no_grid(view: ModelView) -> str:
    """Return the reason why the blocks of a network do not share one token grid."""
    inside = tuple(f"{block}." for block in view.blocks)
    reasons = {str(layer.why_not) for layer in view.layers if layer.name.startswith(inside) and layer.tokens is None}
    text = f"the blocks of {view.name} do not share one token grid"
    if len(reasons) == 1 and Reason.NO_GRID.value in (reason := reasons.pop()):
        return (
            f"{text}: the patch tokens do not form a grid ({reason}, number of prefix tokens: {view.prefix_tokens}). If"
            " the number of prefix tokens (class, distillation and register tokens) is incorrect, pass the correct"
            " number: apply(model, prefix_tokens=N)"
        )
    return text


def no_method(wrong: object) -> SettingError:
    """Return the error for an argument that is neither a method nor a list of methods."""
    hint = "Create method objects: from efficient_ft.methods import LoRA; apply_methods(model, [LoRA(rank=8)])."
    if isinstance(wrong, type) and hasattr(wrong, "apply"):
        hint = f"Create an object of the class: {wrong.__name__}()."
    elif isinstance(wrong, nn.Module):
        hint = "The model is the first argument: apply_methods(model, methods)."
    return SettingError("methods", f"{wrong!r:.60}", "a Method object or a list of Method objects", hint)


def refuse_wrapped(model: nn.Module, name: str) -> None:
    """Raise UserError if `model` is compiled, scripted, or wrapped by peft, DataParallel, DDP or FSDP."""
    wrapper = type(model).__name__
    if any(kind.__name__ == "PeftModel" for kind in type(model).__mro__):
        raise UserError(
            f"method {name}: the model is wrapped by peft ({wrapper}). Apply the method to the base model:"
            " apply(model.get_base_model()). The adapters of peft are kept."
        )
    if wrapper in ("OptimizedModule", "DataParallel", "DistributedDataParallel", "FullyShardedDataParallel"):
        raise UserError(
            f"method {name}: the model is already wrapped ({wrapper}). Apply the method to the plain model"
            " first, and then compile or wrap the model."
        )
    if isinstance(model, torch.jit.ScriptModule):
        raise UserError(
            f"method {name}: a scripted model cannot be changed. Apply the method before the model is scripted."
        )


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
