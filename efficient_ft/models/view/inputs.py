"""Check whether a network can be called with images alone."""

from __future__ import annotations

import inspect
from collections.abc import Sequence

from torch import nn

from efficient_ft.core.errors import UserError, hint
from efficient_ft.models.view.head import networks_in
from efficient_ft.models.view.probe import takes_tokens


def other_inputs(model: nn.Module) -> tuple[list[str], list[str]]:
    """Return the names of the required and of the optional inputs of the forward method, except the first input.

    Arguments with a default value other than None are options instead of inputs.
    """
    every = list(inspect.signature(model.forward).parameters.values())
    named = [p for p in every if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    if not named:  # the method has the parameters *args and **kwargs
        return [], [p.name for p in every]
    named = named[1:]
    return [p.name for p in named if p.default is p.empty], [p.name for p in named if p.default is None]


def refuse_required_inputs(model: nn.Module, action: str) -> None:
    """Raise UserError if the forward method of `model` has required inputs in addition to images.

    The message names the network in `model` that takes images.

    Args:
        model: network.
        action: subject of the message, which calls the network with images alone.
    """
    required, _ = other_inputs(model)
    if required and not takes_tokens(model):
        raise UserError(
            f"{type(model).__name__} requires inputs in addition to images ({', '.join(required)}), but {action} calls"
            f" the network with images alone.{advice_for_inputs(model, networks_in(model))}"
        )


def advice_for_inputs(model: nn.Module, networks: Sequence[str]) -> str:
    """Return the advice to apply methods to a network in `model` that takes images alone, which starts with a space."""
    if not networks:
        return hint(f" Apply the methods to a part of {type(model).__name__} that takes only images.")
    first, listed = networks[0], " or ".join(f"model.{name}" for name in networks)
    return hint(
        f" Apply the methods to the network that takes only images, {listed}.\n"
        f"In a callback, pass network={first!r}, or network='NAME.{first}' if the module is the attribute NAME of the"
        " model."
    )
