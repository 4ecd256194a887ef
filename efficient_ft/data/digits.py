"""Handwritten digits: a small data set of real images that requires no download.

``digits.npz`` contains the test set of *Optical Recognition of Handwritten Digits* (E. Alpaydin, C. Kaynak, UCI Machine
Learning Repository, 1998, https://doi.org/10.24432/C50P49), licensed under CC BY 4.0. The test set contains 1,797
images of 8×8 pixels, with the same values as in ``sklearn.datasets.load_digits``. See NOTICE.
"""

from __future__ import annotations

from importlib.resources import files

import numpy as np

from efficient_ft.data.listing import Listing, Samples, hold_out_test


def load_digits() -> tuple[np.ndarray, np.ndarray]:
    """Load the images and labels of the digits.

    Returns:
        images: uint8 (1797, 8, 8), with gray levels from 0 to 16.
        labels: int64 (1797,), from 0 to 9.
    """
    with files("efficient_ft.data").joinpath("digits.npz").open("rb") as file, np.load(file) as arrays:
        return arrays["images"], arrays["labels"].astype(np.int64)


def read_digits() -> Listing:
    """List the digits as RGB images with values from 0 to 255. One fifth of each class is held out for testing."""
    images, labels = load_digits()
    gray = (images * (255 / 16)).round().astype(np.uint8)
    train, test = hold_out_test(Samples(np.repeat(gray[..., None], 3, axis=-1), labels))
    origins = {"test": "a fifth of each class, the same for every seed"}
    return Listing([str(i) for i in range(10)], train, test=test, origins=origins)
