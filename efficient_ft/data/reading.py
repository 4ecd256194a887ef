"""Estimate the memory required to read a batch. The estimate is based on the headers of image files."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from PIL.ExifTags import Base

from efficient_ft.core.errors import UserError
from efficient_ft.data.file_list import Paths, size_and_time
from efficient_ft.data.images import Decoding, opened, reduce_resolution
from efficient_ft.data.inspection import HEADERS, in_threads, spread

#: Limits for large splits: the number of largest files whose headers are read, and the number of files whose sizes are
#: compared to find the largest files.
_LONGEST, _STATED = 256, 50_000
#: Number of bytes per pixel that are required to decode an image as RGB, for each Pillow mode. All constants were
#: measured with 9-megapixel files. `_COMPOSITED` applies to other modes, which are composited over white, and `_DEEP`
#: to gray values with more than 8 bits. WebP files require at least `_WEBP` bytes per pixel. `_TURNED` is added for
#: rotated images, because rotation creates a copy.
_BYTES = {"RGB": 4, "L": 5, "1": 5, "P": 5, "CMYK": 8, "YCbCr": 8}
_COMPOSITED, _DEEP, _WEBP, _TURNED = 20, 28, 14, 4


@dataclass(frozen=True)
class Reading:
    """The memory required to read batches of a split."""

    size: tuple[int, ...]  # (H, W) of the largest inputs, or (L,) for texts
    decode_bytes: int = 0  # peak memory while the largest sample is read
    kept_bytes: int = 0  # memory that each sample occupies until the batch is complete
    stack_bytes: int = 0  # additional memory of each sample while the batch is stacked, excluding the batch
    file_size: tuple[int, int] | None = None  # (width, height) of the largest image file, or None if there is no file
    own_size: bool = False  # True if `size` is the size of the files instead of the input size of the network

    def load_bytes(self, samples: int) -> int:
        """Return the number of bytes required to read a batch of `samples` samples, excluding the batch itself."""
        reading = self.kept_bytes * (samples - 1) + self.decode_bytes
        return max(reading, (self.kept_bytes + self.stack_bytes) * samples)


@dataclass(frozen=True)
class Header:
    """The header of an image file."""

    size: tuple[int, int]  # (width, height) of the upright image
    pixels: int  # number of decoded pixels; JPEG files may be decoded at reduced resolution
    bytes_per_pixel: int  # number of bytes required to decode a pixel

    @property
    def decode_bytes(self) -> int:
        """Number of bytes required to decode the image as RGB."""
        return self.pixels * self.bytes_per_pixel


def headers(
    paths: Sequence[str] | Paths, decoding: Decoding | None = None, target_size: tuple[int, int] | None = None
) -> list[Header]:
    """Read the headers of image files, and skip unreadable files. See `images.read_image` for `target_size`.

    For large splits, only the headers of evenly spread files and of the largest files are read.
    """
    chosen = list(paths)
    if len(chosen) > HEADERS:
        sizes = {k: (size_and_time(chosen[k]) or (0, 0))[0] for k in spread(len(chosen), _STATED).tolist()}
        by_length = sorted(sizes, key=lambda k: sizes[k])[-_LONGEST:]
        numbers = np.union1d(spread(len(chosen), HEADERS), np.asarray(by_length, dtype=np.int64))
        chosen = [chosen[k] for k in numbers.tolist()]
    found = in_threads(lambda path: _header(path, decoding, target_size), chosen)
    return [header for header in found if header is not None]


def _header(path: str, decoding: Decoding | None, target_size: tuple[int, int] | None) -> Header | None:
    with contextlib.suppress(UserError), opened(path, decoding) as image:
        turned = image.format in ("JPEG", "MPO", "TIFF") and image.getexif().get(Base.Orientation, 1) != 1
        upright = (image.height, image.width) if turned else image.size
        each = _DEEP if image.mode.startswith("I") or image.mode == "F" else _BYTES.get(image.mode, _COMPOSITED)
        each = _COMPOSITED if "transparency" in image.info else each
        each = max(each, _WEBP) if image.format == "WEBP" else each
        reduce_resolution(image, target_size)
        return Header(upright, image.width * image.height, each + (_TURNED if turned else 0))
    return None


def largest_file(found: Sequence[Header]) -> tuple[int, int] | None:
    """Return the size of the largest image, or None if there are no images."""
    return max((one.size for one in found), key=lambda size: size[0] * size[1], default=None)
