"""Data sets opened for training: splits, the sampler that counts, and the loaders.

Shuffling and augmentation are functions of (seed, epoch, index) and of nothing else: not of the number of
worker processes, nor of the order of access, nor of any global generator's state.
"""

from __future__ import annotations

import hashlib
import os
import struct
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler
from tqdm import tqdm

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data.fetch import fetch
from efficient_ft.data.images import Transform, read_image, shown
from efficient_ft.data.sources import (
    LISTED,
    Listing,
    Samples,
    Source,
    folder_classes,
    missing_folder,
    read_digits,
    read_folder,
    read_listed,
    split_off,
)

if TYPE_CHECKING:
    from efficient_ft.config import DataConfig

Split = Literal["val", "test"]
_KEEP_BYTES = 64 << 20  # resized images are kept in memory below this


def missing_data(config: DataConfig) -> str | None:
    """None if the data are there, or can be fetched now; else one message of what to put where, and what to use
    instead. Answers within 8 seconds, fetches nothing."""
    if config.name == "digits":
        return None
    if config.name == "folder":
        return missing_folder(Path(config.root).expanduser())
    source = _source(config)
    return source.missing(config.name, source.root(config.root), config.download)


def class_count(config: DataConfig) -> int | None:
    """How many classes `config` has, known without its images; None for a folder that is not there."""
    if config.name == "digits":
        return 10
    if config.name == "folder":
        return folder_classes(Path(config.root).expanduser())
    return _source(config).classes


def _source(config: DataConfig) -> Source:
    if config.name not in LISTED:
        raise SettingError("data.name", config.name, ["folder", "digits", *LISTED])
    return LISTED[config.name]


def open_data(config: DataConfig, input: InputSpec, seed: int) -> ImageData:
    """Fetch if need be, read the lists, split, and make ready for loading.

    Args:
        config: the `data` part of the configuration.
        input: what the network takes.
        seed: of the run: it decides the validation split, the order and the augmentation.

    Raises:
        UserError: the data are missing, damaged, or cannot be split as asked.
    """
    if config.name == "digits":
        listing = read_digits()
    elif config.name == "folder":
        listing = read_folder(Path(config.root).expanduser())
    else:
        source = _source(config)
        root = source.root(config.root)
        problem = source.missing(config.name, root, config.download)
        if problem is not None:
            raise UserError(problem)
        fetch(source.needed(root), root)
        listing = read_listed(config.name, root)
    return ImageData(listing, config, input, seed)


class ImageData:
    """A data set ready for training and evaluation.

    Attributes:
        class_names: by label.
        splits: the number of images of each split there is: `train`, and `val` and/or `test`.
        best_split: the split on which the best epoch is chosen.
        transform_eval: a PIL image or a path → float32 (C, H, W), as evaluation sees it.
    """

    def __init__(self, listing: Listing, config: DataConfig, input: InputSpec, seed: int) -> None:
        augment = config.augment
        self._config, self._seed = config, seed
        self._train_transform = Transform(input, augment.name, augment.scale, augment.flip, augment.resize)
        self.transform_eval = Transform(input)
        self.class_names = list(listing.class_names)
        self._notes = list(listing.notes)
        self._skipped: dict[str, str] = {}
        if config.on_corrupt == "skip":
            listing = self._without_corrupt(listing)
        self.best_split: Split = config.select_best_on
        self._parts = self._split(listing)
        train = len(self._parts["train"])
        if train < config.batch_size:
            self._notes.append(f"Batches hold {train} images, all there are, not data.batch_size={config.batch_size}.")

    @property
    def num_classes(self) -> int:
        return len(self.class_names)

    @property
    def splits(self) -> dict[str, int]:
        return {name: len(part) for name, part in self._parts.items()}

    def _split(self, listing: Listing) -> dict[str, Samples]:
        config = self._config
        train, val, test = listing.train, listing.val, listing.test
        if self.best_split == "test":
            if test is None:
                raise SettingError("data.select_best_on", "test", ["val"], "There are no test images.")
            if val is not None and listing.recipe_trains_on_val:
                train, val = train.join(val), None
            # nothing is chosen on validation images, so none are taken from training
            self._notes.append("The best epoch is chosen on the test images (data.select_best_on=test).")
        elif val is None:
            if not 0 < config.val_fraction < 1:
                raise SettingError(
                    "data.val_fraction",
                    config.val_fraction,
                    "between 0 and 1: there are no validation images of their own",
                    "Or choose the best epoch on the test images: data.select_best_on=test.",
                )
            train, val = split_off(train, config.val_fraction, self._seed)
            if not len(val):
                raise UserError(
                    "Every class has a single training image: none can be held out for validation. Add images, or "
                    "choose the best epoch on the test images: data.select_best_on=test."
                )
        parts = {"train": train, "val": val, "test": test}
        return {name: part for name, part in parts.items() if part is not None}

    def _without_corrupt(self, listing: Listing) -> Listing:
        parts: dict[str, Any] = {}
        for name in ("train", "val", "test"):
            part: Samples | None = getattr(listing, name)
            if part is not None and isinstance(part.images, list):
                bad = unreadable(part.images, name)
                self._skipped.update(bad)
                part = part.take(np.asarray([i for i, p in enumerate(part.images) if p not in bad], dtype=np.int64))
            parts[name] = part
        left = set(parts["train"].labels.tolist())
        gone = [name for label, name in enumerate(listing.class_names) if label not in left]
        if gone:
            raise UserError(f"No readable training image is left of the class {gone[0]!r} (data.on_corrupt=skip).")
        for name in ("val", "test"):
            if parts[name] is not None and not len(parts[name]):
                raise UserError(f"No readable image is left in the {name} split (data.on_corrupt=skip).")
        if self._skipped:
            self._notes.append(f"{len(self._skipped)} images that cannot be read are left out (data.on_corrupt=skip).")
        return replace(listing, **parts)

    def train_loader(self, rank: int = 0, world: int = 1) -> Loader:
        """Shuffled, augmented batches of `data.batch_size` for one of `world` processes.

        `loader.sampler` is a `CounterSampler`. The last batch may be smaller; one of a single image, on which
        BatchNorm fails, is left out.
        """
        sampler = CounterSampler(len(self._parts["train"]), self._seed, rank, world)
        size = self._config.batch_size
        drop_last = len(sampler) > size and len(sampler) % size == 1
        images = CountedImages(self._parts["train"], self._train_transform, self._seed)
        return self._loader(images, sampler, size, drop_last)

    def eval_loader(self, split: Split, rank: int = 0, world: int = 1) -> Loader:
        """Batches of a split in one fixed order, each image once over all processes, not augmented."""
        if split not in self._parts:
            have = [name for name in self._parts if name != "train"]
            raise UserError(f"This data set has no {split} images; it has {' and '.join(have)} images.")
        part = self._parts[split]
        sampler = CounterSampler(len(part), self._seed, rank, world, shuffle=False)
        images = CountedImages(part, self.transform_eval, self._seed)
        return self._loader(images, sampler, self._config.eval_batch_size or self._config.batch_size, False)

    def _loader(self, images: CountedImages, sampler: CounterSampler, batch_size: int, drop_last: bool) -> Loader:
        workers = self._config.num_workers
        return Loader(
            images,
            batch_size=batch_size,
            sampler=sampler,
            drop_last=drop_last,
            num_workers=workers,
            persistent_workers=workers > 0,
            collate_fn=as_it_comes,
            pin_memory=torch.cuda.is_available(),
        )

    def report(self) -> dict[str, Any]:
        """What was done to the data, in plain containers: sizes, the split of the choice, corrupt files left out
        (`skipped`: path → reason), and notes for a person."""
        return {
            "name": self._config.name,
            "classes": self.num_classes,
            "splits": self.splits,
            "best_split": self.best_split,
            "skipped_count": len(self._skipped),
            "skipped": {shown(path): reason for path, reason in self._skipped.items()},
            "notes": list(self._notes),
        }


def unreadable(paths: list[str], what: str = "") -> dict[str, str]:
    """Decode every file; path → reason of those that cannot be read.

    Only a full decode finds a truncated file, so this costs about as much as one epoch's loading. Threads
    are enough: Pillow decodes outside of Python's lock.
    """

    def problem(path: str) -> str | None:
        try:
            read_image(path)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        looked = tqdm(
            pool.map(problem, paths), total=len(paths), desc=f"reading {what} images", leave=False, disable=None
        )
        return {path: reason for path, reason in zip(paths, looked, strict=True) if reason is not None}


class CounterSampler(Sampler[tuple[int, int]]):
    """(epoch, index) pairs of one process's share of an epoch; the order depends on (seed, epoch) alone.

    With `shuffle`, shares are of equal length: the first images are repeated where `world` does not divide
    the number of images. Without, every image occurs once over all processes.

    Args:
        size: number of images.
        seed: of the order.
        rank: this process, 0 ≤ rank < world.
        world: number of processes.
        shuffle: false for evaluation: one fixed order, whatever the seed and the epoch.

    Attributes:
        epoch: what `set_epoch` set.
        start: how many of this process's samples the *next* iteration leaves out, because they were seen before
            an interruption; 0 again afterwards. `len` stays that of the whole epoch.
    """

    def __init__(self, size: int, seed: int, rank: int = 0, world: int = 1, shuffle: bool = True) -> None:
        assert 0 <= rank < world, f"rank {rank} of {world}"
        self.size, self.seed, self.rank, self.world, self.shuffle = size, seed, rank, world, shuffle
        self.epoch = 0
        self.start = 0

    def set_epoch(self, epoch: int) -> None:
        """The epoch of the next iteration; Lightning calls this by itself."""
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
            # the same in every epoch, but mixed: data come sorted by class, and a limited evaluation sees the first
            order = np.random.default_rng(0).permutation(self.size)
        for index in order[self.rank :: self.world][start:].tolist():
            yield epoch, index


@dataclass
class Failure:
    """A user's mistake on its way out of a worker process, where an exception would drag a traceback along."""

    message: str


class CountedImages(Dataset[tuple[Tensor, int]]):
    """Images by (epoch, index) → (float32 (C, H, W), label); whole batches at once for the loader.

    Small images in memory are resized once and kept.
    """

    def __init__(self, samples: Samples, transform: Transform, seed: int) -> None:
        self._transform, self._seed = transform, seed
        self._labels = torch.from_numpy(samples.labels)
        self._paths: list[str] | None = None
        self._pixels: Tensor | None = None
        self._resized = False
        if isinstance(samples.images, list):
            self._paths = samples.images
        else:
            pixels = samples.images
            height, width = transform.resized or pixels.shape[1:3]
            if len(pixels) * height * width * 3 <= _KEEP_BYTES:
                pixels = np.stack([np.asarray(transform.resize(Image.fromarray(p))) for p in pixels])
                self._resized = True
            # a tensor: worker processes that are spawned share its memory
            self._pixels = torch.from_numpy(np.ascontiguousarray(pixels))

    def __len__(self) -> int:
        return len(self._labels)

    def _image(self, index: int) -> Image.Image:
        if self._pixels is not None:
            image = Image.fromarray(self._pixels[index].numpy())
            return image if self._resized else self._transform.resize(image)
        assert self._paths is not None
        return self._transform.resize(read_image(self._paths[index], least=self._transform.resized))

    def _augmented(self, keys: list[tuple[int, int]]) -> list[Image.Image]:
        # torchvision's transforms draw from torch's CPU generator; it is put back as it was. Not by fork_rng
        # and manual_seed, which would also seed a GPU's generator.
        state = torch.default_generator.get_state()
        try:
            images = []
            for epoch, index in keys:
                torch.default_generator.manual_seed(sample_seed(self._seed, epoch, index))
                images.append(self._transform.augment(self._image(index)))
            return images
        finally:
            torch.default_generator.set_state(state)

    def __getitem__(self, key: tuple[int, int]) -> tuple[Tensor, int]:
        image = self._transform.normalise(self._augmented([key]))[0]
        return image, int(self._labels[key[1]])

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | Failure:
        """A batch: float32 (B, C, H, W), int64 (B,)."""
        try:
            images = self._augmented(keys)
        except UserError as error:
            return Failure(str(error))
        return self._transform.normalise(images), self._labels[[index for _, index in keys]]


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """A seed of 63 bits for one image in one epoch, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


def as_it_comes(batch: Any) -> Any:
    return batch


class Loader(DataLoader[tuple[Tensor, int]]):
    """A loader whose user errors arrive as such from worker processes, without their tracebacks.

    Iterating starts nothing before the first batch is asked for: Lightning makes the first iterator before it
    sets a resumed run's epoch, and workers that had started by then would load the wrong one.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        batches = super().__iter__()
        try:
            for batch in batches:
                if isinstance(batch, Failure):
                    raise UserError(batch.message)
                yield batch
        except (UserError, RuntimeError) as error:
            # End the workers now. Left to the garbage collector, which may take their queues first, they would
            # be waited for five seconds each.
            self._iterator = None
            del batches
            if isinstance(error, UserError) or "DataLoader worker" not in str(error):
                raise
            raise UserError(
                f"A process that loads images was ended from outside, mostly for want of memory ({error}). "
                "Use fewer with data.num_workers, or none: data.num_workers=0."
            ) from error
