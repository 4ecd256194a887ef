"""Base class of data sets that are ready for training, with splits, loaders and summaries."""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, Protocol, TypeVar

import numpy as np
from PIL import Image
from torch import Tensor
from torch.utils.data import Dataset

from efficient_ft.config.identity import OWN_FOLDERS
from efficient_ft.config.schema import DataConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line, printable
from efficient_ft.data.contents import Contents, looked_at
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.images import Decoding
from efficient_ft.data.inspection import Inspection, SplitSummary, Summary, spread
from efficient_ft.data.listing import AnyListing
from efficient_ft.data.loader import Loader, LoadFailure, make_loader
from efficient_ft.data.reading import Reading
from efficient_ft.data.samplers import BalancedSampler, CounterSampler
from efficient_ft.data.splits import SPLITS
from efficient_ft.data.transforms import to_pictures

Split = Literal["val", "test"]


class Part(Protocol):
    """The samples of a split."""

    def __len__(self) -> int: ...

    def content_digest(self) -> str:
        """Return a hexadecimal digest of the samples."""


_Part = TypeVar("_Part", bound=Part)
_Dataset = TypeVar("_Dataset", bound=Dataset[Any])
Wrap = Callable[[_Dataset], Dataset[Any]]  # a function that converts a dataset before it is loaded


class OpenedData(ABC, Generic[_Part, _Dataset]):
    """A data set that is ready for training and evaluation.

    A subclass must set `_parts` to the result of `_choose_splits`, and implement `_dataset`, `inspect` and `reading`.

    Args:
        config: the `data` section of the configuration.
        seed: seed of the run, which determines the validation split, the order and the augmentation.
        class_names: class names, indexed by label (also an attribute).
        listing: the samples in each split.

    Attributes:
        best_split: split on which the best epoch is selected.
    """

    #: The task of the data set, and the noun for one sample.
    task: ClassVar[str]
    noun: ClassVar[str]
    #: Plural noun for the outputs of the network.
    outputs: ClassVar[str] = "classes"
    #: Options for decoding image files, or None if there are no image files.
    decoding: Decoding | None = None
    _parts: Mapping[str, _Part]

    def __init__(self, config: DataConfig, seed: int, class_names: Sequence[str], listing: AnyListing) -> None:
        self._config, self._seed, self._digest = config, seed, listing.digest()
        self.class_names, self._notes, self._warnings = list(class_names), list(listing.notes), list(listing.warnings)
        self._origins, self._left_out = dict(listing.origins), dict(listing.left_out)
        self._skipped: dict[str, str] = {}
        self.best_split: Split = config.select_best_on
        self._looked = looked_at(listing, os.path.expanduser(config.root))

    def _choose_splits(self, parts: dict[str, _Part], hold_out: Callable[..., tuple[_Part, _Part]]) -> dict[str, _Part]:
        """Return the samples of each split, and hold out validation samples if they are required.

        `hold_out(samples, fraction, seed)` must return the kept and the held-out samples.
        """
        noun, test = self.noun, "test" in parts
        if self.best_split == "test":
            if not test:
                raise SettingError("data.select_best_on", "test", "val", f"There are no test {noun}s.")
            self._notes.append(f"The best epoch is selected on the test {noun}s (data.select_best_on=test).")
        elif "val" not in parts:
            fraction, test = self._config.val_fraction, test and not self._config._stops_early
            other = f"select the best epoch on the test {noun}s with data.select_best_on=test."
            if not 0 < fraction < 1:
                known = f"> 0 and < 1 if the data set has no validation {noun}s"
                raise SettingError("data.val_fraction", fraction, known, f"Or {other}" if test else None)
            train, parts["val"] = hold_out(parts["train"], fraction, self._seed)
            if not len(parts["val"]):
                raise UserError(
                    f"None of the {len(train)} training {noun}s can be held out for validation, because no class has"
                    f" two {noun}s. Add {noun}s, so that at least one class has two training {noun}s"
                    + (f", or {other}" if test else ".")
                )
            parts["train"] = train
            self._origins["val"] = f"held out of train (data.val_fraction={fraction:g})"
        return {name: parts[name] for name in SPLITS if name in parts}

    def add_note(self, text: str) -> None:
        """Add a sentence to the notes for the user."""
        self._notes.append(text)

    def _note_skipped(self, kind: str) -> None:
        count = len(self._skipped)
        if count:
            samples = counted(count, f"{kind} {self.noun}")
            self._notes.append(f"{samples} {verb(count, 'is', 'are')} left out (data.on_corrupt=skip).")

    @abstractmethod
    def _dataset(self, split: str, *, training: bool) -> _Dataset:
        """Return the dataset of a split. The samples are augmented if `training` is True."""

    @abstractmethod
    def inspect(self, *, thorough: bool = False) -> Inspection:
        """Inspect the samples.

        By default, only headers and some samples are read, which takes about half a second. If `thorough` is True,
        every sample is read.
        """

    @abstractmethod
    def reading(self, *, training: bool) -> Reading:
        """Estimate the memory required to read batches.

        The estimate applies to training samples if `training` is True, and to the samples of all evaluated splits
        otherwise.
        """

    def inspection_bytes(self) -> int:
        """Estimate the memory in bytes that `inspect` requires if `thorough` is False."""
        return 0

    def _labels(self, part: _Part) -> np.ndarray | None:
        """Return the labels of a split as an int64 array of shape (N,), or None if the samples have no labels."""
        return None

    def use_batch_size(self, size: int) -> None:
        """Load batches of `size` samples."""
        self._config = self._config.model_copy(update={"batch_size": size})

    def _per_class(self, part: _Part) -> np.ndarray | None:
        """Return the number of samples of each class, int64 (classes,), or None if the samples have no classes."""
        labels = self._labels(part)
        return None if labels is None else np.bincount(labels, minlength=self.num_classes)

    def contents(self) -> Contents:
        """Read the files of the data set, and return their hashes."""
        return self._looked.read()

    @property
    def name(self) -> str:
        """Name of the data set, or path of the user's own folder."""
        return printable(self._config.root) if self._config.name in OWN_FOLDERS else self._config.name

    def summary(self, *, thorough: bool = False) -> Summary:
        """Return a summary of the data set. See `inspect` for the argument `thorough`."""
        splits = {}
        for split, part in self._parts.items():
            splits[split] = SplitSummary(len(part), self._origins.get(split, ""), self._per_class(part))
        about = (self.name, self.task, self.noun, self.class_names, splits, self.best_split)
        inspection = self.inspect(thorough=thorough)
        inspection.warnings[:0] = self._warnings
        return Summary(*about, inspection, self._left_out, self._skipped, self._notes, self.outputs)

    def training_batch(self, count: int) -> tuple[Any, list[int]]:
        """Load up to `count` training samples from as many classes as possible, transformed as in the first epoch.

        Return a batch in the format of the training loader, and the indices of its samples. Unreadable samples are
        skipped. Raise `UserError` if no sample can be read.
        """
        part = self._parts["train"]
        labels = self._labels(part)
        if labels is None:
            order = spread(len(part), count)
        else:  # order: the first sample of each class, then the second sample of each class, …
            order = np.argsort(labels, kind="stable")
            turns = np.arange(len(order)) - np.searchsorted(labels[order], labels[order], side="left")
            order = order[np.lexsort((labels[order], turns))]
        dataset: Any = self._dataset("train", training=True)
        chosen: list[int] = []
        failure = ""
        for index in map(int, order):
            sample = dataset.__getitems__([(0, index)])
            if isinstance(sample, LoadFailure):
                failure = failure or sample.message
            else:
                chosen.append(index)
            if len(chosen) == count:
                break
        if not chosen:
            raise UserError(failure)
        return dataset.__getitems__([(0, index) for index in chosen]), chosen

    def shown(self, inputs: Any, input: InputSpec) -> list[Any]:
        """Convert the inputs of a batch, as returned by a loader, to pictures or texts for display."""
        return to_pictures(inputs, input)

    def labeled(self, inputs: Any, targets: Tensor, input: InputSpec) -> list[tuple[Image.Image | str, str]]:
        """Convert each sample of a batch to a picture or text for display, and its label to text."""
        names = [plain_line(name) for name in self.class_names]
        return [(one, names[int(label)]) for one, label in zip(self.shown(inputs, input), targets, strict=True)]

    def legend(self) -> list[tuple[str, tuple[int, int, int]]]:
        """Return the name and RGB color of each class that `labeled` draws, or an empty list if there are none."""
        return []

    @property
    def parts(self) -> Mapping[str, OpenedData[Any, Any]]:
        """The data set of each task. The key of a single data set is ``""``."""
        return {"": self}

    @property
    def num_classes(self) -> int:
        """Number of classes."""
        return len(self.class_names)

    @property
    def splits(self) -> dict[str, int]:
        """Number of samples in each existing split (`train`, `val`, `test`)."""
        return {name: len(part) for name, part in self._parts.items()}

    def train_loader(self, rank: int = 0, world: int = 1, wrap: Wrap[_Dataset] | None = None) -> Loader:
        """Return a loader of shuffled, augmented batches for one of `world` processes.

        A batch contains `data.batch_size` samples; the last batch may be smaller. The sampler is a `CounterSampler`,
        which may skip samples at the end of an epoch. With ``data.sampler=balanced`` or ``sqrt``, the sampler is a
        `BalancedSampler`.

        Args:
            rank: rank of the process.
            world: number of processes.
            wrap: function that converts the dataset before it is loaded, or None to load the dataset unchanged.
        """
        size, part, kind = self._config.batch_size, self._parts["train"], self._config.sampler
        if kind == "shuffle":
            sampler = CounterSampler(len(part), self._seed, rank, world, batch_size=size)
        else:
            labels = self._labels(part)
            assert labels is not None, "`training.balance` rejects data without classes"
            sampler = BalancedSampler(labels, kind, self._seed, rank, world, batch_size=size)
        dataset = self._dataset("train", training=True)
        return make_loader(wrap(dataset) if wrap else dataset, sampler, self._config.num_workers, size)

    def eval_loader(self, split: Split, rank: int = 0, world: int = 1, wrap: Wrap[_Dataset] | None = None) -> Loader:
        """Return a loader of a split in a fixed order, without augmentation. See `train_loader` for the arguments.

        Each process loads different samples. Raise `UserError` if the data set does not have this split.
        """
        if split not in self._parts:
            have = [name for name in self._parts if name != "train"]
            raise UserError(f"This data set has no {split} split. It has {' and '.join(have)}.")
        sampler = CounterSampler(len(self._parts[split]), self._seed, rank, world, shuffle=False)
        batch_size = self._config.eval_batch_size or self._config.batch_size
        dataset = self._dataset(split, training=False)
        return make_loader(wrap(dataset) if wrap else dataset, sampler, self._config.num_workers, batch_size)

    def eval_loaders(self, split: Split, rank: int = 0, world: int = 1, **wrap: Any) -> list[Loader]:
        """Return the evaluation loader of each data set. A single data set has one loader (see `eval_loader`)."""
        return [self.eval_loader(split, rank, world, **wrap)]

    def keep_decoded(self, epochs: int) -> None:
        """Keep decoded images on disk for a run of `epochs` epochs, if the data set supports this.

        Raise `SettingError` if ``data.keep_decoded=on`` is not supported.
        """
        if self._config.keep_decoded == "on":
            raise SettingError("data.keep_decoded", "on", "auto or off for this data set")

    def decode(self, seconds: float) -> None:
        """Decode the images that `keep_decoded` keeps, for about `seconds` seconds. Later runs decode the others."""

    def class_sizes(self) -> np.ndarray | None:
        """Return the number of training samples of each class, int64 (C,), or None if a sample does not have a class.

        For example, the samples of a segmentation data set have several classes each.
        """
        labels = self._labels(self._parts["train"])
        return None if labels is None else np.bincount(labels, minlength=self.num_classes)

    def content_digest(self) -> str:
        """Return a digest of the training samples and of the samples on which the best epoch is selected."""
        return "".join(self._parts[split].content_digest() for split in ("train", self.best_split))

    def report(self) -> dict[str, Any]:
        """Return the record of the data: name, number of classes, splits, digest, skipped files and notes."""
        return {
            "name": self._config.name,
            "classes": self.num_classes,
            "splits": self.splits,
            "best_split": self.best_split,
            "digest": self._digest,
            "skipped_count": len(self._skipped),
            "skipped": {printable(path): reason for path, reason in self._skipped.items()},
            "notes": list(self._notes),
        }
