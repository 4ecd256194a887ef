"""Networks whose large weights are stored in bfloat16 (the setting ``trainer.weight_dtype``)."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import nn

_LAYERS = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d)
_FORWARDS = {layer.forward for layer in _LAYERS}


def store_weights(network: nn.Module, dtype: str) -> nn.Module:
    """Store the weights of linear layers and convolutions in bfloat16 if `dtype` is ``bf16``, and return `network`.

    Under autocast to bfloat16, these layers convert their weights in each forward pass. The forward pass therefore
    computes the same values if the weights are already stored in bfloat16. All other parameters and buffers stay in
    float32: biases, normalization layers, position embeddings, layer scales, token embeddings, and layers with a
    forward method of their own (e.g. convolutions that standardize their weights).

    Call this function before methods are applied. Parameters that methods add are then stored in float32.
    """
    if dtype == "bf16":
        for module in network.modules():
            if isinstance(module, _LAYERS) and type(module).forward in _FORWARDS:
                weight = module._parameters["weight"]
                if weight is not None and weight.dtype == torch.float32:
                    weight.data = weight.data.bfloat16()
    return network


def stores_bf16(module: nn.Module) -> bool:
    """Return True if `store_weights` has stored weights of `module` in bfloat16.

    A module that has only bfloat16 parameters was converted by the user, and can run without autocast.
    """
    dtypes = {parameter.dtype for parameter in module.parameters()}
    return dtypes >= {torch.bfloat16, torch.float32}


def dtype_of_added(module: nn.Module) -> torch.dtype:
    """Return the data type for parameters that a method adds to `module`: float32 if only weights are in bfloat16."""
    return torch.float32 if stores_bf16(module) else next(module.parameters()).dtype


def to_float32(module: nn.Module) -> None:
    """Convert the weights that `store_weights` has stored in bfloat16 to float32."""
    if stores_bf16(module):
        for parameter in module.parameters():
            if parameter.dtype == torch.bfloat16:
                parameter.data = parameter.data.float()


def autocast_for(module: nn.Module) -> AbstractContextManager[Any]:
    """Return the autocast context in which a module with stored bfloat16 weights can run.

    The current autocast state is unchanged if autocast is enabled or if no weights are stored in bfloat16.
    """
    device = next(module.parameters()).device.type
    if not torch.is_autocast_enabled(device) and stores_bf16(module):
        return torch.autocast(device, dtype=torch.bfloat16)
    return nullcontext()
