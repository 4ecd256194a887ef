"""Lists of the samples of a data set, with labels, class names and splits. No file is decoded."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import numpy as np

from efficient_ft.data.file_list import Paths, size_and_time
from efficient_ft.data.inspection import spread
from efficient_ft.data.splits import SPLITS

#: Maximum number of files per split whose sizes are read for a digest. Reading more sizes would be slow on remote file
#: systems.
DIGEST_FILES = 256


def splits_of(listing: Any) -> dict[str, Any]:
    """Return a dictionary of the existing splits of a listing, in the order train, val, test."""
    return {name: part for name in SPLITS if (part := getattr(listing, name)) is not None}


def hash_files(hasher: Any, paths: Iterable[str]) -> str:
    """Update a hash with the path, size and modification time of each file, and return its hexadecimal digest."""
    for path in paths:
        about = " ".join(map(str, size_and_time(path) or "?"))
        hasher.update(f"{os.path.abspath(path)} {about}\n".encode(errors="surrogateescape"))
    return str(hasher.hexdigest())


@dataclass
class Samples:
    """Images with labels."""

    images: Paths | np.ndarray  # paths of N files, or the pixels of N images, uint8 (N, H, W, 3)
    labels: np.ndarray  # classes, int64 (N,); 0 or 1 for each label, float32 (N, C); or targets, float64 (N, T)

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Samples:
        """Return the samples at `indices`, in that order."""
        images = self.images[indices] if isinstance(self.images, np.ndarray) else self.images.take(indices)
        return Samples(images, self.labels[indices])

    def content_digest(self) -> str:
        """Return a digest (16 hex digits) of the labels and the images.

        The digest covers the pixels if the images are in memory, and the paths, sizes and modification times of the
        files otherwise.
        """
        hasher = hashlib.blake2b(label_bytes(self.labels), digest_size=8)
        if not isinstance(self.images, np.ndarray):
            return hash_files(hasher, self.images)
        hasher.update(np.ascontiguousarray(self.images).data)
        return hasher.hexdigest()

    def join(self, other: Samples) -> Samples:
        """Concatenate two sets of samples whose images are files."""
        assert isinstance(self.images, Paths)
        assert isinstance(other.images, Paths)
        return Samples(Paths.join([self.images, other.images]), np.concatenate([self.labels, other.labels]))


@dataclass(kw_only=True)
class AnyListing:
    """Base class of all listings, which contain the samples of each split and notes for the user."""

    notes: list[str] = field(default_factory=list)  # facts that a user should know, one sentence each
    warnings: list[str] = field(default_factory=list)  # properties that are likely mistakes, one sentence each
    origins: dict[str, str] = field(default_factory=dict)  # short description of the source of each split
    left_out: dict[str, int] = field(default_factory=dict)  # number of unused files, keyed by the reason

    def digest(self) -> str:
        """Return a hexadecimal digest of the listed samples."""
        raise NotImplementedError


@dataclass
class Listing(AnyListing):
    """The samples of an image data set in each official or user-defined split."""

    class_names: list[str]  # class names, indexed by label
    train: Samples  # training split
    val: Samples | None = None  # official validation split; if None, a fraction of `train` is held out
    test: Samples | None = None  # test split, or None if the data set has only validation images
    recipe_trains_on_val: bool = False  # True if published networks were trained on both `train` and `val`

    def digest(self) -> str:
        """Return a digest (8 hex digits) of the class names, the labels and the images.

        For at most 256 images of each split, the digest includes the pixels (for images in memory) or the file size.
        Paths and modification times have no effect on the digest. If a file is replaced with a different file of equal
        size, the digest does not change.
        """
        hasher = hashlib.blake2b("\n".join(self.class_names).encode(), digest_size=4)
        for name, part in splits_of(self).items():
            if not len(part):
                continue
            hasher.update(f"{name} {len(part)}".encode())
            hasher.update(label_bytes(part.labels))
            for i in spread(len(part), DIGEST_FILES):
                image = part.images[i]
                if isinstance(image, np.ndarray):
                    hasher.update(image.tobytes())
                else:
                    hasher.update(f"{(size_and_time(image) or '?')[0]} ".encode())
        return hasher.hexdigest()


class Labeled(Protocol):
    """Samples that have one label each. The labels are an int64 array (N,)."""

    labels: np.ndarray

    def __len__(self) -> int: ...

    def take(self: _Samples, indices: np.ndarray) -> _Samples:
        """Return the samples at `indices`, in that order."""


_Samples = TypeVar("_Samples", bound=Labeled)


def stratified_split(
    samples: _Samples, fraction: float, seed: int, groups: np.ndarray | None = None
) -> tuple[_Samples, _Samples]:
    """Hold out a fraction of every class, and return the kept and the held-out samples in the order of `samples`.

    If a class has at least two samples, at least one sample is held out and at least one sample is kept. The choice
    within a class depends only on the seed and on the samples of this class. If `groups`, int64 (N,), is given, a
    fraction of every group is held out instead.
    """
    labels = samples.labels if groups is None else groups
    held_out = np.zeros(len(samples), dtype=bool)
    by_class = np.argsort(labels, kind="stable")
    starts = np.flatnonzero(np.diff(labels[by_class])) + 1
    for positions in np.split(by_class, starts) if len(samples) else []:
        label = int(labels[positions[0]])
        n = len(positions)
        count = min(max(int(n * fraction + 0.5), 1), n - 1)
        chosen = np.random.default_rng([seed, label]).permutation(n)[:count]
        held_out[positions[chosen]] = True
    return samples.take(np.flatnonzero(~held_out)), samples.take(np.flatnonzero(held_out))


def label_bytes(labels: np.ndarray) -> memoryview:
    """Return integer or floating-point labels as little-endian bytes, usually without a copy."""
    return np.ascontiguousarray(labels, dtype="<f8" if labels.dtype.kind == "f" else "<i8").data


def hold_out_test(samples: _Samples, groups: np.ndarray | None = None) -> tuple[_Samples, _Samples]:
    """Hold out one fifth of every class or group for testing, and return (train, test). All runs use the same split."""
    return stratified_split(samples, fraction=0.2, seed=0, groups=groups)
