"""A minimal image classifier, and timm arguments for small networks."""

from __future__ import annotations

from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

SMALL_VIT = {"img_size": 64, "depth": 3}
SMALL_SWIN = {"img_size": 64, "depths": (2, 1), "num_heads": (3, 6)}


class Flat(nn.Module):
    """Apply `layers` to the flattened pixels of images of shape (B, C, H, W)."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))


class Checkpointed(Flat):
    """A `Flat` that recomputes its layers in the backward pass."""

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(super().forward, x, use_reentrant=False)
