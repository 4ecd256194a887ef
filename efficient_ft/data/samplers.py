"""Samplers of the loaders. The order of the samples depends only on the seed and on counters."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TypeVar

import numpy as np
from torch.utils.data import Sampler

_Key = TypeVar("_Key")


class EpochSampler(Sampler[_Key]):
    """A sampler whose order depends on the epoch.

    Attributes:
        epoch: epoch of the next iteration.
        start: number of keys that the next iteration skips, because an interrupted run has already used these keys.
            `start` is reset to 0 when the iteration starts, and does not affect `len`.
    """

    epoch = 0
    start = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Lightning calls this method."""
        self.epoch = epoch


class CounterSampler(EpochSampler[tuple[int, int]]):
    """A sampler that yields the (epoch, index) pairs of one process in an order that depends only on (seed, epoch).

    In each epoch, each image is used by at most one process. The numbers of images per process differ by at most one.
    If `batch_size` is given, a few images at the end of the order are skipped, so that all processes have the same
    number of batches. This also avoids a last batch of a single image, for which BatchNorm fails.

    Args:
        size: number of images.
        seed: seed of the random order.
        rank: rank of this process, 0 ≤ rank < world.
        world: number of processes.
        shuffle: if True, shuffle the images differently in each epoch. If False, use the same order in each epoch, for
            evaluation.
        batch_size: training batch size of each process, or None to use all images.

    Attributes:
        used: number of images that all processes together use in an epoch.
    """

    def __init__(
        self, size: int, seed: int, rank: int = 0, world: int = 1, shuffle: bool = True, batch_size: int | None = None
    ) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self.used = size if batch_size is None else _used(size, world, batch_size)
        self.size, self.seed, self.rank, self.world, self.shuffle = size, seed, rank, world, shuffle

    def __len__(self) -> int:
        return len(range(self.rank, self.used, self.world))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start, self.start = self.start, 0
        epochs, indices = self._keys(self.epoch if self.shuffle else 0)
        mine = slice(self.rank, self.used, self.world)
        for epoch, index in zip(epochs[mine][start:], indices[mine][start:], strict=True):  # lists need more memory
            yield int(epoch), int(index)

    def _keys(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        """Return the keys of all processes in an epoch as two arrays (`size`,): epochs and indices."""
        # Without shuffling, the order is also random, because data sets are often sorted by class and a limited
        # evaluation uses only the first batches.
        order = np.random.default_rng([self.seed, epoch] if self.shuffle else 0).permutation(self.size)
        return np.broadcast_to(np.int64(epoch), self.size), order


def _used(size: int, world: int, batch_size: int) -> int:
    """Return the number of images that all processes together use in an epoch.

    With this number, all processes have the same number of batches, and a last batch of a single image is avoided.
    """
    each, more = divmod(size, world)
    if each < batch_size:  # each process loads one batch, so no image is skipped
        return size if each else 0
    last = each % batch_size
    if last == 1:
        return (each - 1) * world
    return each * world if last == 0 and more else size


#: Mapping from values of ``data.sampler`` to the exponent a. A class with n samples is drawn in proportion to n ** a.
EXPONENTS: Mapping[str, float] = {"balanced": 0.0, "sqrt": 0.5}


def class_shares(sizes: np.ndarray, sampler: str) -> np.ndarray:
    """Return the share of each class in an epoch, float64 (C,).

    `sizes` is the number of training samples of each class, int64 (C,). A class without samples has the share 0.
    """
    weights = np.where(sizes > 0, sizes.astype(np.float64) ** EXPONENTS[sampler], 0.0)
    shares: np.ndarray = weights / weights.sum()
    return shares


class BalancedSampler(CounterSampler):
    """A sampler that draws as many samples per epoch as the training split has, with balanced classes.

    The number of draws of a class per epoch differs by less than 2 from its share of the epoch. The samples of a class
    are drawn in turn, across epochs, and the order within an epoch is random. A sample of a small class is therefore
    drawn several times per epoch, and no sample of a class is drawn again before all others were drawn.

    The sampler yields pairs (turn, index). The turn is the number of earlier draws of the sample, and replaces the
    epoch of `CounterSampler`. Each draw thus has another augmentation, or another view of the stored features.

    Args:
        labels: class of each training sample, int64 (N,).
        sampler: value of the setting ``data.sampler``: balanced or sqrt.
        seed, rank, world, batch_size: see `CounterSampler`.
    """

    def __init__(
        self, labels: np.ndarray, sampler: str, seed: int, rank: int = 0, world: int = 1, batch_size: int | None = None
    ) -> None:
        super().__init__(len(labels), seed, rank, world, batch_size=batch_size)
        order = np.random.default_rng([seed, len(labels), 1]).permutation(len(labels))
        self._by_class = order[np.argsort(labels[order], kind="stable")]
        self._sizes = np.bincount(labels)
        #: Upper limit of each class in the cumulative distribution of the classes. The last limit is exactly 1.
        self._limits = np.minimum(class_shares(self._sizes, sampler).cumsum(), 1.0)
        self._limits[np.flatnonzero(self._sizes)[-1] :] = 1.0

    def _drawn(self, epoch: int) -> np.ndarray:
        """Return the number of draws of each class before an epoch, int64 (C,). The sum is the size of all epochs."""
        return np.diff(np.rint(epoch * self.size * self._limits), prepend=0.0).astype(np.int64)

    def _keys(self, epoch: int) -> tuple[np.ndarray, np.ndarray]:
        first = self._drawn(epoch)
        counts = self._drawn(epoch + 1) - first
        starts = self._sizes.cumsum() - self._sizes
        draws = np.arange(self.size) + np.repeat(first - (counts.cumsum() - counts), counts)
        turns, places = np.divmod(draws, np.repeat(self._sizes, counts))
        indices = self._by_class[np.repeat(starts, counts) + places]
        order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        return turns[order], indices[order]
