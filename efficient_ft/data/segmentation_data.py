"""Segmentation data sets that are ready for training, with joint transforms of images and masks."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.nn import functional as F
from torch.utils.data import Dataset
from torchvision import tv_tensors
from torchvision.transforms import v2
from torchvision.transforms.v2 import functional as VF

from efficient_ft.config.schema import DataConfig, MaskConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED, InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data.images import Decoding, read_image
from efficient_ft.data.inspect_masks import inspect_masks
from efficient_ft.data.inspection import Inspection, find_failures, spread
from efficient_ft.data.listing import splits_of
from efficient_ft.data.loader import LoadFailure, load_seeded
from efficient_ft.data.mask_survey import mask_orientation, refuse_unclear_masks
from efficient_ft.data.masks import Classes, MaskListing, MaskSamples, class_colors, hold_out, read_mask
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.reading import Header, Reading, headers, largest_file

STRIDE = 32  # largest stride of an encoder; evaluated images are padded to multiples of this number
#: Memory in bytes per pixel, measured with 4-megapixel files. Reading a mask requires `_READ`, in addition to the
#: memory for decoding the image. Resizing the image and the mask in training requires `_ZOOMED` per resized pixel.
_READ, _ZOOMED = 22, 6
OPACITY = 0.5  # opacity of class colors over an image


class MaskTransform:
    """Joint transform of an image and its mask, for `training` or for evaluation.

    In training, the image and the mask are resized by a random factor and randomly cropped to the input size. Images
    and masks that are smaller than the input size are padded, and the padding has no label. If `masks.flip` is True,
    half of the images are mirrored. In evaluation, the entire image is used, and resized if `masks.resize` is set.
    """

    def __init__(self, input: InputSpec, masks: MaskConfig, training: bool) -> None:
        self.input, self._training, self._zoom = input, training, masks.zoom
        self._mean = torch.tensor(input.mean).view(-1, 1, 1)
        self._std = torch.tensor(input.std).view(-1, 1, 1)
        self._resize = None if masks.resize is None else [-(-side // STRIDE) * STRIDE for side in masks.resize]
        fill: Any = {tv_tensors.Image: [round(255 * m) for m in input.mean], tv_tensors.Mask: IGNORED}
        steps = [v2.RandomCrop(list(input.size), pad_if_needed=True, fill=fill)]
        self._part = v2.Compose([*steps, v2.RandomHorizontalFlip()] if masks.flip else steps)

    def __call__(self, image: Image.Image, mask: np.ndarray) -> tuple[Tensor, Tensor]:
        """Return the transformed image, uint8 (3, H, W), and the transformed mask, uint8 (H, W)."""
        pixels = tv_tensors.Image(VF.pil_to_tensor(image))
        target = tv_tensors.Mask(torch.from_numpy(mask.copy())[None])
        if not self._training:
            return (pixels if self._resize is None else VF.resize(pixels, self._resize, antialias=True)), target[0]
        low, high = self._zoom
        factor = low + (high - low) * float(torch.rand(()))
        size = [max(round(side * factor), 1) for side in mask.shape]
        # Masks are resized by nearest-neighbor interpolation, and padded with the ignore index.
        pixels, target = self._part(VF.resize(pixels, size, antialias=True), VF.resize(target, size))
        return pixels, target[0]

    def batch(self, pairs: Sequence[tuple[Tensor, Tensor]]) -> tuple[Tensor, Tensor]:
        """Return padded batches of normalized images, float32 (B, 3, H, W), and of masks, int64 (B, H, W)."""
        sizes = [pixels.shape[-2:] for pixels, _ in pairs]
        stride = 1 if self._training else STRIDE
        height, width = (-(-max(size[k] for size in sizes) // stride) * stride for k in (0, 1))
        # If images are resized in evaluation, masks keep their original size.
        largest = (max(target.shape[k] for _, target in pairs) for k in (0, 1))
        tall, wide = largest if self._resize is not None and not self._training else (height, width)
        floats = [pixels.as_subclass(Tensor).float().div_(255).sub_(self._mean).div_(self._std) for pixels, _ in pairs]
        images = torch.stack([_padded(one, height, width, 0.0) for one in floats])
        targets = torch.stack([_padded(target.as_subclass(Tensor), tall, wide, IGNORED) for _, target in pairs])
        return images, targets.long()


def _padded(x: Tensor, height: int, width: int, value: float) -> Tensor:
    return F.pad(x, (0, width - x.shape[-1], 0, height - x.shape[-2]), value=value)


@dataclass(eq=False)
class MaskDataset(Dataset[tuple[Tensor, Tensor]]):
    """A dataset of the images and masks of a split, indexed by (epoch, index).

    Augmentation depends only on (seed, epoch, index).
    """

    samples: MaskSamples
    classes: Classes
    transform: MaskTransform
    seed: int  # seed of the run
    exif: str  # value of the setting ``data.masks.exif``
    labeled: bool  # if True, masks without labeled pixels are rejected, because they do not contribute to training
    decoding: Decoding | None = None

    def __len__(self) -> int:
        return len(self.samples)

    def read(self, index: int) -> tuple[Image.Image, np.ndarray]:
        """Read an image and its mask. Raise `UserError` if one of the files cannot be used."""
        path, mask = self.samples.images[index], self.samples.masks[index]
        image = read_image(path, decoding=self.decoding)
        orientation = mask_orientation(path, mask, self.exif)
        return image, read_mask(mask, self.classes, image.size, orientation, self.labeled)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | LoadFailure:
        """Load images (float32, shape (B, 3, H, W)) and masks (int64, shape (B, H, W)), or return a `LoadFailure`."""
        try:
            pairs = load_seeded(self.seed, keys, lambda index: self.transform(*self.read(index)))
        except UserError as error:
            return LoadFailure(str(error))
        return self.transform.batch(pairs)


class EvaluationSizes(NamedTuple):
    """The most frequent size of evaluated images, as sizes of a batch of such images.

    Attributes:
        image: size (H, W) of the images.
        mask: size (H, W) of the masks.
        unique: True if all inspected images have this size.
    """

    image: tuple[int, int]
    mask: tuple[int, int]
    unique: bool


class SegmentationData(OpenedData[MaskSamples, MaskDataset]):
    """A segmentation data set that is ready for training and evaluation.

    Args:
        listing: listing of the images and masks in each split.
        config: the `data` section of the configuration.
        input: size of training crops, and normalization of the network.
        seed: seed of the run, which determines the validation split, the order and the augmentation.

    Attributes:
        classes: classes with their ids in the masks.
        masks: mask settings (``data.masks``).

    Raises:
        SettingError: If a setting is incompatible with the data set.
        UserError: If the data set cannot be split, or too few readable images remain.
    """

    task, noun = "segmentation", "image"
    decoding: Decoding

    def __init__(self, listing: MaskListing, config: DataConfig, input: InputSpec, seed: int) -> None:
        assert config.masks is not None
        super().__init__(config, seed, listing.class_names, listing)
        self.classes, self.masks = listing.classes, config.masks
        self.decoding = Decoding(config.value_range, config.max_pixels)
        if Image.MAX_IMAGE_PIXELS is not None:  # the limit also applies to masks, which are as large as images
            Image.MAX_IMAGE_PIXELS = max(Image.MAX_IMAGE_PIXELS, config.max_pixels)
        self._transforms = {training: MaskTransform(input, config.masks, training) for training in (True, False)}
        self._parts = self._choose_splits(splits_of(listing), hold_out)
        refuse_unclear_masks(self._parts, self.classes, config.masks, own=config.name == "mask_folder")
        if config.on_corrupt == "skip":
            self._parts = {name: self._readable(name, part) for name, part in self._parts.items()}
            self._note_skipped("unusable")

    def inspect(self, *, thorough: bool = False) -> Inspection:
        return inspect_masks(self._parts, self.classes, self.masks, self.decoding, thorough=thorough)

    def reading(self, *, training: bool) -> Reading:
        found: list[Header] = []
        for split in ("train",) if training else ("val", "test"):
            if split in self._parts:
                found += headers(self._parts[split].images, self.decoding)
        pixels = max((one.pixels for one in found), default=0)
        decode = max((one.decode_bytes for one in found), default=0) + _READ * pixels
        largest = largest_file(found)
        if training:
            size = self._transforms[True].input.image_size
            zoomed = round(_ZOOMED * self.masks.zoom[1] ** 2 * pixels)
            return Reading(size, decode + zoomed, 4 * math.prod(size), 16 * math.prod(size), largest)
        if self.masks.resize is not None:
            sides: Sequence[int] = self.masks.resize
            pixels = max(math.prod(sides), 1)
        else:
            sides = [max((one.size[k] for one in found), default=STRIDE) for k in (1, 0)]
        height, width = (-(-side // STRIDE) * STRIDE for side in sides)
        return Reading((height, width), decode, 4 * pixels, 12 * height * width, largest, own_size=True)

    def evaluation_sizes(self) -> EvaluationSizes | None:
        """Return the most frequent size of evaluated images, or None if images are evaluated in windows."""
        sizes = Counter(one.size for one in headers(self._parts[self.best_split].images, self.decoding))
        if self.masks.evaluation == "windows" or not sizes:
            return None
        (width, height), _ = sizes.most_common(1)[0]
        sides = (height, width) if self.masks.resize is None else self.masks.resize
        padded = (-(-sides[0] // STRIDE) * STRIDE, -(-sides[1] // STRIDE) * STRIDE)
        return EvaluationSizes(padded, padded if self.masks.resize is None else (height, width), len(sizes) == 1)

    def labeled(self, inputs: Any, targets: Tensor, input: InputSpec) -> list[tuple[Image.Image | str, str]]:
        """Return each image with an overlay of its class colors, and the names of its three largest classes."""
        names, colors = [plain_line(name) for name in self.class_names], class_colors(self.num_classes)
        found: list[tuple[Image.Image | str, str]] = []
        for picture, target in zip(self.shown(inputs, input), targets, strict=True):
            mask = target.numpy()
            shares = np.bincount(mask[mask != IGNORED], minlength=len(names))
            largest = [names[k] for k in np.argsort(-shares, kind="stable")[:3] if shares[k]]
            found.append((overlaid(picture, mask, colors), ", ".join(largest) or "no label"))
        return found

    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        colors = class_colors(self.num_classes).tolist()
        return [(plain_line(name), (r, g, b)) for name, (r, g, b) in zip(self.class_names, colors, strict=True)]

    def _dataset(self, split: str, *, training: bool) -> MaskDataset:
        return self._samples(self._parts[split], training, split == "train")

    def _samples(self, part: MaskSamples, training: bool, labeled: bool) -> MaskDataset:
        transform, exif = self._transforms[training], self.masks.exif
        return MaskDataset(part, self.classes, transform, self._seed, exif, labeled, self.decoding)

    def _readable(self, name: str, part: MaskSamples) -> MaskSamples:
        images = self._samples(part, False, name == "train")
        failures = find_failures(images.read, range(len(part)), f"reading {name}")
        self._skipped.update({part.images[i]: why for i, why in failures.items()})
        left = [i for i in range(len(part)) if i not in failures]
        if not left:
            text = f"The {name} split contains no usable image (data.on_corrupt=skip)."
            raise UserError(f"{text} Replace the files of this split.")
        return part.take(left)

    def examples(self, count: int) -> list[tuple[Image.Image, np.ndarray]]:
        """Return at most `count` evenly spread images and masks of the test split, or else of the validation split."""
        split = "test" if "test" in self._parts else self.best_split
        images = self._dataset(split, training=False)
        return [images.read(i) for i in spread(len(self._parts[split]), count).tolist()]


def overlaid(picture: Image.Image, mask: np.ndarray, colors: np.ndarray) -> Image.Image:
    """Blend an RGB picture with the colors of the classes in its mask.

    `mask` is uint8 (H, W), and `colors` is uint8 (classes, 3). Pixels with the value `IGNORED` are not changed.
    """
    labeled = mask != IGNORED
    mixed = Image.blend(picture, Image.fromarray(colors[np.where(labeled, mask, 0)]), OPACITY)
    return Image.composite(mixed, picture, Image.fromarray(labeled.astype(np.uint8) * 255))
