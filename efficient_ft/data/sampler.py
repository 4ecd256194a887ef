"""The order of the images in an epoch, a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class CounterSampler(Sampler[tuple[int, int]]):
    """(epoch, index) pairs of one process's share of an epoch; the order depends on (seed, epoch) only.

    With `shuffle`, all processes have shares of equal length: the first images are repeated if `world` does not divide
    the number of images. Without, every image occurs once over all processes.

    Args:
        size: number of images.
        seed: of the order.
        rank: this process, 0 ≤ rank < world.
        world: number of processes.
        shuffle: False for evaluation: one fixed order for every seed and epoch.

    Attributes:
        epoch: the epoch of the next iteration, see `set_epoch`.
        start: number of samples that the *next* iteration skips, because an interrupted run has used them; 0 again
            afterwards. `len` stays that of the whole epoch.
    """

    def __init__(self, size: int, seed: int, rank: int = 0, world: int = 1, shuffle: bool = True) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self.size, self.seed, self.rank, self.world, self.shuffle = size, seed, rank, world, shuffle
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """Set the epoch of the next iteration. Lightning calls this."""
        self.epoch = epoch

    def __len__(self) -> int:
        if self.shuffle:
            return -(-self.size // self.world)
        return len(range(self.rank, self.size, self.world))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start, self.start = self.start, 0
        epoch = self.epoch if self.shuffle else 0
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
            order = np.resize(order, len(self) * self.world)  # repeats from the beginning
        else:
            # Fixed but shuffled: data sets are sorted by class, and a limited evaluation takes the first batches.
            order = np.random.default_rng(0).permutation(self.size)
        for index in order[self.rank :: self.world][start:].tolist():
            yield epoch, index
