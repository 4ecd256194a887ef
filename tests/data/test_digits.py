"""Tests of the digits in the package: values and splits."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest

from efficient_ft.data.digits import load_digits, read_digits


def test_the_digits_are_those_of_scikit_learn() -> None:
    images, labels = load_digits()
    assert (images.shape, images.dtype, int(images.max())) == ((1797, 8, 8), np.uint8, 16)
    assert (labels.shape, labels.dtype) == ((1797,), np.int64)
    datasets = pytest.importorskip("sklearn.datasets")
    expected = datasets.load_digits()
    assert np.array_equal(images, expected.images)
    assert np.array_equal(labels, expected.target)


def test_the_digits_are_the_same_without_scikit_learn() -> None:
    images, labels = load_digits()
    digest = hashlib.sha256(images.tobytes() + labels.tobytes()).hexdigest()
    assert digest == "65e5b4619795efb40c1082f4c350c049e4ad552200d369b6ae99e21eef5e72c5"


def test_a_fifth_of_each_class_is_the_test_set() -> None:
    listing = read_digits()
    assert listing.test is not None
    assert len(listing.train) + len(listing.test) == 1797
    assert abs(len(listing.test) - 0.2 * 1797) < 2
    assert np.bincount(listing.test.labels).min() >= 34
    assert isinstance(listing.train.images, np.ndarray)
    assert listing.train.images.shape[1:] == (8, 8, 3)
    assert listing.train.images.dtype == np.uint8
    assert listing.train.images.max() == 255
    images, labels = load_digits()
    real = {image.tobytes(): label for image, label in zip(images, labels, strict=True)}
    for image, label in zip(listing.test.images[:50], listing.test.labels[:50], strict=True):
        gray = np.round(np.asarray(image)[..., 0].astype(float) * 16 / 255).astype(np.uint8)
        assert real[gray.tobytes()] == label
