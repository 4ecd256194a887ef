"""The digits of scikit-learn."""

from __future__ import annotations

import numpy as np

from efficient_ft.data.digits import read_digits


def test_digits_are_the_real_ones() -> None:
    from sklearn.datasets import load_digits

    listing = read_digits()
    assert listing.test is not None
    assert len(listing.train) + len(listing.test) == 1797
    assert abs(len(listing.test) - 0.2 * 1797) < 2
    counts = np.bincount(listing.test.labels)
    assert counts.min() >= 34
    assert isinstance(listing.train.images, np.ndarray)
    assert listing.train.images.shape[1:] == (8, 8, 3)
    assert listing.train.images.dtype == np.uint8
    assert listing.train.images.max() == 255
    real = {
        tuple(image.ravel().astype(int)): int(label) for image, label in zip(*load_digits(return_X_y=True), strict=True)
    }
    for image, label in zip(listing.test.images[:50], listing.test.labels[:50], strict=True):
        gray = np.round(np.asarray(image)[..., 0].astype(float) * 16 / 255).astype(int)
        assert real[tuple(gray.ravel())] == label
