"""Transform images into a network's input tensor: resize, augment, normalize.

Everything before the normalization works on PIL images, for all data sets, so that training, evaluation and prediction
resample in the same way.
"""

from __future__ import annotations

import os
from collections.abc import Sequence

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from efficient_ft.core.errors import SettingError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data.images import Decoding, read_image

#: Augmentations of training images.
AUGMENT = ("resize_crop", "none")
_BANDS = (
    "Image files are read as RGB or gray; model.kwargs.in_chans > 3 works only with your own tensors, in the library."
    " Save three bands of each image as RGB."
)


class Transform:
    """Transform a PIL image into a normalized tensor, as in the recipe of LBP-WHT.

    Evaluation is Resize(size) → normalize; training with `resize_crop` is Resize(`resize`) → RandomResizedCrop(size) →
    flips → normalize. Random numbers come from torch's CPU generator; the caller seeds it.

    Args:
        input: the network's input size, normalization and interpolation.
        augment: ``resize_crop`` or ``none``.
        scale: smallest and largest area of the crop, as fractions of the image.
        flip: mirror half of the images left to right.
        resize: the size before the crop: ``input`` (the network's), a number of pixels (square), or ``none`` (the
            image's own, with `resize_crop` only).
        vertical_flip: turn half of the images upside down.
        pick: number of augmentations (the crop and the enabled flips) drawn for each image; None for all of them.
        decoding: options for decoding files; None for the default.

    Attributes:
        resize_size: (height, width) before the crop; None: the image's own.

    Raises:
        SettingError: an unknown augmentation or interpolation, a scale outside of (0, 1], or a mean or std without one
            value per channel.
    """

    def __init__(
        self,
        input: InputSpec,
        augment: str = "none",
        scale: Sequence[float] = (0.08, 1.0),
        flip: bool = True,
        resize: int | str = "input",
        vertical_flip: bool = False,
        pick: int | None = None,
        decoding: Decoding | None = None,
    ) -> None:
        if augment not in AUGMENT:
            raise SettingError("data.augment.name", augment, AUGMENT)
        low, high = scale
        if not 0 < low <= high <= 1:
            raise SettingError("data.augment.scale", list(scale), "[low, high] with 0 < low <= high <= 1")
        channels = len(input.mean)
        for name, values in (("mean", input.mean), ("std", input.std)):
            if len(values) not in (1, 3) or len(values) != channels:
                raise SettingError(
                    f"model.{name}", list(values), "three values (red, green, blue) or one (gray)", _BANDS
                )
        try:
            mode = InterpolationMode(input.interpolation)
        except ValueError:
            known = [m.value for m in InterpolationMode]
            raise SettingError("InputSpec.interpolation", input.interpolation, known) from None
        size = list(input.size)
        self.input, self.decoding = input, decoding or Decoding()
        self._gray = channels == 1
        self.resize_size = (
            input.image_size if resize == "input" else None if resize == "none" else (int(resize), int(resize))
        )
        self._resize = None if self.resize_size is None else v2.Resize(list(self.resize_size), interpolation=mode)
        steps: list[torch.nn.Module] = []
        if augment == "resize_crop":
            steps.append(v2.RandomResizedCrop(size, scale=(low, high), interpolation=mode))
            if flip:
                steps.append(v2.RandomHorizontalFlip())
            if vertical_flip:
                steps.append(v2.RandomVerticalFlip())
        if pick is not None and not 1 <= pick <= len(steps):
            raise SettingError("data.augment.pick", pick, f"null, or 1 to {len(steps)} (the crop and the flips)")
        self._augment = v2.Compose(steps) if steps else None
        if pick is not None and pick < len(steps):
            self._augment = _Pick(steps, pick, None if self.resize_size == input.image_size else v2.Resize(size, mode))
        self._mean = torch.tensor(input.mean, dtype=torch.float32).view(channels, 1, 1)
        self._std = torch.tensor(input.std, dtype=torch.float32).view(channels, 1, 1)

    @property
    def resized_shape(self) -> tuple[int, ...] | None:
        """Shape of a resized image, (H, W, 3), or (H, W) if it is gray; None: images keep their own size."""
        if self.resize_size is None:
            return None
        return self.resize_size if self._gray else (*self.resize_size, 3)

    def read(self, path: str | os.PathLike[str]) -> Image.Image:
        """Read a file as RGB, not smaller than `resize` needs.

        Raises:
            UserError: the file cannot be read as an image.
        """
        return read_image(path, self.resize_size, self.decoding)

    def resize(self, image: Image.Image) -> Image.Image:
        """Resize an image; deterministic, so the result may be cached."""
        image = image.convert("L") if self._gray else image
        return image if self._resize is None else self._resize(image)

    def augment(self, image: Image.Image) -> Image.Image:
        """Augment a resized image at random."""
        return image if self._augment is None else self._augment(image)

    def normalize(self, images: Sequence[Image.Image]) -> Tensor:
        """Stack B images of the network's size into float32 (B, C, H, W), normalized; C is 3, or 1 for gray."""
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        if self._gray:
            pixels = pixels.unsqueeze(-1)
        floats = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(self._mean).div_(self._std)

    def __call__(self, image: Image.Image | str | os.PathLike[str]) -> Tensor:
        """Transform one RGB image, or the file at a path, into float32 (C, H, W).

        Raises:
            UserError: the file cannot be read as an image.
        """
        if not isinstance(image, Image.Image):
            image = self.read(image)
        return self.normalize([self.augment(self.resize(image))])[0]


def to_pictures(pixels: Tensor, input: InputSpec) -> list[Image.Image]:
    """Convert normalized images (B, C, H, W) back to PIL images."""
    mean, std = (torch.tensor(values).view(-1, 1, 1) for values in (input.mean, input.std))
    plain = (pixels * std + mean).clamp(0, 1).mul(255).round().to(torch.uint8)
    return [Image.fromarray(one.permute(1, 2, 0).squeeze(-1).numpy()).convert("RGB") for one in plain]


class _Pick(torch.nn.Module):
    """Apply a random subset of augmentations to each image, in order.

    Args:
        steps: the augmentations; the crop is the first.
        count: number of augmentations drawn.
        resize: resizes an image without the crop to the input size; None if it already has this size.
    """

    def __init__(self, steps: Sequence[torch.nn.Module], count: int, resize: torch.nn.Module | None) -> None:
        super().__init__()
        self.steps, self.count, self.resize = torch.nn.ModuleList(steps), count, resize

    def forward(self, image: Image.Image) -> Image.Image:
        chosen = sorted(torch.randperm(len(self.steps))[: self.count].tolist())
        if chosen[0] != 0 and self.resize is not None:
            image = self.resize(image)
        for index in chosen:
            image = self.steps[index](image)
        return image
