"""scikit-learn's handwritten digits: a real data set that needs no files."""

from __future__ import annotations

import numpy as np

from efficient_ft.data.listing import Listing, Samples, hold_out_test


def read_digits() -> Listing:
    """List the 1,797 digits (8×8, 17 gray levels) of scikit-learn, with a fifth of every class for testing.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    gray = (digits.images * (255 / 16)).round().astype(np.uint8)
    samples = Samples(np.repeat(gray[..., None], 3, axis=-1), digits.target.astype(np.int64))
    train, test = hold_out_test(samples)
    origins = {"test": "a fifth of each class, the same for every seed"}
    return Listing([str(i) for i in range(10)], train, test=test, origins=origins)
