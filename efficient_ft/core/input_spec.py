"""Input specification of a network, and the target value of pixels without a label."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from efficient_ft.core.errors import UserError

if TYPE_CHECKING:
    from efficient_ft.core.tokenizer import Tokenizer

#: Value of pixels without a label in segmentation targets.
IGNORED = 255


@dataclass(frozen=True)
class InputSpec:
    """Input specification of a network: size and normalization of images, or length and tokenizer of texts.

    Args:
        size: (height, width) in pixels, or (tokens,) with the maximum number of tokens in a text.
        mean: mean of each channel (red, green, blue, or gray) for pixel values in [0, 1]. Empty for texts.
        std: standard deviation of each channel for pixel values in [0, 1]. Empty for texts.
        interpolation: mode for resizing, as a name in torchvision's `InterpolationMode`, for example ``bicubic``.
        tokenizer: tokenizer for texts. If None, the tokenizer of the model is used.
    """

    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    tokenizer: Tokenizer | None = None

    @property
    def image_size(self) -> tuple[int, int]:
        """Size of the images in pixels, (height, width).

        Raises:
            UserError: If the input of the network is text.
        """
        if len(self.size) == 1:
            raise UserError("This function requires an image network, but the network takes texts.")
        height, width = self.size
        return height, width

    def __str__(self) -> str:
        return "×".join(map(str, self.size)) + (" tokens" if len(self.size) == 1 else "")
