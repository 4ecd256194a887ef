"""The smallest classifier of images, and arguments of timm that make a network small."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SMALL_VIT = {"img_size": 64, "depth": 3}
SMALL_SWIN = {"img_size": 64, "depths": (2, 1), "num_heads": (3, 6)}


class Flat(nn.Module):
    """Images (B, C, H, W) → the layers on their flattened pixels."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class Checkpointed(Flat):
    """Computes its layers again in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)
