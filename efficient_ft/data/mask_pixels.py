"""Read the ids or colors of mask files, without converting the values to classes."""

from __future__ import annotations

import contextlib
import os
from dataclasses import dataclass

import numpy as np
from PIL import Image

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable
from efficient_ft.data.images import FORMATS

Color = tuple[int, int, int]
#: Extensions of mask files, whose formats are lossless.
MASK_EXTENSIONS = (".png", ".bmp", ".tif", ".tiff", ".gif")
_EXACT = ("BMP", "GIF", "PNG", "TIFF")
#: Factors by which Pillow scales gray values of 2 and 4 bits to 8 bits.
_FACTORS = {"L;2": 85, "L;2I": 85, "L;4": 17, "L;4I": 17}
_INVERTED = 262  # TIFF tag PhotometricInterpretation; if it is 0, the value 0 is white
_ORIENTATION = 274
#: Operations that rotate an image upright, by EXIF orientation.
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
    ids: np.ndarray  # int64 (H, W), values or palette indices; -1 where the three channels differ
    colors: np.ndarray | None = None  # int64 (H, W), red · 65536 + green · 256 + blue; None for gray pixels


@dataclass(frozen=True)
class Header:
    """The header of a mask file, and its palette."""

    mode: str  # Pillow's mode
    size: tuple[int, int]  # (width, height)
    palette: np.ndarray | None = None  # uint8 (N, 3); None if the file has no palette


class _UnusableMaskError(Exception):
    """A mask cannot be used; the message does not contain its path."""


def read_pixels(path: str, orientation: int = 1) -> Pixels:
    """Read the pixels of a mask and apply the EXIF orientation of its image.

    Raises:
        UserError: If the file cannot be read, its format is lossy, or it has several pages.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            _require_exact(image)
            raw = _raw_mode(image)
            image.load()
            _require_upright(image)
            if image.mode in ("RGB", "RGBA", "LA") and "16" in raw:  # Pillow has changed the values
                raise _UnusableMaskError(
                    f"the mask has {len(image.getbands())} channels of 16 bits. Save it with one class id per pixel, or"
                    " with 8-bit colors."
                )
            return _pixels(image.transpose(_TURNS[orientation]) if orientation in _TURNS else image, raw)
    except MemoryError:
        raise
    except _UnusableMaskError as error:
        raise UserError(f"{printable(path)}: {error}") from None
    except Exception as error:  # Pillow's decoders raise exceptions of many types on damaged files
        reason = str(error).replace(repr(path), "it") or type(error).__name__
        raise UserError(f"{printable(path)}: not readable as a mask ({reason}).") from error


def read_header(path: str) -> Header:
    """Read the mode, the size and the palette of a mask. Raise `UserError` if the file cannot be read."""
    try:
        with Image.open(path, formats=FORMATS) as image:
            palette = image.palette
            if image.mode != "P" or palette is None:
                return Header(image.mode, image.size)
            if palette.rawmode == "RGB":
                colors = np.frombuffer(bytes(palette.palette), np.uint8)
            else:
                colors = np.asarray(image.getpalette("RGB"), np.uint8)
            return Header(image.mode, image.size, colors[: len(colors) // 3 * 3].reshape(-1, 3))
    except MemoryError:
        raise
    except Exception as error:
        raise UserError(f"{printable(path)}: not readable as a mask ({error or type(error).__name__}).") from error


def stored_size(path: str) -> tuple[tuple[int, int], int] | None:
    """Return the (width, height) of an image's stored pixels, and its EXIF orientation (1 by default).

    Return None if the file cannot be read. The error is reported when the image is read.
    """
    try:
        with open(path, "rb") as file:
            without_exif = file.read(8) == b"\x89PNG\r\n\x1a\n" and not _png_has_exif(file)
        with Image.open(path, formats=FORMATS) as image:
            tags = getattr(image, "tag_v2", {})  # Pillow reports the upright size of TIFF images
            size = (tags.get(256, image.width), tags.get(257, image.height))
            return size, 1 if without_exif else _orientation(image)
    except MemoryError:
        raise
    except Exception:
        return None


def _orientation(image: Image.Image) -> int:
    with contextlib.suppress(Exception):  # an image with a broken EXIF block has no orientation
        number = image.getexif().get(_ORIENTATION, 1)
        return number if number in _TURNS else 1
    return 1


def _png_has_exif(file: object) -> bool:
    """Return True if a PNG file has a chunk with an orientation. Pillow would decode the entire image to find it."""
    read, seek = file.read, file.seek  # type: ignore[attr-defined]
    while len(start := read(8)) == 8:
        kind, length = start[4:], int.from_bytes(start[:4], "big")
        if kind == b"eXIf":
            return True
        if kind in (b"tEXt", b"zTXt", b"iTXt") and length >= 20:
            text = read(20)
            if text.startswith((b"Raw profile type exi", b"XML:com.adobe.xmp")):
                return True
            length -= 20
        seek(length + 4, os.SEEK_CUR)
    return False


def _raw_mode(image: Image.Image) -> str:
    """Return Pillow's raw mode of the stored pixels, which Pillow converts to `image.mode`."""
    tiles = getattr(image, "tile", None)
    arguments = tiles[0][3] if tiles else None
    if isinstance(arguments, tuple) and arguments:
        arguments = arguments[0]
    return arguments if isinstance(arguments, str) else image.mode


def _require_exact(image: Image.Image) -> None:
    compression = str(image.info.get("compression", ""))
    if image.format not in _EXACT or "jpeg" in compression or "webp" in compression:
        kind = image.format if image.format not in _EXACT else f"{image.format} with {compression} compression"
        raise _UnusableMaskError(
            f"a mask must be a PNG, TIFF, BMP or GIF file, got {kind}, which does not keep exact values. Export the"
            " mask as PNG from its source."
        )
    frames = getattr(image, "n_frames", 1)
    if frames > 1:
        raise _UnusableMaskError(f"a mask must have one page, got {frames}. Save only the page with the class ids.")
    if image.format == "TIFF":
        _require_upright(image)  # Pillow rotates TIFF images while loading
        if getattr(image, "tag_v2", {}).get(_INVERTED) == 0:
            raise _UnusableMaskError(
                "the value 0 is white in this file (PhotometricInterpretation WhiteIsZero), so its values are"
                " ambiguous. Save it as PNG."
            )


def _require_upright(image: Image.Image) -> None:
    orientation = _orientation(image)
    if orientation != 1:
        raise _UnusableMaskError(f"the mask has its own EXIF orientation ({orientation}). Save it without orientation.")


def _pixels(image: Image.Image, raw: str) -> Pixels:
    mode = image.mode
    if mode in ("LA", "RGBA"):
        alpha = np.asarray(image.getchannel("A"))
        if alpha.size and (alpha != alpha.flat[0]).any():
            raise _UnusableMaskError(f"the mask has varying transparency (mode {mode}). Save it without transparency.")
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
