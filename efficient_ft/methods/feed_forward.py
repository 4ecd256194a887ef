"""Forward pass of frozen feed-forward networks that processes the batch in parts to reduce the peak memory.

The feed-forward network of a block widens its input by a factor of four, and its activation function creates a second
tensor of the same size. The two tensors are not saved below the lowest trainable parameter, but they can still dominate
the peak memory of a step that trains few parameters. If the batch is split into parts that fit into the processor's
cache, less memory is used without a loss of speed.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import mlp
from timm.models.efficientformer import ConvMlpWithNorm
from torch import Tensor, nn

from efficient_ft.methods.forwards import OwnForward, put_around, take_away
from efficient_ft.models.frozen_batch_norm import FROZEN
from efficient_ft.ops.autocast import compute_dtype

#: Maximum size in bytes of the widest tensor in one part.
_PART_BYTES = 5 * 2**20
#: Feed-forward networks from `timm` that process the images of a batch independently.
_KINDS = (mlp.Mlp, mlp.GluMlp, mlp.SwiGLU, mlp.ConvMlp, mlp.GlobalResponseNormMlp, ConvMlpWithNorm)


class FrozenFeedForward(OwnForward):
    """Forward pass of a feed-forward network. The batch is split if no gradient is computed in the network."""

    same_values = True

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = self._parts(x)
        if parts == 1:
            return self.within(x, *args, **kwargs)
        return torch.cat([self.within(part, *args, **kwargs) for part in x.chunk(parts)])

    def _parts(self, x: Tensor) -> int:
        if x.device.type != "cpu" or torch.compiler.is_compiling() or torch.jit.is_tracing() or len(x) < 2:
            return 1
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.module.parameters())):
            return 1
        if any(_mixes(module) or _has_hooks(module) for module in self.module.modules()):
            return 1
        layers = [m for m in self.module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        if not layers:  # Another method has replaced all layers.
            return 1
        channels = x.shape[1 if isinstance(layers[0], nn.Conv2d) else -1]
        widest = x.numel() // channels * max(len(layer.weight) for layer in layers) * compute_dtype(x).itemsize
        return min(len(x), -(-widest // _PART_BYTES))


def _mixes(module: nn.Module) -> bool:
    """Return True if the module mixes the images of a batch or draws random numbers."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return type(module) not in FROZEN.values()
    return getattr(module, "p", 0) > 0


def _has_hooks(module: nn.Module) -> bool:
    """Return True if the module has hooks, which must receive the whole batch."""
    return bool(module._forward_hooks or module._forward_pre_hooks)


def run_in_parts(model: nn.Module) -> None:
    """Make the feed-forward networks of `model` process the batch in parts while they are frozen."""
    for module in model.modules():
        if type(module) in _KINDS:
            put_around(module, FrozenFeedForward(module))


def run_whole(model: nn.Module) -> None:
    """Undo `run_in_parts`."""
    take_away(model, FrozenFeedForward)
