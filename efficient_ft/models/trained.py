"""Read and set which parameters of a network are trained."""

from __future__ import annotations

from collections.abc import Mapping

from torch import nn


def trainable(model: nn.Module) -> dict[str, bool]:
    """Return a mapping from parameter names to `requires_grad`."""
    return {name: parameter.requires_grad for name, parameter in model.named_parameters()}


def make_trainable(model: nn.Module, wanted: Mapping[str, bool]) -> None:
    """Set `requires_grad` of the parameters named in `wanted`, and free the gradients of frozen parameters."""
    for name, parameter in model.named_parameters():
        if name in wanted:
            parameter.requires_grad_(wanted[name])
            if not wanted[name]:
                parameter.grad = None
