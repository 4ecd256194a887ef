"""Segmentation data: images with masks, the classes of their pixels, splits. Only masks are decoded here.

A mask is an image file whose pixel values are class ids (8 or 16 bits, or palette indices), or class colors.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Literal

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted
from efficient_ft.data.mask_pixels import Pixels, read_pixels

#: Table entry of a value without a class.
UNKNOWN = 254
Color = tuple[int, int, int]


@dataclass(frozen=True)
class Classes:
    """The classes of a data set and their pixel values in its masks.

    Attributes:
        names: class names by index, in the network's order.
        ids: pixel values of the same classes, also used to write predictions.
        ignored: values of pixels without a label; includes 255 unless 255 is a class.
        further: (value, class index) of additional values.
        colors: class colors in color masks; empty if masks contain only ids.
        ignored_colors: colors of pixels without a label.
        palette: read masks with a palette by index or by color; auto: by color if the classes have colors.
        chosen: True if the user has chosen how to read the values; no other reading is considered.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    ignored: frozenset[int] = frozenset({IGNORED})
    further: tuple[tuple[int, int], ...] = ()
    colors: tuple[Color, ...] = ()
    ignored_colors: frozenset[Color] = frozenset()
    palette: Literal["auto", "index", "color"] = "auto"
    chosen: bool = False

    @cached_property
    def table(self) -> np.ndarray:
        """uint8 (65537,): the class index of each value, `IGNORED` or `UNKNOWN`; the last entry is unknown."""
        table = np.full((1 << 16) + 1, UNKNOWN, dtype=np.uint8)
        table[sorted(self.ignored)] = IGNORED
        table[list(self.ids)] = np.arange(len(self.ids))
        for value, index in self.further:
            table[value] = index
        return table

    @cached_property
    def color_table(self) -> np.ndarray:
        """uint8 (2**24,): like `table`, indexed by color: red · 65536 + green · 256 + blue."""
        table = np.full(1 << 24, UNKNOWN, dtype=np.uint8)
        for color in self.ignored_colors:
            table[_packed(color)] = IGNORED
        table[[_packed(color) for color in self.colors]] = np.arange(len(self.colors))
        return table

    @cached_property
    def gray(self) -> bool:
        """True if all colors are gray: masks with one channel are then read by color."""
        return bool(self.colors) and all(len(set(color)) == 1 for color in (*self.colors, *self.ignored_colors))

    def values(self, pixels: Pixels) -> tuple[np.ndarray, bool]:
        """Return the pixel values that decide the classes, int64 (H, W), and whether they are colors.

        Raises:
            ValueError: the mask has colors, but the classes have none.
        """
        by_color = bool(self.colors) and pixels.colors is not None
        if by_color and pixels.colors is not None and not (pixels.mode == "P" and self.palette == "index"):
            return pixels.colors, True
        ids = pixels.ids
        if pixels.mode == "1" and (self.gray or (self.table[1] == UNKNOWN and IGNORED in self.ids)):
            ids = ids * 255  # white
        if self.gray and pixels.colors is None and ids.max(initial=0) < 256:
            return ids * 0x010101, True
        if pixels.mode in ("RGB", "RGBA") and (ids < 0).any():
            raise ValueError("colors")
        return ids, False

    def indices(self, values: np.ndarray, by_color: bool) -> np.ndarray:
        """Return the index of the class of each value: uint8 (H, W) with `IGNORED` and `UNKNOWN`."""
        if by_color:
            return self.color_table[values]
        outside = (values < 0) | (values >= 1 << 16)
        return self.table[np.where(outside, 1 << 16, values) if outside.any() else values]


def _packed(color: Color) -> int:
    return color[0] << 16 | color[1] << 8 | color[2]


@dataclass(frozen=True)
class MaskSamples:
    """Images and their masks, as paths in the same order."""

    images: list[str]
    masks: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Sequence[int]) -> MaskSamples:
        """Return the samples at `indices`, in that order."""
        return MaskSamples([self.images[i] for i in indices], [self.masks[i] for i in indices])

    def content_digest(self) -> str:
        """16 hex digits that tell any change apart: each file's path, size and date."""
        found = hashlib.blake2b(digest_size=8)
        for path in (*self.images, *self.masks):
            status = os.stat(path)
            found.update(
                f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}\n".encode(errors="surrogateescape")
            )
        return found.hexdigest()


@dataclass
class MaskListing:
    """A segmentation data set with the splits of its publisher or of the user's folders; see `listing.Listing`."""

    classes: Classes
    train: MaskSamples
    val: MaskSamples | None = None
    test: MaskSamples | None = None
    notes: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """8 hex digits that tell two copies apart: of the classes, and names and sizes of up to 256 files a split."""
        classes = self.classes
        about: tuple[object, ...] = (classes.names, classes.ids)
        if classes.further or classes.colors:
            about = (*about, classes.further, classes.colors, sorted(classes.ignored_colors))
        found = hashlib.blake2b(repr(about).encode(), digest_size=4)
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if part is None or not len(part):
                continue
            found.update(f"{name} {len(part)}".encode())
            for i in np.linspace(0, len(part) - 1, min(len(part), 256)).round().astype(int):
                for path in (part.images[i], part.masks[i]):
                    found.update(f"{os.path.basename(path)} {os.path.getsize(path)}".encode(errors="surrogateescape"))
        return found.hexdigest()


def hold_out(samples: MaskSamples, fraction: float, seed: int) -> tuple[MaskSamples, MaskSamples]:
    """Hold out a fraction of the images, at least one. Returns (kept, held out), each in the order of `samples`."""
    count = min(max(round(len(samples) * fraction), 1), len(samples) - 1)
    chosen = set(np.random.default_rng([seed, len(samples)]).permutation(len(samples))[:count].tolist())
    kept = [i for i in range(len(samples)) if i not in chosen]
    return samples.take(kept), samples.take(sorted(chosen))


def read_mask(
    path: str,
    classes: Classes,
    size: tuple[int, int] | None = None,
    orientation: int = 1,
    labeled: bool = True,
) -> np.ndarray:
    """Read a mask as indices of classes.

    Args:
        path: the file.
        classes: of the data set.
        size: (width, height) of its image; None: not compared.
        orientation: EXIF orientation to apply to the mask; 1 for none.
        labeled: reject a mask without labeled pixels.

    Returns:
        uint8 (H, W): indices of classes, `IGNORED` where there is no label.

    Raises:
        UserError: the file cannot be read, or has colors instead of ids, a size different from its image, values
            without a class, or no labeled pixels.
    """
    pixels = read_pixels(path, orientation)
    height, width = pixels.ids.shape
    if size is not None and (width, height) != size:
        resized = " The mask looks resized: save it at the size of its image, with nearest-neighbor interpolation."
        cut = resized if _proportional((width, height), size) else ""
        raise UserError(
            f"{printable(path)}: the mask is {width}×{height}, but its image is {size[0]}×{size[1]}. They must have the"
            f" same size.{cut}"
        )
    try:
        values, by_color = classes.values(pixels)
    except ValueError:
        assert pixels.colors is not None
        raise UserError(
            f"{printable(path)}: the mask has colors (mode {pixels.mode}) instead of class ids:"
            f" {shown_values(pixels.colors, True)}. Add the class colors to classes.txt ('NAME RED GREEN BLUE' on each"
            " line), set data.masks.colors={NAME: [RED, GREEN, BLUE], …}, or save the mask with one class id per pixel."
        ) from None
    indices = classes.indices(values, by_color)
    unknown = indices == UNKNOWN
    if unknown.any():
        raise UserError(f"{printable(path)}: {_unknown(values[unknown], by_color, pixels.mode, classes)}")
    if labeled and (indices == IGNORED).all():
        raise UserError(f"{printable(path)}: no pixel has a label. Remove the image and its mask.")
    return indices


def _proportional(size: tuple[int, int], other: tuple[int, int]) -> bool:
    return abs(size[0] / other[0] - size[1] / other[1]) < 0.02 * size[0] / other[0]


def _unknown(values: np.ndarray, by_color: bool, mode: str, classes: Classes) -> str:
    """Describe values without a class, and the settings that map them."""
    if by_color:
        back = ", or set data.masks.palette=index to read palette indices" if mode == "P" else ""
        return (
            f"colors without a class: {shown_values(values, True)}. Add them to the class list or to"
            f" data.masks.colors, with the name void if they have no label{back}."
        )
    known = ", ".join(map(str, _ranges(sorted({*classes.ids, *(value for value, _ in classes.further)}))))
    smooth = " The file looks smoothed or converted from JPEG." if len(np.unique(values[:10_000])) > 16 else ""
    return (
        f"ids without a class: {shown_values(values, False)}. The classes have the ids {known}; pixels without a"
        f" label have {', '.join(map(str, _ranges(sorted(classes.ignored))))} (data.masks.ignored).{smooth}"
        " Correct the mask, or map each value to a class: data.masks.values={VALUE: NAME, …}."
    )


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Return numbers as text, in runs: ``0 to 3``, ``7``."""
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    texts = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else list(map(str, run)) for run in runs]
    return [text for run in texts for text in run]


def shown_values(values: np.ndarray, by_color: bool) -> str:
    """Return the five most frequent values with their numbers of pixels, as text."""
    numbers, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:5]
    names = [f"{n >> 16} {n >> 8 & 255} {n & 255}" if by_color else str(n) for n in map(int, numbers[order])]
    listed = ", ".join(f"{name} ({counted(count, 'pixel')})" for name, count in zip(names, counts[order], strict=True))
    return listed + (f" and {len(numbers) - 5} more" if len(numbers) > 5 else "")


def class_colors(count: int) -> np.ndarray:
    """uint8 (count, 3): colors of classes that differ well, the palette of Pascal VOC."""
    colors = np.zeros((count, 3), dtype=np.uint8)
    for number in range(count):
        value = number + 1
        for bit in range(8):
            for channel in range(3):
                colors[number, channel] |= ((value >> channel) & 1) << (7 - bit)
            value >>= 3
    return colors
