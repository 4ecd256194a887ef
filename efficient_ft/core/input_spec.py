"""Facts that models and data share: what a network takes, and the label of unlabeled pixels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from efficient_ft.core.errors import UserError

if TYPE_CHECKING:
    from efficient_ft.core.tokenizer import Tokenizer

#: The label of pixels that have none, in the targets of a segmentation.
IGNORED = 255


@dataclass(frozen=True)
class InputSpec:
    """The input of a network: size and normalization of images, or the length of texts and their tokenizer.

    Args:
        size: height and width in pixels; or of texts the largest number of tokens, alone.
        mean: per channel (red, green, blue; or one of gray), of values in [0, 1]; of texts empty.
        std: per channel, of values in [0, 1].
        interpolation: a name of torchvision's `InterpolationMode`, e.g. ``bicubic``.
        tokenizer: of texts; None: that of the model.
    """

    size: tuple[int, ...]
    mean: tuple[float, ...]
    std: tuple[float, ...]
    interpolation: str = "bicubic"
    tokenizer: Tokenizer | None = None

    @property
    def image_size(self) -> tuple[int, int]:
        """(height, width) of images.

        Raises:
            UserError: the network takes texts.
        """
        if len(self.size) == 1:
            raise UserError("This serves networks that take images, not texts.")
        height, width = self.size
        return height, width

    def __str__(self) -> str:
        return "×".join(map(str, self.size)) + (" tokens" if len(self.size) == 1 else "")
