"""A check that an optimizer contains every parameter that methods train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from efficient_ft.core.errors import UserError


class _Method(Protocol):
    """The part of `Method` that this module uses. `methods.base` imports this module."""

    def trained_in_some_step(self) -> Iterable[nn.Parameter]: ...


#: Methods applied to each model. Their `trained_in_some_step` lists parameters that are frozen only in the current
#: step.
_applied: WeakKeyDictionary[nn.Module, WeakSet[_Method]] = WeakKeyDictionary()


def note_applied(model: nn.Module, method: _Method) -> None:
    """Record that `method` has been applied to `model`."""
    _applied.setdefault(model, WeakSet()).add(method)


def check_optimizer(model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
    """Check that the optimizers contain every parameter of `model` that is trained in any step.

    Call this function once after the optimizer is created. The callbacks for Lightning and Hugging Face call it.

    Args:
        model: model to which the methods were applied.
        optimizers: one optimizer or several optimizers.

    Raises:
        UserError: If a parameter is missing from the optimizers. The optimizer was created before the methods were
            applied, or inside a step in which they freeze some parameters.
    """
    several = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
    held = {id(p) for optimizer in several for group in optimizer.param_groups for p in group["params"]}
    of_methods = {id(p) for method in _applied.get(model, ()) for p in method.trained_in_some_step()}
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad or id(p) in of_methods}
    missing = [name for name, parameter in wanted.items() if id(parameter) not in held]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(wanted)} trainable parameters are in no optimizer ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}). The optimizer was built before the methods were applied, or after"
            " the first step_begin. Build it between the two, over all parameters whose requires_grad is True. Freeze"
            " parameters that must not be trained: p.requires_grad_(False)."
        )
