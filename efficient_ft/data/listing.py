"""Lists of a data set: samples with labels, class names, splits. Nothing is decoded here."""

from __future__ import annotations

import hashlib
import os
from dataclasses import dataclass, field
from typing import Protocol, TypeVar

import numpy as np

from efficient_ft.data.paths import Paths

_TEST_SEED = 0  # independent of the run's seed: all runs on a data set test on the same images
_TEST_FRACTION = 0.2

#: Images of a split of which `Listing.digest` looks at the size: few, since a file system may be remote.
_DIGEST_IMAGES = 256


@dataclass
class Samples:
    """Images with labels; the images are file paths or pixels in memory.

    Args:
        images: paths of N files, or uint8 (N, H, W, 3).
        labels: int64 (N,).
    """

    images: Paths | np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    @property
    def is_files(self) -> bool:
        """True if the images are paths of files, False if they are pixels in memory."""
        return isinstance(self.images, Paths)

    def take(self, indices: np.ndarray) -> Samples:
        """Return the samples at `indices`, in that order."""
        images = self.images[indices] if isinstance(self.images, np.ndarray) else self.images.take(indices)
        return Samples(images, self.labels[indices])

    def content_digest(self) -> str:
        """16 hex digits that tell any change apart: of the pixels in memory, or each file's path, size and date."""
        found = hashlib.blake2b(label_bytes(self.labels), digest_size=8)
        if isinstance(self.images, np.ndarray):
            found.update(np.ascontiguousarray(self.images).data)
            return found.hexdigest()
        for path in self.images:
            try:
                status = os.stat(path)
                about = f"{status.st_size} {status.st_mtime_ns}"
            except OSError:  # reported, or left out, where it is read
                about = "?"
            found.update(f"{os.path.abspath(path)} {about}\n".encode(errors="surrogateescape"))
        return found.hexdigest()

    def join(self, other: Samples) -> Samples:
        """Concatenate with `other`; both hold paths."""
        assert isinstance(self.images, Paths)
        assert isinstance(other.images, Paths)
        return Samples(Paths.join([self.images, other.images]), np.concatenate([self.labels, other.labels]))


@dataclass
class Listing:
    """A data set with the splits of its publisher or of the user's folders.

    Args:
        class_names: by label.
        train: the training split.
        val: the official validation split; None: a fraction of `train` is held out.
        test: the test split; None if the data set has validation images only.
        recipe_trains_on_val: published results train on `train` and `val` together.
        notes: facts that a user should know, one sentence each.
        origins: short description of each split's source: ``Training/``, ``held out of Training/``.
        left_out: number of unused files by reason: ``not images: .txt ×3`` → 3.
    """

    class_names: list[str]
    train: Samples
    val: Samples | None = None
    test: Samples | None = None
    recipe_trains_on_val: bool = False
    notes: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """8 hex digits that tell two copies of a data set apart: other files, another resolution, other splits.

        Of class names, labels, and of up to 256 images spread evenly over each split: the size of a file in bytes, or
        the pixels in memory. A place or a file date does not count; a file replaced by one of the same size, or one
        that is not looked at, is not noticed.
        """
        found = hashlib.blake2b("\n".join(self.class_names).encode(), digest_size=4)
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if part is None or not len(part):
                continue
            found.update(f"{name} {len(part)}".encode())
            found.update(label_bytes(part.labels))
            for i in np.linspace(0, len(part) - 1, min(len(part), _DIGEST_IMAGES)).round().astype(int):
                image = part.images[i]
                found.update(image.tobytes() if isinstance(image, np.ndarray) else _size(image))
        return found.hexdigest()


class Labeled(Protocol):
    """Samples with one label each."""

    labels: np.ndarray

    def __len__(self) -> int: ...

    def take(self: _Samples, indices: np.ndarray) -> _Samples:
        """Return the samples at `indices`, in that order."""


_Samples = TypeVar("_Samples", bound=Labeled)


def stratified_split(samples: _Samples, fraction: float, seed: int) -> tuple[_Samples, _Samples]:
    """Hold out a fraction of every class.

    Of a class with at least two samples at least one is held out and at least one kept. The choice within a class
    depends on the seed and on that class's samples only: a new one in one class moves none of another.

    Args:
        samples: the samples to split.
        fraction: share held out of each class, in 0–1.
        seed: of the choice.

    Returns:
        (kept, held out), each in the order of `samples`.
    """
    held_out = np.zeros(len(samples), dtype=bool)
    by_class = np.argsort(samples.labels, kind="stable")
    ordered = samples.labels[by_class]
    starts = np.flatnonzero(ordered[1:] != ordered[:-1]) + 1
    labels = ordered[np.concatenate([[0], starts])] if len(ordered) else ordered
    del ordered  # of a million images, as all of this, tens of MB that would stand next to each other
    for label, positions in zip(labels.tolist(), np.split(by_class, starts) if len(labels) else [], strict=True):
        n = len(positions)
        count = min(max(int(n * fraction + 0.5), 1), n - 1)
        chosen = np.random.default_rng([seed, label]).permutation(n)[:count]
        held_out[positions[chosen]] = True
    return samples.take(np.flatnonzero(~held_out)), samples.take(np.flatnonzero(held_out))


def label_bytes(labels: np.ndarray) -> memoryview:
    """Return labels, integers or numbers, as bytes that are the same on every machine; on most machines no copy."""
    return np.ascontiguousarray(labels, dtype="<f8" if labels.dtype.kind == "f" else "<i8").data


def _size(path: str) -> bytes:
    try:
        return b"%d " % os.path.getsize(path)
    except OSError:  # reported, or left out, where it is read
        return b"? "


def hold_out_test(samples: _Samples) -> tuple[_Samples, _Samples]:
    """Hold out a fifth of every class as a test split, the same samples in all runs. Returns (train, test)."""
    return stratified_split(samples, _TEST_FRACTION, _TEST_SEED)
