"""Lists of images with masks, and functions that read masks as class indices.

A mask is an image file whose pixel values are class ids (8 or 16 bits, or palette indices) or class colors.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import BinaryIO, Literal

import numpy as np
from PIL import Image
from PIL.ExifTags import Base
from PIL.TiffImagePlugin import IMAGELENGTH, IMAGEWIDTH, PHOTOMETRIC_INTERPRETATION

from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.counts import and_more, counted
from efficient_ft.data.images import FORMATS, tile_arguments
from efficient_ft.data.inspection import spread
from efficient_ft.data.listing import DIGEST_FILES, AnyListing, hash_files, splits_of

Color = tuple[int, int, int]
#: Extensions of mask files. These file formats can store exact values.
MASK_EXTENSIONS = (".png", ".bmp", ".tif", ".tiff", ".gif")
_EXACT = ("BMP", "GIF", "PNG", "TIFF")
#: Factors by which Pillow scales 2-bit and 4-bit gray values to 8 bits.
_FACTORS = {"L;2": 85, "L;2I": 85, "L;4": 17, "L;4I": 17}
#: For each EXIF orientation, the operation that rotates an image upright.
_TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}


@dataclass(frozen=True)
class Pixels:
    """The pixels of a mask."""

    mode: str  # Pillow's mode
    ids: np.ndarray  # int64 (H, W), gray values or palette indices; -1 for pixels whose channels differ
    colors: np.ndarray | None = None  # int64 (H, W), red · 65536 + green · 256 + blue, or None for gray pixels


@dataclass(frozen=True)
class Header:
    """The header and the palette of a mask file."""

    mode: str  # Pillow's mode
    size: tuple[int, int]  # (width, height)
    palette: np.ndarray | None = None  # uint8 (N, 3), or None if the file has no palette


class _UnusableMaskError(Exception):
    """An error for an unusable mask. The message of the error does not contain the path of the mask."""


@contextlib.contextmanager
def _opened(path: str) -> Iterator[Image.Image]:
    """Open a mask. Errors inside the ``with`` block are converted to `UserError`."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            yield image
    except MemoryError:
        raise
    except _UnusableMaskError as error:
        raise UserError(f"{printable(path)}: {error}") from None
    except Exception as error:  # Pillow's decoders raise exceptions of many types on damaged files
        reason = str(error).replace(repr(path), "it") or type(error).__name__
        raise UserError(f"{printable(path)}: the file cannot be read as a mask ({reason}).") from error


def read_pixels(path: str, orientation: int = 1) -> Pixels:
    """Read the pixels of a mask and apply the EXIF orientation of its image.

    Raise `UserError` if the file cannot be read, its format is lossy, or it has several pages.
    """
    with _opened(path) as image:
        _require_exact(image)
        raw = _raw_mode(image)
        image.load()
        _require_upright(image)
        if image.mode in ("RGB", "RGBA", "LA") and "16" in raw:  # Pillow has converted the values to 8 bits
            raise _UnusableMaskError(
                f"the mask has {len(image.getbands())} channels of 16 bits. Save the mask with one class id per"
                " pixel, or with 8-bit colors."
            )
        return _pixels(image.transpose(_TURNS[orientation]) if orientation in _TURNS else image, raw)


def read_header(path: str) -> Header:
    """Read the mode, the size and the palette of a mask. Raise `UserError` if the file cannot be read."""
    with _opened(path) as image:
        palette = image.palette
        if image.mode != "P" or palette is None:
            return Header(image.mode, image.size)
        if palette.rawmode == "RGB":
            colors = np.frombuffer(bytes(palette.palette), np.uint8)
        else:
            colors = np.asarray(image.getpalette("RGB"), np.uint8)
        return Header(image.mode, image.size, colors[: len(colors) // 3 * 3].reshape(-1, 3))


def raw_size(path: str) -> tuple[tuple[int, int], int] | None:
    """Return the size (width, height) of the stored pixels of an image, and its EXIF orientation (1 by default).

    Return None if the file cannot be read. The error is reported when the image is read.
    """
    try:
        with open(path, "rb") as file:
            without_exif = file.read(8) == b"\x89PNG\r\n\x1a\n" and not _png_has_exif(file)
        with Image.open(path, formats=FORMATS) as image:
            tags = getattr(image, "tag_v2", {})  # Pillow reports the upright size of TIFF images
            size = (tags.get(IMAGEWIDTH, image.width), tags.get(IMAGELENGTH, image.height))
            return size, 1 if without_exif else _orientation(image)
    except MemoryError:
        raise
    except Exception:
        return None


def _orientation(image: Image.Image) -> int:
    with contextlib.suppress(Exception):  # if the EXIF block is broken, the orientation is 1
        number = image.getexif().get(Base.Orientation, 1)
        return number if number in _TURNS else 1
    return 1


def _png_has_exif(file: BinaryIO) -> bool:
    """Return True if a PNG file has an orientation chunk. Pillow would decode the entire image to find this chunk."""
    while len(start := file.read(8)) == 8:
        kind, length = start[4:], int.from_bytes(start[:4], "big")
        if kind == b"eXIf":
            return True
        if kind in (b"tEXt", b"zTXt", b"iTXt") and length >= 20:
            text = file.read(20)
            if text.startswith((b"Raw profile type exi", b"XML:com.adobe.xmp")):
                return True
            length -= 20
        file.seek(length + 4, os.SEEK_CUR)
    return False


def _raw_mode(image: Image.Image) -> str:
    """Return Pillow's name of the pixel format in the file, which may differ from `image.mode`."""
    arguments = tile_arguments(image)
    if isinstance(arguments, tuple) and arguments:
        arguments = arguments[0]
    return arguments if isinstance(arguments, str) else image.mode


def _require_exact(image: Image.Image) -> None:
    compression = str(image.info.get("compression", ""))
    if image.format not in _EXACT or "jpeg" in compression or "webp" in compression:
        kind = image.format if image.format not in _EXACT else f"{image.format} with {compression} compression"
        raise _UnusableMaskError(
            f"a mask must be a PNG, TIFF, BMP or GIF file, got {kind}. This format does not store exact values."
            " Export the mask from its source as a PNG file."
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise _UnusableMaskError(f"a mask must have one page, got {frames}. Save only the page with the class ids.")
    if image.format == "TIFF":
        _require_upright(image)  # Pillow rotates TIFF images while loading
        if getattr(image, "tag_v2", {}).get(PHOTOMETRIC_INTERPRETATION) == 0:
            raise _UnusableMaskError(
                "the value 0 is white in this file (PhotometricInterpretation WhiteIsZero), so the values are"
                " ambiguous. Save the mask as a PNG file."
            )


def _require_upright(image: Image.Image) -> None:
    orientation = _orientation(image)
    if orientation != 1:
        text = f"the mask has an EXIF orientation tag ({orientation}). Save the mask without this tag."
        raise _UnusableMaskError(text)


def _pixels(image: Image.Image, raw: str) -> Pixels:
    mode = image.mode
    if mode in ("LA", "RGBA"):
        alpha = np.asarray(image.getchannel("A"))
        if alpha.size and (alpha != alpha.flat[0]).any():
            text = f"the transparency of the mask varies (mode {mode}). Save the mask without transparency."
            raise _UnusableMaskError(text)
        image = image.convert("RGB") if mode == "RGBA" else image.getchannel("L")
    elif mode not in ("1", "L", "P", "RGB") and not mode.startswith("I"):
        kind = "floating-point values" if mode == "F" else f"the mode {mode}"
        raise _UnusableMaskError(
            f"a mask must have one class id (8 or 16 bits, or a palette index) or one color per pixel, got {kind}."
        )
    values = np.asarray(image).astype(np.int64)
    if image.mode == "P":
        palette = np.asarray(image.getpalette("RGB") or [0, 0, 0], dtype=np.int64).reshape(-1, 3)
        packed = np.zeros(max(len(palette), int(values.max(initial=0)) + 1), dtype=np.int64)
        packed[: len(palette)] = palette @ (65536, 256, 1)
        return Pixels(mode, values, packed[values])
    if image.mode == "RGB":
        gray = (values == values[..., :1]).all(-1)
        return Pixels(mode, np.where(gray, values[..., 0], -1), values @ (65536, 256, 1))
    return Pixels(mode, values // _FACTORS.get(raw, 1))


UNKNOWN = 254  # table entry for values without a class


@dataclass(frozen=True)
class Classes:
    """The classes of a data set, and the pixel values of each class in masks."""

    names: tuple[str, ...]  # class names, in the order of the network's outputs
    ids: tuple[int, ...]  # pixel values of these classes in masks and predictions
    ignored: frozenset[int] = frozenset({IGNORED})  # values without a label; includes 255 unless 255 is a class
    further: tuple[tuple[int, int], ...] = ()  # (value, class index) for each additional value of a class
    colors: tuple[Color, ...] = ()  # class colors in color masks; empty if masks contain only ids
    ignored_colors: frozenset[Color] = frozenset()  # colors of pixels without a label
    palette: Literal["auto", "index", "color"] = "auto"  # how to read palettes; auto means color if classes have colors
    chosen: bool = False  # True if the user has specified the meaning of the values

    @cached_property
    def table(self) -> np.ndarray:
        """The class index, `IGNORED` or `UNKNOWN` of each value, uint8 (65537,). The last entry is `UNKNOWN`."""
        table = np.full((1 << 16) + 1, UNKNOWN, dtype=np.uint8)
        table[sorted(self.ignored)] = IGNORED
        table[list(self.ids)] = np.arange(len(self.ids))
        for value, index in self.further:
            table[value] = index
        return table

    @cached_property
    def color_table(self) -> np.ndarray:
        """The class index, `IGNORED` or `UNKNOWN` of each color, uint8 (2**24,).

        The index of the color (red, green, blue) is red · 65536 + green · 256 + blue.
        """
        table = np.full(1 << 24, UNKNOWN, dtype=np.uint8)
        table[[r << 16 | g << 8 | b for r, g, b in self.ignored_colors]] = IGNORED
        table[[r << 16 | g << 8 | b for r, g, b in self.colors]] = np.arange(len(self.colors))
        return table

    @cached_property
    def gray(self) -> bool:
        """Return True if all colors are gray. In this case, the values of masks with one channel are read as colors."""
        return bool(self.colors) and all(len(set(color)) == 1 for color in (*self.colors, *self.ignored_colors))

    def values(self, pixels: Pixels) -> tuple[np.ndarray, bool]:
        """Return the pixel values that determine the classes, int64 (H, W), and whether these values are colors.

        Raise `ValueError` if the mask contains colors, but the classes have no colors.
        """
        if self.colors and pixels.colors is not None and not (pixels.mode == "P" and self.palette == "index"):
            return pixels.colors, True
        ids = pixels.ids
        if pixels.mode == "1" and (self.gray or (self.table[1] == UNKNOWN and IGNORED in self.ids)):
            ids = ids * 255  # white has the value 255
        if self.gray and pixels.colors is None and ids.max(initial=0) < 256:
            return ids * 0x010101, True
        if pixels.mode in ("RGB", "RGBA") and (ids < 0).any():
            raise ValueError("colors")
        return ids, False

    def indices(self, values: np.ndarray, by_color: bool) -> np.ndarray:
        """Return the class index, `IGNORED` or `UNKNOWN` for each value, as a uint8 array (H, W)."""
        if by_color:
            return self.color_table[values]
        outside = (values < 0) | (values >= 1 << 16)
        return self.table[np.where(outside, 1 << 16, values) if outside.any() else values]


@dataclass(frozen=True)
class MaskSamples:
    """The paths of images and their masks, in the same order."""

    images: list[str]
    masks: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Sequence[int]) -> MaskSamples:
        """Return the samples at `indices`, in that order."""
        return MaskSamples([self.images[i] for i in indices], [self.masks[i] for i in indices])

    def content_digest(self) -> str:
        """Return a digest (16 hex digits) of the paths, sizes and modification times of all files."""
        return hash_files(hashlib.blake2b(digest_size=8), (*self.images, *self.masks))


@dataclass
class MaskListing(AnyListing):
    """The samples of a segmentation data set in each official or user-defined split. See `listing.Listing`."""

    classes: Classes
    train: MaskSamples
    val: MaskSamples | None = None
    test: MaskSamples | None = None

    @property
    def class_names(self) -> list[str]:
        """Class names, indexed by label."""
        return list(self.classes.names)

    def digest(self) -> str:
        """Return a digest (8 hex digits) of the classes and the files.

        The digest includes the names and sizes of at most 256 image files of each split, and those of the corresponding
        mask files.
        """
        classes = self.classes
        about: tuple[object, ...] = (classes.names, classes.ids)
        if classes.further or classes.colors:
            about = (*about, classes.further, classes.colors, sorted(classes.ignored_colors))
        hasher = hashlib.blake2b(repr(about).encode(), digest_size=4)
        for name, part in splits_of(self).items():
            if not len(part):
                continue
            hasher.update(f"{name} {len(part)}".encode())
            for i in spread(len(part), DIGEST_FILES):
                for path in (part.images[i], part.masks[i]):
                    hasher.update(f"{os.path.basename(path)} {os.path.getsize(path)}".encode(errors="surrogateescape"))
        return hasher.hexdigest()


def hold_out(samples: MaskSamples, fraction: float, seed: int) -> tuple[MaskSamples, MaskSamples]:
    """Hold out a fraction of the images, but at least one image.

    Return the kept and the held-out samples, both in the order of `samples`.
    """
    count = min(max(round(len(samples) * fraction), 1), len(samples) - 1)
    chosen = set(np.random.default_rng([seed, len(samples)]).permutation(len(samples))[:count].tolist())
    kept = [i for i in range(len(samples)) if i not in chosen]
    return samples.take(kept), samples.take(sorted(chosen))


def read_mask(
    path: str, classes: Classes, size: tuple[int, int] | None = None, orientation: int = 1, labeled: bool = True
) -> np.ndarray:
    """Read a mask as class indices, uint8 (H, W), and apply the EXIF orientation. Unlabeled pixels are `IGNORED`.

    `size` is the (width, height) of the image. Raise `UserError` in the following cases: the file cannot be read; the
    size of the mask differs from `size`; the mask contains colors instead of ids; a value has no class; or `labeled` is
    True and no pixel has a label.
    """
    pixels = read_pixels(path, orientation)
    height, width = pixels.ids.shape
    if size is not None and (width, height) != size:
        factor = width / size[0]
        advice = ""
        if abs(factor - height / size[1]) < 0.02 * factor:
            advice = " If the mask was resized, resize it to the size of its image with nearest-neighbor interpolation."
        raise UserError(
            f"{printable(path)}: the size of the mask is {width}×{height}, but the size of its image is"
            f" {size[0]}×{size[1]}. Both sizes must be equal.{advice}"
        )
    try:
        values, by_color = classes.values(pixels)
    except ValueError:
        assert pixels.colors is not None
        raise UserError(
            f"{printable(path)}: the mask contains colors (mode {pixels.mode}) instead of class ids:"
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


def _unknown(values: np.ndarray, by_color: bool, mode: str, classes: Classes) -> str:
    if by_color:
        back = " To read palette indices instead, set data.masks.palette=index." if mode == "P" else ""
        return (
            f"the mask contains colors without a class: {shown_values(values, True)}. Add these colors to the class"
            f" list or to data.masks.colors. Use the name void for colors without a label.{back}"
        )
    known = ", ".join(map(str, _ranges(sorted({*classes.ids, *(value for value, _ in classes.further)}))))
    smooth = " The file may have been smoothed or converted from JPEG." if len(np.unique(values[:10_000])) > 16 else ""
    return (
        f"the mask contains ids without a class: {shown_values(values, False)}. The classes have the ids {known}."
        f" Unlabeled pixels have {', '.join(map(str, _ranges(sorted(classes.ignored))))} (data.masks.ignored).{smooth}"
        " Correct the mask, or map each value to a class with data.masks.values={VALUE: NAME, …}."
    )


def _ranges(numbers: Sequence[int]) -> list[str]:
    """Format sorted numbers as a list of strings. Consecutive numbers are combined into ranges: ``0 to 3``, ``7``."""
    runs = np.split(numbers, np.flatnonzero(np.diff(numbers) > 1) + 1)
    texts = [[f"{run[0]} to {run[-1]}"] if len(run) > 2 else list(map(str, run)) for run in runs]
    return [text for run in texts for text in run]


def shown_values(values: np.ndarray, by_color: bool) -> str:
    """Return the five most frequent values and their pixel counts as text."""
    numbers, counts = np.unique(values, return_counts=True)
    order = np.argsort(-counts, kind="stable")[:5]
    names = [f"{n >> 16} {n >> 8 & 255} {n & 255}" if by_color else str(n) for n in map(int, numbers[order])]
    listed = ", ".join(f"{name} ({counted(count, 'pixel')})" for name, count in zip(names, counts[order], strict=True))
    return listed + and_more(len(numbers) - 5)


def class_colors(count: int) -> np.ndarray:
    """Return `count` distinguishable class colors from the Pascal VOC palette, uint8 (count, 3)."""
    colors = np.zeros((count, 3), dtype=np.uint8)
    for number in range(count):
        value = number + 1
        for bit in range(8):
            for channel in range(3):
                colors[number, channel] |= ((value >> channel) & 1) << (7 - bit)
            value >>= 3
    return colors
