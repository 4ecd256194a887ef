"""A small segmentation data set with bright squares and disks of two classes on a dark background."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image

NAMES = ("background", "square", "void", "disk")
#: Ids in the masks. The id 2 has no label.
BACKGROUND, SQUARE, VOID, DISK = range(4)


def picture(number: int, height: int = 48, width: int = 64) -> tuple[np.ndarray, np.ndarray]:
    """Return an image (H, W, 3) and its mask (H, W)."""
    random = np.random.default_rng(number)
    image = random.integers(0, 60, (height, width, 3))
    mask = np.full((height, width), BACKGROUND)
    y, x = np.mgrid[:height, :width]
    top, left = random.integers(0, height - 20), random.integers(0, width // 2 - 16)
    square = (abs(y - top - 8) < 8) & (abs(x - left - 8) < 8)
    cy, cx = random.integers(10, height - 10), random.integers(width // 2 + 8, width - 8)
    disk = (y - cy) ** 2 + (x - cx) ** 2 < 64
    image[square] += [150, 20, 20]
    image[disk] += [20, 20, 150]
    mask[square], mask[disk] = SQUARE, DISK
    mask[0] = VOID
    return image.astype(np.uint8), mask.astype(np.uint8)


def write_folder(root: Path, counts: dict[str, int], classes: bool = True, **size: int) -> Path:
    """Write images and masks. `counts` maps each split to a number. Files of the split "" are directly in `root`."""
    number = 0
    for split, count in counts.items():
        for inside in ("images", "masks"):
            (root / split / inside).mkdir(parents=True)
        for k in range(count):
            image, mask = picture(number, **size)
            Image.fromarray(image).save(root / split / "images" / f"{k:03}.jpg", quality=95)
            Image.fromarray(mask).save(root / split / "masks" / f"{k:03}.png")
            number += 1
    if classes:
        (root / "classes.txt").write_text("\n".join(NAMES) + "\n")
    return root
