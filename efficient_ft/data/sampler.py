"""A sampler whose order is a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class CounterSampler(Sampler[tuple[int, int]]):
    """Yield (epoch, index) pairs of one process in an order that depends only on (seed, epoch).

    Each image occurs at most once in all processes. The numbers of images per process differ by at most one. If
    `batch_size` is given, a few images at the end of the order are skipped, so that all processes have the same number
    of batches, and no batch contains a single image, for which BatchNorm fails.

    Args:
        size: number of images.
        seed: seed of the order.
        rank: rank of this process, 0 ≤ rank < world.
        world: number of processes.
        shuffle: True to shuffle each epoch differently; False for one fixed order in evaluation.
        batch_size: training batch size of each process; None to use all images.

    Attributes:
        used: number of images per epoch in all processes.
        epoch: epoch of the next iteration.
        start: number of samples that the next iteration skips, because an interrupted run has used these samples. It is
            reset afterwards and does not change `len`.
    """

    def __init__(
        self,
        size: int,
        seed: int,
        rank: int = 0,
        world: int = 1,
        shuffle: bool = True,
        batch_size: int | None = None,
    ) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self.used = size if batch_size is None else _used(size, world, batch_size)
        self.size, self.seed, self.rank, self.world, self.shuffle = size, seed, rank, world, shuffle
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Lightning calls this method."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self.used, self.world))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start, self.start = self.start, 0
        epoch = self.epoch if self.shuffle else 0
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        else:
            # A random order, because data sets are sorted by class and a limited evaluation uses the first batches.
            order = np.random.default_rng(0).permutation(self.size)
        for index in order[: self.used][self.rank :: self.world][start:]:  # a list would use five times the memory
            yield epoch, int(index)


def _used(size: int, world: int, batch_size: int) -> int:
    """Return the number of images that form equally many batches in all processes, and no batch of one image."""
    each, more = divmod(size, world)
    if each < batch_size:  # each process loads one batch, so no image is skipped
        return size if each else 0
    last = each % batch_size
    if last == 1:
        return (each - 1) * world
    return each * world if last == 0 and more else size
