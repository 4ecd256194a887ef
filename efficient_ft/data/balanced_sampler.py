"""A sampler that balances the classes of the training samples (``data.sampler``)."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from efficient_ft.data.loader import CounterSampler

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
