"""Frozen feed-forward networks run on a part of the batch at a time.

A block's feed-forward network widens its input fourfold, and its activation function makes a second tensor of that
size. Below the lowest parameter that trains nothing of this is kept, yet for a moment it is the most memory that a
step takes which trains little. In parts that stay in the processor's cache it takes less, and no more time.
"""

from __future__ import annotations

from typing import Any

import torch
from timm.layers import mlp
from timm.models.efficientformer import ConvMlpWithNorm
from torch import Tensor, nn

from efficient_ft.methods.forwards import OwnForward, put_around, take_away
from efficient_ft.models.frozen_batch_norm import FROZEN

#: Bytes of the widest tensor that a part may make.
_PART_BYTES = 5 * 2**20

#: Classes of timm whose forward pass treats the images of a batch independently.
_KINDS = (mlp.Mlp, mlp.GluMlp, mlp.SwiGLU, mlp.ConvMlp, mlp.GlobalResponseNormMlp, ConvMlpWithNorm)


class FrozenFeedForward(OwnForward):
    """The forward pass of a feed-forward network, on parts of the batch where no gradient passes through it."""

    same_values = True

    def __call__(self, x: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        parts = self._parts(x)
        if parts == 1:
            return self.within(x, *args, **kwargs)
        return torch.cat([self.within(part, *args, **kwargs) for part in x.chunk(parts)])

    def _parts(self, x: Tensor) -> int:
        """The number of parts; 1: the whole batch at once, as without this class."""
        if x.device.type != "cpu" or torch.compiler.is_compiling() or len(x) < 2:
            return 1
        if torch.is_grad_enabled() and (x.requires_grad or any(p.requires_grad for p in self.module.parameters())):
            return 1
        if any(_mixes(module) for module in self.module.modules()):
            return 1
        layers = [m for m in self.module.modules() if isinstance(m, nn.Linear | nn.Conv2d)]
        if not layers:  # replaced by others
            return 1
        channels = x.shape[1 if isinstance(layers[0], nn.Conv2d) else -1]
        widest = x.numel() // channels * max(len(layer.weight) for layer in layers) * x.element_size()
        return min(len(x), -(-widest // _PART_BYTES))


def _mixes(module: nn.Module) -> bool:
    """True if the module ties images of a batch together, or draws random numbers for them."""
    if not module.training:
        return False
    if isinstance(module, nn.modules.batchnorm._BatchNorm):
        return type(module) not in FROZEN.values()
    return getattr(module, "p", 0) > 0


def run_in_parts(model: nn.Module) -> None:
    """Let the feed-forward networks of `model` run on parts of the batch while they are frozen."""
    for module in model.modules():
        if type(module) in _KINDS:
            put_around(module, FrozenFeedForward(module))


def run_whole(model: nn.Module) -> None:
    """Undo `run_in_parts`."""
    for module in model.modules():
        take_away(module, FrozenFeedForward)
