"""What a network takes as input: shared by models, which know it, and data, which provides it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """What a network takes.

    Args:
        size: height and width in pixels.
        mean: per channel (red, green, blue; or one grey), of values in 0–1.
        std: per channel, of values in 0–1.
        interpolation: a name of torchvision's `InterpolationMode`, e.g. `bicubic`.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
