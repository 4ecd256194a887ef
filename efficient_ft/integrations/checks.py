"""Checks of models, added losses and optimizers for sessions and callbacks."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from typing import Any
from weakref import WeakKeyDictionary, ref

from torch import nn

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.in_backward import Wrong, refuse_in_backward
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Adds, Needs
from efficient_ft.models.frozen_batch_norm import (
    FrozenStatistics,
    freeze_batch_norm,
    frozen_layers,
    layers_without_statistics,
)
from efficient_ft.models.view import check_arguments
from efficient_ft.optim import steps_in_backward

log = logging.getLogger(__name__)
#: Mapping from each model to its open session.
OPENED: WeakKeyDictionary[nn.Module, ref[Any]] = WeakKeyDictionary()


def names_adding_loss(methods: Iterable[Method]) -> list[str]:
    """Return the names of the methods that add a loss."""
    return [method.name for method in methods if adds_loss(method)]


def adds_loss(method: Method) -> bool:
    """Return True if the method adds a loss.

    The method adds a loss if it overrides `total_loss`, unless its settings have removed `Adds.LOSS` from the
    declaration of the class.
    """
    if type(method).total_loss is Method.total_loss:
        return False
    return Adds.LOSS in method.adds or Adds.LOSS not in type(method).adds


def freeze_statistics(model: nn.Module, which: FrozenStatistics) -> list[str]:
    """Freeze BatchNorm statistics of `model`, and return the names of the newly frozen layers.

    Log a warning for layers whose statistics still have their initial values, because these layers are not pretrained.
    """
    before, initial = frozen_layers(model), layers_without_statistics(model)
    names = [name for name in freeze_batch_norm(model, which) if name not in before]
    if wrong := [name for name in names if name in initial]:
        log.warning(
            "warning: the BatchNorm statistics of %d layers are frozen at their initial values (mean 0, variance 1),"
            " because the model %s has not been pretrained. To train the model, pass frozen_bn=False (in a run,"
            " model.frozen_bn=false).",
            len(wrong),
            type(model).__name__,
        )
    return names


def refuse_loss_outside(methods: Iterable[Method], block: int | None) -> None:
    """Raise UserError if `MethodSession.loss` is called outside of a step and a method adds a loss or acts per step.

    `block` is the number of the step whose ``with`` block is running, or None if no ``with`` block is running.
    """
    for method in methods:
        if method.acts_per_step or adds_loss(method):
            why = "adds a loss" if adds_loss(method) else "must be called in each step"
            if block is not None:
                raise UserError(
                    f"session.loss() was called after the end of step {block}, but method {method.name}"
                    f" {why}. The step ended when the optimizer stepped. Use a `with session.step(number):` block"
                    " with a new number for each step of the optimizer."
                )
            raise UserError(
                f"session.loss() was called outside of a step, but method {method.name} {why}. Call session.loss()"
                " inside `with session.step(number):`, after the forward pass."
            )


def refuse_nested(model: nn.Module, session: object) -> None:
    """Raise UserError if another session is open on `model`, its submodules, or a module that contains `model`."""
    modules = set(model.modules())
    for other, entered in list(OPENED.items()):
        if entered() not in (None, session) and (other in modules or model in set(other.modules())):
            raise UserError(
                f"Another session is open on this {type(other).__name__}: {entered()!r}. Pass all methods to one"
                " session, or leave the other session first."
            )


def check_in_backward(methods: Iterable[Method], optimizers: Iterable[Any], **loop: Wrong | None) -> None:
    """Raise an error if an optimizer steps inside the backward pass and the methods or the loop require all gradients.

    `loop` contains the settings of the training loop that are not compatible with such an optimizer (see
    `refuse_in_backward`).
    """
    if steps_in_backward(optimizers):
        refuse_in_backward("an optimizer that steps inside the backward pass", **loop)
        refuse_gradient_readers(methods)


def refuse_gradient_readers(methods: Iterable[Method]) -> None:
    """Raise UserError if a method requires gradients at the end of a step."""
    if readers := [method.name for method in methods if Needs.GRADIENTS_AT_STEP_END in method.needs]:
        raise UserError(
            f"method {readers[0]} compares the gradients of all blocks at the end of a step, but an optimizer that"
            " steps inside the backward pass frees these gradients. Use optim.in_backward=false, or another method."
        )


def refuse_foreign_state(methods: Iterable[Method], state: Mapping[str, Any], given: Mapping[str, Any]) -> None:
    """Raise UserError if the state in a checkpoint does not belong to `methods`.

    `given` is the state in the checkpoint, and `state` is the current state of the methods.
    """
    own = {method.state_key for method in methods}
    foreign, missing = sorted(given.keys() - own), sorted(state.keys() - given.keys())
    if foreign or missing:
        raise UserError(
            "The checkpoint was written with other methods or settings. The checkpoint contains the state of"
            f" {', '.join(foreign or sorted(given)) or 'no method'}, but this session requires the"
            f" state of {', '.join(missing or sorted(own))}. Pass the methods and settings of the interrupted training."
        )


def check_callback(network: object, structure: Mapping[str, Any]) -> None:
    """Raise SettingError or TypeError if an argument of a callback is invalid. The network is found later."""
    if not isinstance(network, str):
        given = f"a {type(network).__name__}" if isinstance(network, nn.Module) else f"{network!r:.60}"
        hint = 'Pass a name such as "model.backbone", or "" for the model itself.'
        raise SettingError("network", given, "the name of an attribute of the model", hint)
    check_arguments(structure)


def find_network(module: Any, name: str) -> nn.Module:
    """Return the module at the dotted path `name` in `module`, or `module` itself if `name` is empty."""
    found = module
    for depth, part in enumerate(name.split(".") if name else ()):
        child = getattr(found, part, None)
        if not isinstance(child, nn.Module):
            _refuse_name(found, name, ".".join(name.split(".")[:depth]), hasattr(found, part))
        found = child
    return found


def _refuse_name(holder: Any, name: str, prefix: str, exists: bool) -> None:
    children = holder.named_children() if isinstance(holder, nn.Module) else ()
    names = [f"{prefix}.{child}" if prefix else child for child, _ in children]
    why = (
        "The attribute is not a module when the callback applies the methods. Build the network in __init__."
        if exists
        else 'Pass the attribute that contains the network, or network="" for the module itself.'
    )
    of = f"{type(holder).__name__}" + (f" ({prefix})" if prefix else "")
    constraint = f"a module of {of}: " + (f"one of {', '.join(names)}" if names else "it has none")
    raise SettingError("network", repr(name), constraint, why)
