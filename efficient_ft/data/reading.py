"""The memory that reading a batch takes in the process that reads it, estimated from the headers of image files."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.data.images import Decoding, opened
from efficient_ft.data.inspection import HEADERS, in_threads, spread
from efficient_ft.data.paths import Paths

#: Of a larger split, the headers of evenly spread files and of the longest files are read.
_LONGEST, _STATED = 256, 50_000
#: Bytes per pixel of decoding as RGB, by Pillow's mode, measured with 9-megapixel files. Other modes are composited
#: over white. Turning an image upright copies it.
_BYTES = {"RGB": 4, "L": 5, "1": 5, "P": 5, "CMYK": 8, "YCbCr": 8}
_COMPOSITED, _DEEP, _WEBP, _TURNED = 20, 28, 14, 4
_ORIENTATION = 274


@dataclass(frozen=True)
class Reading:
    """The memory of reading batches of a split.

    Attributes:
        size: (H, W) of the largest inputs, or (L,) of texts.
        decode_bytes: of reading the largest sample, gone afterwards.
        kept_bytes: of each sample until the batch is complete.
        stack_bytes: of each sample while the batch is stacked, without the batch.
        file_size: (width, height) of the largest image file; None if there are no files.
        own_size: True if `size` is that of the files, and not the input size of the network.
    """

    size: tuple[int, ...]
    decode_bytes: int = 0
    kept_bytes: int = 0
    stack_bytes: int = 0
    file_size: tuple[int, int] | None = None
    own_size: bool = False

    def load_bytes(self, samples: int) -> int:
        """Bytes that reading a batch of `samples` takes in addition to the batch."""
        reading = self.kept_bytes * (samples - 1) + self.decode_bytes
        return max(reading, (self.kept_bytes + self.stack_bytes) * samples)


@dataclass(frozen=True)
class Header:
    """The header of an image file.

    Attributes:
        size: (width, height) of the upright image.
        pixels: that are decoded; JPEG files may be decoded at a fraction of their size.
        bytes_per_pixel: of decoding them.
    """

    size: tuple[int, int]
    pixels: int
    bytes_per_pixel: int

    @property
    def decode_bytes(self) -> int:
        """Bytes of decoding the image as RGB."""
        return self.pixels * self.bytes_per_pixel


def headers(
    paths: Sequence[str] | Paths, decoding: Decoding | None = None, target_size: tuple[int, int] | None = None
) -> list[Header]:
    """Read the headers of image files: of all, or of a large split of some of them, the longest included.

    Args:
        paths: the files; unreadable ones are left out.
        decoding: the size limit.
        target_size: (height, width) that they are resized to, see `images.read_image`.
    """
    chosen = list(paths)
    if len(chosen) > HEADERS:
        by_length = sorted(spread(len(chosen), _STATED).tolist(), key=lambda k: _length(chosen[k]))[-_LONGEST:]
        numbers = np.union1d(spread(len(chosen), HEADERS), np.asarray(by_length, dtype=np.int64))
        chosen = [chosen[k] for k in numbers.tolist()]
    found = in_threads(lambda path: _header(path, decoding, target_size), chosen)
    return [header for header in found if header is not None]


def _length(path: str) -> int:
    with contextlib.suppress(OSError):
        return os.stat(path).st_size
    return 0


def _header(path: str, decoding: Decoding | None, target_size: tuple[int, int] | None) -> Header | None:
    with contextlib.suppress(UserError), opened(path, decoding) as image:
        turned = image.format in ("JPEG", "MPO", "TIFF") and image.getexif().get(_ORIENTATION, 1) != 1
        upright = (image.height, image.width) if turned else image.size
        each = _DEEP if image.mode.startswith("I") or image.mode == "F" else _BYTES.get(image.mode, _COMPOSITED)
        if "transparency" in image.info:
            each = _COMPOSITED
        if image.format == "WEBP":
            each = max(each, _WEBP)
        if target_size is not None:
            side = 2 * max(target_size)
            image.draft(None, (side, side))
        return Header(upright, image.width * image.height, each + (_TURNED if turned else 0))
    return None


def largest_file(found: Sequence[Header]) -> tuple[int, int] | None:
    """The size of the largest image; None: there is none."""
    return max((one.size for one in found), key=lambda size: size[0] * size[1], default=None)
