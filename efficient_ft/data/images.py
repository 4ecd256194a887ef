"""From an image file to the tensor a network takes: reading, resizing, augmenting, normalising.

Everything up to the normalisation works on PIL images, whatever the data set, so that training, evaluation
and prediction resample in one and the same way.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from PIL import Image, ImageOps
from torch import Tensor
from torchvision.transforms import InterpolationMode, v2

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec

EXTENSIONS = (
    ".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp",
)  # fmt: skip
AUGMENT = ("resize_crop", "none")


class Transform:
    """The way from a PIL image to a normalised tensor, as the recipe of LBP-WHT trains and tests.

    Evaluation is Resize(size) → normalise; training with `resize_crop` is Resize(size), or as `resize` says →
    RandomResizedCrop(size) → horizontal flip → normalise. Random draws come from torch's CPU generator:
    the caller seeds it.

    Args:
        input: what the network takes.
        augment: `resize_crop` or `none`.
        scale: smallest and largest area of the crop, as fractions of the image.
        flip: whether half of the images are mirrored left to right.
        resize: to what an image is brought before the crop: `input` (the network's size), so many pixels square, or
            `none` (as it is); only with `resize_crop`.

    Attributes:
        resized: height and width before the crop; None: the image's own.
    """

    def __init__(
        self,
        input: InputSpec,
        augment: str = "none",
        scale: Sequence[float] = (0.08, 1.0),
        flip: bool = True,
        resize: int | str = "input",
    ) -> None:
        if augment not in AUGMENT:
            raise SettingError("data.augment.name", augment, AUGMENT)
        low, high = scale
        if not 0 < low <= high <= 1:
            raise SettingError("data.augment.scale", list(scale), "two fractions of the area, 0 < low <= high <= 1")
        channels = len(input.mean)
        for name, values in (("mean", input.mean), ("std", input.std)):
            if len(values) not in (1, 3) or len(values) != channels:
                raise SettingError(f"model.{name}", list(values), "three values (red, green, blue) or one (grey)")
        try:
            mode = InterpolationMode(input.interpolation)
        except ValueError:
            known = [m.value for m in InterpolationMode]
            raise SettingError("interpolation", input.interpolation, known) from None
        size = list(input.size)
        self.input = input
        self._grey = channels == 1
        self.resized = input.size if resize == "input" else None if resize == "none" else (int(resize), int(resize))
        self._resize = None if self.resized is None else v2.Resize(list(self.resized), interpolation=mode)
        steps: list[torch.nn.Module] = []
        if augment == "resize_crop":
            steps.append(v2.RandomResizedCrop(size, scale=(low, high), interpolation=mode))
            if flip:
                steps.append(v2.RandomHorizontalFlip())
        self._augment = v2.Compose(steps) if steps else None
        self._mean = torch.tensor(input.mean, dtype=torch.float32).view(channels, 1, 1)
        self._std = torch.tensor(input.std, dtype=torch.float32).view(channels, 1, 1)

    def resize(self, image: Image.Image) -> Image.Image:
        """The part without chance, which may be done once and kept."""
        image = image.convert("L") if self._grey else image
        return image if self._resize is None else self._resize(image)

    def augment(self, image: Image.Image) -> Image.Image:
        """The part with chance, on a resized image."""
        return image if self._augment is None else self._augment(image)

    def normalise(self, images: Sequence[Image.Image]) -> Tensor:
        """B images of the network's size → float32 (B, C, H, W), normalised; C is 3, or 1 for grey."""
        pixels = torch.from_numpy(np.stack([np.asarray(image) for image in images]))
        if self._grey:
            pixels = pixels.unsqueeze(-1)
        floats = pixels.permute(0, 3, 1, 2).to(torch.float32, memory_format=torch.contiguous_format)
        return floats.div_(255).sub_(self._mean).div_(self._std)

    def __call__(self, image: Image.Image | str | os.PathLike[str]) -> Tensor:
        """One RGB image, or the path of one → float32 (C, H, W), normalised."""
        if not isinstance(image, Image.Image):
            image = read_image(image, least=self.resized)
        return self.normalise([self.augment(self.resize(image))])[0]


def read_image(path: str | os.PathLike[str], least: tuple[int, int] | None = None) -> Image.Image:
    """The image at `path` as RGB, upright.

    EXIF orientation is applied; transparency is laid over white, as a viewer shows it; 16-bit greys are
    scaled to 8 bits instead of being cut off; of an animation the first frame is taken.

    Args:
        path: the file.
        least: (height, width) that the image will be resized to. A JPEG of at least four times that is
            decoded at a half, a quarter or an eighth of its size, but never below twice `least`.

    Raises:
        UserError: the file is missing, unreadable, truncated or no image; the message begins with the path.
    """
    try:
        with Image.open(path) as image:
            if least is not None:
                side = 2 * max(least)
                image.draft(None, (side, side))  # only JPEG knows it; the others ignore it
            image.load()
            _turn_upright(image)
            return _rgb(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise nearly anything on damaged files
        reason = str(error).replace(repr(os.fspath(path)), "it") or type(error).__name__
        raise UserError(f"{shown(path)}: not readable as an image ({reason}).") from error


def _turn_upright(image: Image.Image) -> None:
    # a broken EXIF block does not make the picture unreadable
    with contextlib.suppress(Exception):
        ImageOps.exif_transpose(image, in_place=True)


def _rgb(image: Image.Image) -> Image.Image:
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I"):  # 16 bits per pixel; Pillow's own conversion cuts everything above 255 off
        values = np.asarray(image).astype(np.int64)
        if values.min() < 0 or values.max() > 65535:
            raise ValueError("32-bit values; save it with 8 or 16 bits")
        return Image.fromarray((values / 257).round().astype(np.uint8)).convert("RGB")
    if image.mode == "F":
        raise ValueError("floating-point pixels have no fixed range; save it with 8 or 16 bits")
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def shown(path: str | os.PathLike[str]) -> str:
    """A path that can be printed: bytes that are no text (old archives) become a replacement character."""
    return os.fspath(path).encode("utf-8", "surrogateescape").decode("utf-8", "replace")


def class_name(folder: str) -> str:
    """A folder's name as a class name: one spelling of accents, whichever system packed the folder."""
    return unicodedata.normalize("NFC", shown(folder))


def is_image(path: str | os.PathLike[str]) -> bool:
    """By extension."""
    return Path(path).suffix.lower() in EXTENSIONS
