"""Check that an optimizer has every parameter that methods train."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol
from weakref import WeakKeyDictionary, WeakSet

import torch
from torch import nn

from efficient_ft.core.errors import UserError


class _Method(Protocol):
    """A method as this module reads it; `methods.base` imports this module."""

    def trained_in_some_step(self) -> Iterable[nn.Parameter]: ...


#: By model: the methods applied to it, which know what they have frozen for the present step alone.
_applied: WeakKeyDictionary[nn.Module, WeakSet[_Method]] = WeakKeyDictionary()


def note_applied(model: nn.Module, method: _Method) -> None:
    """Note that `method` has been applied to `model`."""
    _applied.setdefault(model, WeakSet()).add(method)


def check_optimizer(model: nn.Module, optimizers: torch.optim.Optimizer | Iterable[torch.optim.Optimizer]) -> None:
    """Check that every parameter of `model` that trains, in this or in another step, is in an optimizer.

    Call it once, after the optimizer is built. Lightning's and Hugging Face's callbacks do.

    Args:
        model: the model that the methods were applied to.
        optimizers: one optimizer or several.

    Raises:
        UserError: some parameters are in none of them: an optimizer was built before the methods were applied, or
            within a step in which they freeze some parameters.
    """
    several = [optimizers] if hasattr(optimizers, "param_groups") else list(optimizers)
    held = {id(p) for optimizer in several for group in optimizer.param_groups for p in group["params"]}
    of_methods = {id(p) for method in _applied.get(model, ()) for p in method.trained_in_some_step()}
    wanted = {n: p for n, p in model.named_parameters() if p.requires_grad or id(p) in of_methods}
    missing = [name for name, parameter in wanted.items() if id(parameter) not in held]
    if missing:
        raise UserError(
            f"{len(missing)} of {len(wanted)} parameters that train are in no optimizer ({', '.join(missing[:3])}"
            f"{', …' if len(missing) > 3 else ''}): it was built before the methods were applied, or after the first"
            " step_begin. Build it between the two, over all parameters whose requires_grad is True. Freeze parameters"
            " that shall not train: p.requires_grad_(False)."
        )
