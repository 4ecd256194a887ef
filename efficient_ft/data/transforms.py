"""Resize, augment and normalize images to obtain network inputs.

All steps before normalization process PIL images, so training, evaluation and prediction resample in the same way.
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

#: Supported augmentations.
AUGMENT = ("resize_crop", "none")
_BANDS = (
    "Image files are read as RGB or gray images. model.kwargs.in_chans > 3 is supported only if you pass your own"
    " tensors to the library. Save three bands of each image as RGB."
)


class Transform:
    """Transform a PIL image into a normalized tensor, as in the LBP-WHT recipe.

    The evaluation steps are Resize(size) and normalization. With ``resize_crop``, the training transforms are
    Resize(`resize`), RandomResizedCrop(size), flips and normalization. Random numbers are drawn from torch's CPU
    generator, which the caller seeds.

    Args:
        input: input size, normalization and interpolation of the network.
        augment: ``resize_crop`` or ``none``.
        scale: minimum and maximum area of the crop, as fractions of the image area.
        flip: if True, mirror half of the images horizontally.
        resize: size before the crop: ``input`` for the input size of the network, a number of pixels for a square, or
            ``none`` for the original size (only with ``resize_crop``).
        vertical_flip: if True, mirror half of the images vertically.
        pick: number of augmentations (of the crop and the enabled flips) to apply to each image, or None to apply all.
        decoding: options for decoding files, or None for the defaults.

    Attributes:
        resize_size: (height, width) before the crop, or None for the original size.

    Raises:
        SettingError: If the augmentation or interpolation is unknown, the scale is outside of (0, 1], or the number of
            mean or std values does not match the channels.
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
                known = "three values (red, green, blue) or one (gray)"
                raise SettingError(f"model.{name}", list(values), known, _BANDS)
        try:
            mode = InterpolationMode(input.interpolation)
        except ValueError:
            modes = [m.value for m in InterpolationMode]
            raise SettingError("InputSpec.interpolation", input.interpolation, modes) from None
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
            known = f"null, or between 1 and {len(steps)} (the number of enabled augmentations)"
            raise SettingError("data.augment.pick", pick, known)
        self._augment = v2.Compose(steps) if steps else None
        if pick is not None and pick < len(steps):
            self._augment = _Pick(steps, pick, None if self.resize_size == input.image_size else v2.Resize(size, mode))
        self._mean = torch.tensor(input.mean, dtype=torch.float32).view(channels, 1, 1)
        self._std = torch.tensor(input.std, dtype=torch.float32).view(channels, 1, 1)

    @property
    def resized_shape(self) -> tuple[int, ...] | None:
        """Shape of a resized image: (H, W, 3), (H, W) for gray images, or None if images are not resized."""
        if self.resize_size is None:
            return None
        return self.resize_size if self._gray else (*self.resize_size, 3)

    def read(self, path: str | os.PathLike[str]) -> Image.Image:
        """Read an image as RGB, with at least the size that `resize` requires. Raise `UserError` if reading fails."""
        return read_image(path, self.resize_size, self.decoding)

    def resize(self, image: Image.Image) -> Image.Image:
        """Resize an image. The result is deterministic and may be cached."""
        image = image.convert("L") if self._gray else image
        return image if self._resize is None else self._resize(image)

    def extend(self, steps: Sequence[torch.nn.Module]) -> None:
        """Apply further random transforms of PIL images after the augmentations."""
        if steps:
            self._augment = v2.Compose([*([] if self._augment is None else [self._augment]), *steps])

    def augment(self, image: Image.Image) -> Image.Image:
        """Apply random augmentations to a resized image."""
        return image if self._augment is None else self._augment(image)

    def normalize(self, images: Sequence[Image.Image]) -> Tensor:
        """Stack and normalize B images of the input size as float32 (B, C, H, W).

        C is 1 for gray images and 3 for color images.
        """
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        if self._gray:
            pixels = pixels.unsqueeze(-1)
        floats = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(self._mean).div_(self._std)

    def __call__(self, image: Image.Image | str | os.PathLike[str]) -> Tensor:
        """Convert an RGB image, or an image file, to a float32 tensor of shape (C, H, W).

        Raise `UserError` if reading fails.
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
    """Apply a random subset of augmentations. The first augmentation must be the crop.

    If the subset does not contain the crop, `resize` is applied first, unless `resize` is None.
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
