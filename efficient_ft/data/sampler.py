"""The order of the images in an epoch, a function of (seed, epoch)."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
from torch.utils.data import Sampler


class CounterSampler(Sampler[tuple[int, int]]):
    """(epoch, index) pairs of one process's share of an epoch; the order depends on (seed, epoch) only.

    Every image occurs at most once over all processes, whose shares differ by one image at most. With a `batch_size` a
    few images at the end of the order are left out where they would give a process one more batch than another, or a
    batch of a single image, on which BatchNorm fails.

    Args:
        size: number of images.
        seed: of the order.
        rank: this process, 0 ≤ rank < world.
        world: number of processes.
        shuffle: False for evaluation: one fixed order for every seed and epoch.
        batch_size: of each process, in training; None: all images are used.

    Attributes:
        used: number of images of an epoch, over all processes.
        epoch: the epoch of the next iteration, see `set_epoch`.
        start: number of samples that the *next* iteration skips, because an interrupted run has used them; 0 again
            afterwards. `len` stays that of the whole epoch.
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
        """Set the epoch of the next iteration. Lightning calls this."""
        self.epoch = epoch

    def __len__(self) -> int:
        return len(range(self.rank, self.used, self.world))

    def __iter__(self) -> Iterator[tuple[int, int]]:
        start, self.start = self.start, 0
        epoch = self.epoch if self.shuffle else 0
        if self.shuffle:
            order = np.random.default_rng([self.seed, epoch]).permutation(self.size)
        else:
            # Fixed but shuffled: data sets are sorted by class, and a limited evaluation takes the first batches.
            order = np.random.default_rng(0).permutation(self.size)
        for index in order[: self.used][self.rank :: self.world][start:]:  # a list of all would be five times the array
            yield epoch, int(index)


def _used(size: int, world: int, batch_size: int) -> int:
    """Number of images of which all processes make the same number of batches, none of a single image."""
    each, more = divmod(size, world)
    if each < batch_size:  # one batch each; too few to leave any out
        return size if each else 0
    last = each % batch_size
    if last == 1:
        return (each - 1) * world
    return each * world if last == 0 and more else size
