"""Access to the state of an optimizer."""

from __future__ import annotations

from typing import Any

from torch import Tensor
from torch.optim import Optimizer


def plain_states(optimizer: Optimizer, state_dict: dict[str, Any]) -> dict[Tensor, dict[str, Tensor]]:
    """Return the states of a state dict, keyed by the parameters of `optimizer`."""
    indices = [index for group in state_dict["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    states = state_dict["state"]
    return {p: states[index] for index, p in zip(indices, parameters, strict=False) if index in states}


def state_tensors(optimizer: Optimizer) -> list[Tensor]:
    """Return the tensors of an optimizer's state. A tensor subclass is replaced by its inner tensors."""
    values = [value for state in optimizer.state.values() for value in state.values() if isinstance(value, Tensor)]
    return [part for value in values for part in _parts(value)]


def _parts(value: Any) -> list[Tensor]:
    if hasattr(value, "__tensor_flatten__"):
        return [getattr(value, name) for name in value.__tensor_flatten__()[0]]
    return [value]
