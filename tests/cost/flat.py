"""The smallest classifier of images."""

from __future__ import annotations

from torch import Tensor, nn


class Flat(nn.Module):
    """Images (B, C, H, W) → the layers on their flattened pixels."""

    def __init__(self, *layers: nn.Module):
        super().__init__()
        self.layers = nn.Sequential(*layers)

    def forward(self, x: Tensor) -> Tensor:
        return self.layers(x.flatten(1))
