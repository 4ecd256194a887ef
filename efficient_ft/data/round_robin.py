"""Load several data sets in round-robin order, with one optimizer step for each task in turn.

Optimizer step k uses task k mod T of T tasks. The largest data set determines the number of rounds in an epoch. Smaller
data sets are repeated in a new order, even within an epoch. The order of the samples depends only on the seed and on
counters, so a resumed run continues with the next batch.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.utils.data import BatchSampler, Dataset

from efficient_ft.core.errors import UserError
from efficient_ft.data.image_data import ImageData
from efficient_ft.data.loader import Loader, LoadFailure, SplitDataset, make_loader
from efficient_ft.data.opened import Split
from efficient_ft.data.samplers import CounterSampler, EpochSampler


class RoundRobinData:
    """Image data sets of several tasks, with an interface similar to `ImageData`.

    Args:
        parts: data set of each task, in the order of training.
        grad_accum_steps: number of batches per optimizer step.

    Attributes:
        parts: data set of each task, in the order of training.
        best_split: split on which the best epoch is selected for all tasks.
    """

    def __init__(self, parts: Mapping[str, ImageData], grad_accum_steps: int) -> None:
        self.parts, self._grad_accum_steps = dict(parts), grad_accum_steps
        (self.best_split,) = {part.best_split for part in self.parts.values()}

    @property
    def class_names(self) -> dict[str, list[str]]:
        """Class names of each task."""
        return {task: part.class_names for task, part in self.parts.items()}

    @property
    def num_classes(self) -> dict[str, int]:
        """Number of classes of each task."""
        return {task: part.num_classes for task, part in self.parts.items()}

    def train_loader(self, rank: int = 0, world: int = 1) -> Loader:
        """Return a loader of batches (images, labels, task). The sampler of the loader is a `RoundRobinSampler`.

        All tasks share the worker processes. The number of processes is the maximum of `num_workers` over all tasks.
        Raise `UserError` if the training images of a task yield no batch.
        """
        loaders = {task: part.train_loader(rank, world) for task, part in self.parts.items()}
        for task, loader in loaders.items():
            if not len(loader):
                raise UserError(f"The training set of task {task} yields no batch. Add images to tasks.{task}.root.")
        dataset = _RoundRobinDataset({task: loader.dataset for task, loader in loaders.items()})  # type: ignore[misc]
        batches: Any = {task: loader.batch_sampler for task, loader in loaders.items()}
        workers = max(loader.num_workers for loader in loaders.values())
        return make_loader(dataset, RoundRobinSampler(batches, self._grad_accum_steps), workers, batch_size=None)

    def eval_loaders(self, split: Split, rank: int = 0, world: int = 1) -> list[Loader]:
        """Return the evaluation loaders in the order of the tasks. Raise `UserError` if a data set lacks this split."""
        return [part.eval_loader(split, rank, world) for part in self.parts.values()]

    def report(self) -> dict[str, Any]:
        """Return the reports of all tasks, and all notes. Each note begins with the name of its task."""
        reports = {task: part.report() for task, part in self.parts.items()}
        notes = [f"{task}: {note}" for task, report in reports.items() for note in report["notes"]]
        return {"tasks": reports, "notes": notes}


class RoundRobinSampler(EpochSampler[tuple[str, list[Any]]]):
    """A sampler that yields (task, keys of a batch) pairs for one process.

    Args:
        batches: batch sampler of each task. The `sampler` of each batch sampler must be a `CounterSampler`.
        grad_accum_steps: number of consecutive batches from the same task per optimizer step.
    """

    def __init__(self, batches: Mapping[str, BatchSampler], grad_accum_steps: int) -> None:
        self.batches, self.grad_accum_steps = dict(batches), grad_accum_steps
        self.rounds = max(-(-len(of_task) // grad_accum_steps) for of_task in self.batches.values())

    def __len__(self) -> int:
        return self.rounds * self.grad_accum_steps * len(self.batches)

    def __iter__(self) -> Iterator[tuple[str, list[Any]]]:
        start, self.start = self.start, 0
        tasks, in_a_row = list(self.batches), self.grad_accum_steps
        rounds, rest = divmod(start, in_a_row * len(tasks))
        streams = {}
        for number, task in enumerate(tasks):
            used = (self.epoch * self.rounds + rounds) * in_a_row + min(max(rest - number * in_a_row, 0), in_a_row)
            streams[task] = _endless(self.batches[task], used)
        for number in range(start, len(self)):
            task = tasks[number // in_a_row % len(tasks)]
            yield task, next(streams[task])


def _endless(batches: BatchSampler, used: int) -> Iterator[list[Any]]:
    sampler: Any = batches.sampler
    assert isinstance(sampler, CounterSampler)
    epoch, used = divmod(used, len(batches))
    while True:
        sampler.set_epoch(epoch)
        sampler.start = used * batches.batch_size
        yield from batches
        epoch, used = epoch + 1, 0


class _RoundRobinDataset(Dataset[Any]):
    def __init__(self, parts: Mapping[str, SplitDataset]) -> None:
        self._parts = dict(parts)

    def __getitem__(self, key: tuple[str, list[tuple[int, int]]]) -> tuple[Tensor, Tensor, str] | LoadFailure:
        task, keys = key
        batch = self._parts[task].__getitems__(keys)
        return batch if isinstance(batch, LoadFailure) else (*batch, task)
