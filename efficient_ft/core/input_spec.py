"""Facts that models and data share: size and normalization of a network's images, and the label of unlabeled pixels."""

from __future__ import annotations

from dataclasses import dataclass

#: The label of pixels that have none, in the targets of a segmentation.
IGNORED = 255


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
