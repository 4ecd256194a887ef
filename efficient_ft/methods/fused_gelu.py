"""Fused operations for training on a CPU: GELU, and BatchNorm followed by GELU.

A fused operation makes one pass over the tensor in the forward pass and one pass in the backward pass. In a network
with low-rank layers, matrix products are small. The operations between the matrix products take a similar amount of
time. Separate BatchNorm and GELU operations require four passes over the widest tensors of the network, and torch's
GELU is compute-bound on a CPU.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.models.efficientformer import ConvMlpWithNorm
from torch import Tensor, nn
from torch._C import _len_torch_function_stack

from efficient_ft.methods.forwards import OwnForward, put_inside, take_away
from efficient_ft.models.frozen_batch_norm import FrozenBatchNorm2d
from efficient_ft.ops.gelu import batch_norm_gelu, gelu


class FusedGelu(OwnForward):
    """Forward pass of `nn.GELU` that uses the operation in `ops.gelu`."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        return gelu(x) if _fits(self.module, x) and (x.is_contiguous() or _channels_last(x)) else self.within(x)


class FusedNormGelu(OwnForward):
    """Forward pass of a feed-forward network that fuses frozen BatchNorm and GELU into one operation."""

    same_values = True

    def __call__(self, x: Tensor) -> Tensor:
        mlp: Any = self.module
        norm = mlp.norm1
        changed = "forward" in norm.__dict__ or _hooked(norm) or _hooked(mlp.act)
        if type(norm) is not FrozenBatchNorm2d or changed or not _exact(mlp.act):
            return self.within(x)
        x = mlp.fc1(x)
        if _fits(mlp, x) and _channels_last(x):
            assert norm.running_mean is not None
            assert norm.running_var is not None
            x = batch_norm_gelu(x, norm.running_mean, norm.running_var, norm.weight, norm.bias, norm.eps)
        else:
            x = mlp.act(norm(x))
        x = mlp.fc2(mlp.drop(x))
        return mlp.drop(mlp.norm2(x))


def _fits(module: nn.Module, x: Tensor) -> bool:
    """Return True if a fused operation can process `x`: in training on a CPU, in fp32, and without function modes."""
    return (
        module.training
        and x.device.type == "cpu"
        and x.dtype == torch.float32
        and not torch.compiler.is_compiling()
        and _len_torch_function_stack() == 0
    )


def _exact(act: nn.Module) -> bool:
    return type(act) is nn.GELU and act.approximate == "none"


def _hooked(module: nn.Module) -> bool:
    return bool(module._forward_hooks or module._forward_pre_hooks or module._backward_hooks)


def _channels_last(x: Tensor) -> bool:
    return x.dim() == 4 and x.is_contiguous(memory_format=torch.channels_last)


def fuse_gelu(model: nn.Module, *, everywhere: bool = True) -> list[str]:
    """Use the fused operations for GELU, and for a frozen BatchNorm followed by GELU, where possible.

    If `everywhere` is False, only models that contain feed-forward networks with BatchNorm before GELU are changed.

    Returns:
        Names of the GELU layers that use a fused operation.
    """
    names: list[str] = []
    if not everywhere and not any(type(module) is ConvMlpWithNorm for module in model.modules()):
        return names
    for name, module in model.named_modules():
        if type(module) is ConvMlpWithNorm:
            put_inside(module, FusedNormGelu(module))
        elif _exact(module):
            names.append(name)
            put_inside(module, FusedGelu(module))
    return names


def separate_gelu(model: nn.Module) -> None:
    """Undo `fuse_gelu`."""
    take_away(model, FusedGelu)
    take_away(model, FusedNormGelu)
