"""The input of a network: size and normalization of its images. Known by models, provided by data."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class InputSpec:
    """Size and normalization of the images that a network takes.

    Args:
        size: height and width in pixels.
        mean: per channel (red, green, blue; or one of gray), of values in [0, 1].
        std: per channel, of values in [0, 1].
        interpolation: a name of torchvision's `InterpolationMode`, e.g. ``bicubic``.
    """

    size: tuple[int, int]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
