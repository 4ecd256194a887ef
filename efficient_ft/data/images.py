"""Read image files of all supported formats as RGB."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import os
import struct
import unicodedata
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import IO, Any

import numpy as np
from PIL import Image, ImageCms, ImageOps, features
from PIL.TiffImagePlugin import BITSPERSAMPLE, PHOTOMETRIC_INTERPRETATION, SAMPLESPERPIXEL, ImageFileDirectory_v2

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable

#: Pillow's names of the formats that every build of Pillow can read. Only these formats and the formats in `_FURTHER`
#: are opened, because Pillow runs external programs for some other formats (for example, Ghostscript for PostScript).
FORMATS = ("BMP", "GIF", "JPEG", "PNG", "PPM", "TIFF", "WEBP")
for _format in FORMATS:
    importlib.import_module(f"PIL.{_format.title().replace('Webp', 'WebP')}ImagePlugin")

#: Formats that require a certain build of Pillow or an additional package. Each value contains Pillow's name of the
#: format, the module that reads the format, installation instructions, and the file extensions.
_FURTHER = {
    "AVIF": ("AVIF", "PIL.AvifImagePlugin", "pip install 'pillow>=11.3'", ".avif"),
    "JPEG 2000": ("JPEG2000", "PIL.Jpeg2KImagePlugin", "install a Pillow with OpenJPEG", ".jp2 .j2k .j2c .jpf .jpx"),
    "HEIC": ("HEIF", "pillow_heif", "pip install 'efficient-ft[heic]'", ".heic .heif .hif"),
    "JPEG XL": ("JXL", "pillow_jxl", "pip install pillow-jxl-plugin", ".jxl"),
}
_CODECS = {"AVIF": "avif", "JPEG 2000": "jpg_2000"}


@cache
def _is_available(kind: str) -> bool:
    if kind in _CODECS:
        return bool(features.check(_CODECS[kind]))
    return importlib.util.find_spec(_FURTHER[kind][1]) is not None


_ALWAYS = {".bmp", ".gif", ".jfif", ".jpeg", ".jpg", ".pgm", ".png", ".ppm", ".tif", ".tiff", ".webp"}
#: Extensions of the supported image formats.
EXTENSIONS = tuple(sorted(_ALWAYS.union(*(one[3].split() for kind, one in _FURTHER.items() if _is_available(kind)))))
#: Extensions of unsupported image and array formats. Messages advise users to convert files with these extensions.
_CONVERT = (
    ".arw", ".cr2", ".cr3", ".dcm", ".dng", ".eps", ".exr", ".fits", ".h5", ".hdf5", ".hdr", ".ico", ".mat", ".nef",
    ".nii", ".npy", ".npz", ".nrrd", ".orf", ".pdf", ".pfm", ".psd", ".raf", ".raw", ".rw2", ".svg", ".tga", ".zarr",
)  # fmt: skip
#: Magic bytes and the corresponding file formats.
_MAGIC = {
    b"\xff\xd8\xff": "JPEG", b"\x89PNG": "PNG", b"\x00\x00\x00\x0cjP  ": "JPEG 2000", b"\xff\x4f\xff\x51": "JPEG 2000",
    b"\xff\x0a": "JPEG XL", b"\x00\x00\x00\x0cJXL ": "JPEG XL", b"%PDF": "PDF", b"%!": "PostScript",
    b"8BPS": "Photoshop", b"\x93NUMPY": "NumPy", b"PK\x03\x04": "ZIP", b"\x1f\x8b": "gzip", b"\x89HDF": "HDF5",
    b"v/1\x01": "OpenEXR", b"SIMPLE  =": "FITS", b"version https://git-lfs": "Git LFS pointer", b"<svg": "SVG",
    b"<": "HTML or XML", b"{": "JSON", bytes(16): "zero bytes",
}  # fmt: skip
_HEIF_BRANDS = (b"heic", b"heix", b"heim", b"heis", b"hevc", b"hevx", b"mif1", b"msf1")
MAX_PIXELS = 178_956_970


@dataclass(frozen=True)
class Decoding:
    """Options for decoding image files to RGB.

    Gray values outside of `value_range` are clipped. Images with more than `max_pixels` pixels are rejected.
    """

    #: Gray values (low, high) that are mapped to black and white in images with more than 8 bits. The default is the
    #: range (0, 65535).
    value_range: tuple[float, float] | None = None
    max_pixels: int = MAX_PIXELS


def read_image(
    path: str | os.PathLike[str], target_size: tuple[int, int] | None = None, decoding: Decoding | None = None
) -> Image.Image:
    """Read an image file, and return an upright RGB image.

    The EXIF orientation is applied, and transparent images are composited over a white background. Gray values with
    more than 8 bits are scaled to 8 bits. Only the first frame of an animation is read.

    Args:
        path: path of the file.
        target_size: (height, width) to which the image will be resized, or None. JPEG files that are at least four
            times as large as `target_size` are decoded at a reduced resolution of at least twice `target_size`.
        decoding: value range and size limit, or None for the defaults.

    Raises:
        UserError: If the file is missing, unreadable, truncated, too large or not an image. The error message begins
            with the path.
    """
    with opened(path, decoding) as image:
        reduce_resolution(image, target_size)
        return to_rgb(image, decoding or Decoding())


def reduce_resolution(image: Image.Image, target_size: tuple[int, int] | None) -> None:
    """Configure an opened JPEG file to be decoded at a reduced resolution of at least twice `target_size`."""
    if target_size is not None:
        side = 2 * max(target_size)
        image.draft(None, (side, side))


@contextlib.contextmanager
def opened(path: str | os.PathLike[str], decoding: Decoding | None = None) -> Iterator[Image.Image]:
    """Open an image of a supported format and read its header.

    Errors inside the ``with`` block are converted to `UserError`.
    """
    limit = (decoding or Decoding()).max_pixels
    try:
        with open(path, "rb") as file:
            image = _identified(file, os.fspath(path))
            pixels = image.width * image.height
            if pixels > limit:
                raise UserError(
                    f"{printable(path)}: the image has {image.width}×{image.height} = {pixels:,} pixels, which is more"
                    f" than data.max_pixels={limit}. Set data.max_pixels={pixels} if this size is intended, or resize"
                    " the image."
                )
            if Image.MAX_IMAGE_PIXELS is not None and limit > Image.MAX_IMAGE_PIXELS:
                Image.MAX_IMAGE_PIXELS = limit  # Pillow also applies its limit to crops
            yield image
    except (MemoryError, UserError):
        raise
    except Exception as error:  # Pillow's decoders raise exceptions of many types on damaged files
        reason = str(error).replace(repr(os.fspath(path)), "").strip(" :") or type(error).__name__
        raise UserError(f"{printable(path)}: the file is not readable as an image ({reason}).") from error


def to_rgb(image: Image.Image, decoding: Decoding) -> Image.Image:
    """Decode an opened image to an upright RGB image. Raise `ValueError` if the pixels cannot be converted to RGB."""
    # Pillow drops bands that it cannot represent, so TIFF images with such bands are rejected.
    bands = int(image.tag_v2.get(SAMPLESPERPIXEL, 1)) if image.format == "TIFF" else 1  # type: ignore[attr-defined]
    if bands > len(image.getbands()) or image.mode == "RGBX":
        raise ValueError(_too_many(bands))
    levels = _stored_levels(image) if decoding.value_range else 1.0
    if decoding.value_range and image.mode in ("RGB", "RGBA") and has_16_bits(image):
        raise ValueError(
            "the image has 16-bit colors, but data.value_range maps only gray images. Save the image as 8-bit RGB"
        )
    image.load()
    with contextlib.suppress(Exception):  # an image with a broken EXIF block is still readable
        ImageOps.exif_transpose(image, in_place=True)
    if image.mode == "RGB" and "transparency" not in image.info:
        return image
    if image.mode.startswith("I") or image.mode == "F":  # Pillow's conversion would clip the values at 255
        return _eight_bits(image, decoding.value_range, levels).convert("RGB")
    if image.mode == "LAB":
        profiles = ImageCms.createProfile("LAB"), ImageCms.createProfile("sRGB")
        rgb = ImageCms.profileToProfile(image, *profiles, outputMode="RGB")
        assert rgb is not None
        return rgb
    if image.mode in ("RGBA", "LA", "PA", "La", "RGBa") or "transparency" in image.info:
        layer = image.convert("RGBA")
        white = Image.new("RGBA", layer.size, (255, 255, 255, 255))
        return Image.alpha_composite(white, layer).convert("RGB")
    return image.convert("RGB")


def tile_arguments(image: Image.Image) -> Any:
    """Return the arguments of the decoder of an opened image, which denote the pixel format in the file."""
    tiles = getattr(image, "tile", None)
    return tiles[0][3] if tiles else None


def has_16_bits(image: Image.Image) -> bool:
    """Return True if an opened gray or color image has more than 8 bits per value."""
    return ";16" in str(tile_arguments(image)) or image.mode.startswith("I") or image.mode == "F"


def _eight_bits(image: Image.Image, value_range: tuple[float, float] | None, levels: float) -> Image.Image:
    """Scale gray values to 8 bits. The factor `levels` converts Pillow's values to the stored values."""
    values = np.asarray(image).astype(np.float64) * levels
    if not np.isfinite(values).all():
        raise ValueError("some pixels of the image are not finite")
    if value_range is None and (image.mode == "F" or values.min() < 0 or values.max() > 65535):
        kind = "floating-point pixels" if image.mode == "F" else "32-bit pixels"
        raise ValueError(
            f"{kind} have no fixed range (found {values.min():g} to {values.max():g}). Set data.value_range=[LOW, HIGH]"
            " to the values of black and white, or save the image with 8 or 16 bits"
        )
    low, high = value_range or (0, 65535)
    scaled = ((values - low) / ((high - low) / 255)).round().clip(0, 255).astype(np.uint8)
    if image.format == "TIFF" and image.tag_v2.get(PHOTOMETRIC_INTERPRETATION) == 0:  # type: ignore[attr-defined]
        scaled = 255 - scaled  # 0 is white in this file, but Pillow inverts only 8-bit images
    return Image.fromarray(scaled)


def _stored_levels(image: Image.Image) -> float:
    """Return the factor that converts Pillow's 16-bit values to the values stored in the file.

    This function must be called before the image is loaded.
    """
    if image.format == "PPM" and image.mode == "I" and isinstance(args := tile_arguments(image), tuple):
        return float(args[-1]) / 65535
    if image.format == "JPEG2000" and image.mode.startswith("I"):
        file: Any = image.fp  # type: ignore[attr-defined]
        place = file.tell()
        file.seek(0)
        _, mark, header = file.read(1 << 16).partition(b"\xff\x4f\xff\x51")
        file.seek(place)
        return 2.0 ** ((header[38] & 0x7F) + 1 - 16) if mark else 1.0
    return 1.0


def _too_many(bands: int) -> str:
    return (
        f"the image has {bands} bands, but only gray, RGB, RGBA and CMYK images are supported."
        " Save three of the bands as RGB. model.kwargs.in_chans does not apply to image files"
    )


def _identified(file: IO[bytes], path: str) -> Image.Image:
    """Open an image of a supported format without Pillow's size limit. Raise `ValueError` for other formats."""
    start = file.read(512)
    if not start:
        raise ValueError("the file is empty")
    kind = file_kind(start)
    if kind in _FURTHER and not _is_available(kind):
        raise ValueError(
            f"the file contains {kind}. To read the file: {_FURTHER[kind][2]}, or convert the file to JPEG or PNG"
        )
    for name in (*FORMATS, *([_plugin(kind)] if kind in _FURTHER else [])):
        factory, accept = Image.OPEN[name]
        result = accept is None or accept(start[:16])
        if result and not isinstance(result, str):
            file.seek(0)
            try:
                return factory(file, path)
            except (SyntaxError, IndexError, TypeError, struct.error) as error:
                raise ValueError(_why_not(file, name, error)) from error
    if kind is None:
        raise ValueError("the format of the file is unknown")
    if kind == "Git LFS pointer":
        raise ValueError("the file is a Git LFS pointer instead of an image. Run git lfs pull")
    raise ValueError(f"the file contains {kind} instead of a supported image. Convert the file or download it again")


def _plugin(kind: str) -> str:
    """Load the plugin of an optional format, and return Pillow's name of the format."""
    name, module, *_ = _FURTHER[kind]
    plugin = importlib.import_module(module)
    if kind == "HEIC" and name not in Image.OPEN:
        plugin.register_heif_opener()
    return name


def _why_not(file: IO[bytes], name: str, error: Exception) -> str:
    if name == "TIFF" and ("pixel mode" in str(error) or "samples per pixel" in str(error)):
        file.seek(0)
        tags = ImageFileDirectory_v2(file.read(8))
        file.seek(tags.next)
        tags.load(file)
        bands = int(tags.get(SAMPLESPERPIXEL, 1))
        if bands > 4 or bands == 2:
            return _too_many(bands)
        bits = "×".join(str(bit) for bit in tags.get(BITSPERSAMPLE, ()))
        return f"TIFF images with {bands} bands of {bits} bits are not supported. Save the image with 8 or 16 bits"
    known = str(error) not in ("", "not identified by this driver")
    return str(error) if known else f"the {name} header of the file is invalid"


def file_kind(start: bytes) -> str | None:
    """Return the format that the first bytes of a file denote, such as ``HEIC`` or ``HTML or XML``.

    Return None if the format is unknown.
    """
    if start[4:8] == b"ftyp":
        brand = start[8:12]
        if brand in (b"avif", b"avis"):
            return "AVIF"
        if brand in _HEIF_BRANDS:
            return "AVIF" if b"avif" in start[12:64] else "HEIC"
        return "video"
    if start[128:132] == b"DICM":
        return "DICOM"
    text = start.removeprefix(b"\xef\xbb\xbf").lstrip() if start[:1] in b"\xef \t\r\n<" else start
    return next((kind for magic, kind in _MAGIC.items() if text.startswith(magic)), None)


def reading_hint(extension: str) -> str | None:
    """Return advice on reading images with an unsupported extension, such as ``.heic``, or None for other files."""
    for _, _, how, extensions in _FURTHER.values():
        if extension in extensions.split():
            return how
    return "convert the files to PNG or TIFF" if extension in _CONVERT else None


def class_name(folder: str) -> str:
    """Convert a folder name to a class name.

    The name is normalized to Unicode's NFC form, because archive programs encode accented letters differently.
    """
    return unicodedata.normalize("NFC", printable(folder))


def is_image(path: str | os.PathLike[str]) -> bool:
    """Return True if the extension of a path denotes a supported image format."""
    return os.path.splitext(path)[1].lower() in EXTENSIONS
