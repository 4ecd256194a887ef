"""Several data sets, of which training takes a batch for one optimizer step after the other, in turn.

Step k belongs to task k mod the number of tasks, in their order. An epoch has as many rounds as the largest set needs
to be seen once; a smaller one starts anew, in a new order, as often as it is used up, also in the middle of an epoch.
All follows from counters: a resumed run continues with the batch that was next.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import BatchSampler, Dataset, Sampler

from efficient_ft.core.errors import UserError
from efficient_ft.data.loading import CountedImages, CounterSampler, Failure, ImageData, Loader, Split, as_it_comes


class TasksData:
    """Several data sets by the names of their tasks; what `ImageData` offers, for all of them.

    Args:
        parts: by task, in the order of the turns.
        accumulate: batches per optimizer step.

    Attributes:
        parts: as given.
        best_split: the split on which the best epoch is chosen, the same for all.
    """

    def __init__(self, parts: Mapping[str, ImageData], accumulate: int) -> None:
        self.parts, self._accumulate = dict(parts), accumulate
        (self.best_split,) = {part.best_split for part in self.parts.values()}

    @property
    def class_names(self) -> dict[str, list[str]]:
        return {task: part.class_names for task, part in self.parts.items()}

    @property
    def num_classes(self) -> dict[str, int]:
        return {task: part.num_classes for task, part in self.parts.items()}

    def train_loader(self, rank: int = 0, world: int = 1) -> Loader:
        """Batches (images, labels, task) in turn; `loader.sampler` is a `BatchesInTurn`.

        One set of worker processes, as many as the task that asks for most of them has.
        """
        loaders = {task: part.train_loader(rank, world) for task, part in self.parts.items()}
        workers = max(loader.num_workers for loader in loaders.values())
        for task, loader in loaders.items():
            if not len(loader):
                raise UserError(f"There is not one batch of training images of {task}; see tasks.{task}.batch_size.")
        return Loader(
            _Images({task: loader.dataset for task, loader in loaders.items()}),  # type: ignore[misc]
            batch_size=None,
            sampler=BatchesInTurn({task: loader.batch_sampler for task, loader in loaders.items()}, self._accumulate),  # type: ignore[misc]
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=as_it_comes,
            pin_memory=torch.cuda.is_available(),
        )

    def eval_loader(self, split: Split, rank: int = 0, world: int = 1) -> list[Loader]:
        """A loader for each task, in their order."""
        return [part.eval_loader(split, rank, world) for part in self.parts.values()]

    def report(self) -> dict[str, Any]:
        """`ImageData.report` by task, and their notes, each with its task."""
        told = {task: part.report() for task, part in self.parts.items()}
        return {"tasks": told, "notes": [f"{task}: {note}" for task, of in told.items() for note in of["notes"]]}


class BatchesInTurn(Sampler[tuple[str, list[Any]]]):
    """(task, keys of a batch) pairs of one process.

    Args:
        batches: by task: the batches of one pass over its images, over a `CounterSampler`.
        accumulate: so many batches of a task come one after another, for one optimizer step.

    Attributes:
        epoch: what `set_epoch` set.
        start: how many batches the *next* iteration leaves out, because they were seen before an interruption; 0 again
            afterwards. `len` stays that of the whole epoch.
    """

    def __init__(self, batches: Mapping[str, BatchSampler], accumulate: int) -> None:
        self.batches, self.accumulate = dict(batches), accumulate
        self.rounds = max(-(-len(of_task) // accumulate) for of_task in self.batches.values())
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; Lightning calls this by itself."""
        self.epoch = epoch

    def __len__(self) -> int:
        return self.rounds * self.accumulate * len(self.batches)

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        start, self.start = self.start, 0
        tasks, in_a_row = list(self.batches), self.accumulate
        rounds, rest = divmod(start, in_a_row * len(tasks))
        streams = {}
        for number, task in enumerate(tasks):
            seen = (self.epoch * self.rounds + rounds) * in_a_row + min(max(rest - number * in_a_row, 0), in_a_row)
            streams[task] = _from(self.batches[task], seen)
        for number in range(start, len(self)):
            task = tasks[number // in_a_row % len(tasks)]
            yield task, next(streams[task])


def _from(batches: BatchSampler, seen: int) -> Iterator[list[Any]]:
    """The batches of one pass after another without end, the first `seen` of them left out."""
    sampler: Any = batches.sampler
    assert isinstance(sampler, CounterSampler)
    epoch, seen = divmod(seen, len(batches))
    while True:
        sampler.set_epoch(epoch)
        sampler.start = seen * batches.batch_size
        yield from batches
        epoch, seen = epoch + 1, 0


class _Images(Dataset[Any]):
    """Whole batches of images by (task, keys)."""

    def __init__(self, parts: Mapping[str, CountedImages]) -> None:
        self._parts = dict(parts)

    def __getitem__(self, key: tuple[str, list[tuple[int, int]]]) -> tuple[Tensor, Tensor, str] | Failure:
        task, keys = key
        batch = self._parts[task].__getitems__(keys)
        return batch if isinstance(batch, Failure) else (*batch, task)
