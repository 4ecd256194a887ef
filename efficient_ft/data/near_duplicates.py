"""Find images that are almost equal: re-encoded, resized or slightly retouched copies."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import numpy as np
from PIL import Image

#: Side of a thumbnail in pixels.
_SIDE = 9
#: Largest root mean square difference of two thumbnails, in levels of 255 and relative to the smaller contrast. Of
#: copies of photographs of 128 and 224 pixels, saved as JPEG of quality 30 to 60, or at half or 1.5 times the size,
#: 92 % to 100 % differ by less; different photographs do not. JPEG changes images of 32 pixels by more.
_LEVELS, _RELATIVE = 4.0, 0.08
#: Smallest contrast (standard deviation of a thumbnail), and largest ratio of two aspect ratios.
_CONTRAST, _ASPECT = 6.0, 1.05
#: Number of thumbnails compared at a time.
_BLOCK = 512


def thumbnail(image: Image.Image) -> np.ndarray:
    """Return a small copy of an RGB image for comparisons: uint8 (9 * 9 * 3,)."""
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)).ravel()


def near_pairs(thumbnails: Sequence[np.ndarray], sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield the indices of pairs of images that are almost equal.

    Images with little contrast are left out, since their thumbnails show nothing.

    Args:
        thumbnails: see `thumbnail`.
        sizes: (width, height) of the images.
    """
    pixels = np.asarray(thumbnails, dtype=np.float32).reshape(len(thumbnails), -1 if thumbnails else 1)
    contrast = pixels.std(axis=1)
    order = np.flatnonzero(contrast >= _CONTRAST)
    means = pixels.mean(axis=1)
    order = order[np.argsort(means[order], kind="stable")]
    pixels, means, contrast = pixels[order], means[order], contrast[order]
    aspect = np.log([width / height for width, height in (sizes[int(i)] for i in order)])
    squares = np.square(pixels).sum(axis=1)
    for start in range(0, len(order), _BLOCK):
        end = min(start + _BLOCK, len(order))
        # Means differ by at most the root mean square of the differences.
        last = int(np.searchsorted(means, means[end - 1] + _LEVELS, side="right"))
        distance = squares[start:end, None] + squares[None, start:last] - 2 * pixels[start:end] @ pixels[start:last].T
        distance = np.sqrt(np.maximum(distance, 0) / pixels.shape[1])
        least = np.minimum(contrast[start:end, None], contrast[None, start:last])
        near = (distance <= _LEVELS) & (distance <= _RELATIVE * least)
        rows, columns = np.nonzero(near)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if row < column and abs(aspect[start + row] - aspect[start + column]) <= np.log(_ASPECT):
                yield int(order[start + row]), int(order[start + column])
