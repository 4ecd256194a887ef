"""Load the images of a split in batches. Augmentation is seeded by (seed, epoch, index)."""

from __future__ import annotations

import hashlib
import json
import logging
import math
import struct
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from efficient_ft.core import stopping
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.data.file_list import Paths
from efficient_ft.data.listing import Samples
from efficient_ft.data.row_store import RowStore, StoreFullError
from efficient_ft.data.transforms import Transform

log = logging.getLogger(__name__)

_FORMAT = 1  # version of the storage format, which must increase if the content of a store changes


class DecodedImages:
    """A store of the resized uint8 images of a split, in a subfolder of `root`.

    All runs that resize the same files to the same size share a store. If a file or the version of a decoder changes, a
    different store is used. The transform must resize all images to one size.

    Attributes:
        folder: path of the subfolder.
        bytes: total size of the images in bytes.
    """

    def __init__(self, root: Path, samples: Samples, transform: Transform) -> None:
        assert transform.resized_shape is not None
        self._shape = transform.resized_shape
        self._about = {
            "format": _FORMAT,
            "images": samples.content_digest(),
            "shape": self._shape,
            "interpolation": transform.input.interpolation,
            "pillow": PIL.__version__,
            "torchvision": torchvision.__version__,
        }
        if transform.decoding.value_range is not None:
            self._about["value_range"] = transform.decoding.value_range
        name = hashlib.blake2b(json.dumps(self._about, sort_keys=True).encode(), digest_size=8).hexdigest()
        self.folder, self._count = root / name, len(samples)
        self.bytes = self._count * math.prod(self._shape)

    @cached_property
    def _store(self) -> RowStore:
        return RowStore(self.folder, self._about, self._count, math.prod(self._shape))

    def opened(self) -> AbstractContextManager[None]:
        """Return a context manager that opens the files for several threads and closes them (`RowStore.opened`)."""
        return self._store.opened()

    def missing(self) -> list[int]:
        """Return the indices of the images that have not been stored."""
        return [int(index) for index in torch.nonzero(~self._store.written())]

    def read(self, index: int) -> Image.Image | None:
        """Return a resized image, or None if it has not been stored or is damaged."""
        found = self._store.read([index])
        return None if found is None else Image.fromarray(found.numpy().reshape(self._shape))

    def keep(self, index: int, image: Image.Image) -> None:
        """Store a resized image. If the disk is full, log a warning and store no further images."""
        if self._store.full:
            return
        pixels = torch.from_numpy(np.array(image).reshape(1, -1))
        try:
            self._store.write([index], pixels)
        except StoreFullError:
            self._store.full = True
            text = "The disk that contains %s is full. Images that are not stored are decoded in every epoch."
            log.warning(text, self.folder)


_CACHE_BYTES = 64 << 20  # maximum total size of the resized images that are cached in memory
_Sample = TypeVar("_Sample")


@dataclass
class LoadFailure:
    """The message of a `UserError` that was raised in a worker process.

    A worker returns this object instead of raising an exception, because PyTorch would add the traceback of the worker
    to the message.
    """

    message: str


class SplitDataset(Dataset[tuple[Tensor, int]]):
    """A dataset of augmented images, float32 (C, H, W), and their labels, indexed by (epoch, index).

    Augmentation depends only on (seed, epoch, index). The number of worker processes, the access order and the state of
    global random generators have no effect. Small images in memory are resized once and cached. Files are decoded
    whenever they are read, unless `decoded` contains the images. The attribute `labels` contains the labels of all
    images, int64 (N,).
    """

    def __init__(self, samples: Samples, transform: Transform, seed: int, decoded: DecodedImages | None = None) -> None:
        self._transform, self._seed, self._decoded = transform, seed, decoded
        self.labels = torch.from_numpy(samples.labels)
        self._images: Paths | Tensor
        self._resized = False
        if isinstance(samples.images, Paths):
            self._images = samples.images
        else:
            pixels = samples.images
            height, width = transform.resize_size or pixels.shape[1:3]
            if len(pixels) * height * width * 3 <= _CACHE_BYTES:
                pixels = np.stack([np.asarray(transform.resize(Image.fromarray(p))) for p in pixels])
                self._resized = True
            # The pixels are stored in a tensor, because spawned worker processes share the memory of tensors.
            self._images = torch.from_numpy(np.ascontiguousarray(pixels))

    def __len__(self) -> int:
        return len(self.labels)

    def _image(self, index: int) -> Image.Image:
        if isinstance(self._images, Tensor):
            image = Image.fromarray(self._images[index].numpy())
            return image if self._resized else self._transform.resize(image)
        kept = None if self._decoded is None else self._decoded.read(index)
        if kept is not None:
            return kept
        image = self._transform.resize(self._transform.read(self._images[index]))
        if self._decoded is not None:
            self._decoded.keep(index, image)
        return image

    def store(self, index: int) -> None:
        """Store a decoded image in `decoded`. Do nothing if the file cannot be read."""
        with suppress(UserError):
            self._image(index)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | LoadFailure:
        """Load images, float32 (B, C, H, W), and labels, int64 (B,). Return a `LoadFailure` if a file is unreadable."""
        try:
            images = load_seeded(self._seed, keys, lambda index: self._transform.augment(self._image(index)))
        except UserError as error:
            return LoadFailure(str(error))
        return self._transform.normalize(images), self.labels[[index for _, index in keys]]


def load_seeded(seed: int, keys: Sequence[tuple[int, int]], load: Callable[[int], _Sample]) -> list[_Sample]:
    """Load the sample of each key (epoch, index).

    Before a sample is loaded, torch's CPU generator is seeded with (seed, epoch, index). The state of the generator is
    restored at the end. The function `load` must load and augment the sample with the given index.
    """
    with torch.random.fork_rng(devices=[]):
        samples = []
        for epoch, index in keys:
            seed_cpu(seed, epoch, index)
            samples.append(load(index))
        return samples


def seed_cpu(*numbers: int, purpose: bytes = b"") -> None:
    """Seed torch's CPU generator with a hash of `numbers` and `purpose`, which is the same on all machines."""
    text = struct.pack(f"<{len(numbers)}q", *numbers)
    digest = hashlib.blake2b(text, digest_size=8, person=purpose).digest()
    # torch.manual_seed would also seed the generators of GPUs.
    torch.default_generator.manual_seed(int.from_bytes(digest, "little") >> 1)


class Loader(DataLoader[tuple[Tensor, int]]):
    """A `DataLoader` that raises user errors of worker processes without their tracebacks.

    Worker processes start when the first batch is requested, because Lightning creates the first iterator before it
    sets the epoch of a resumed run.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over the batches. Raise `UserError` if an image cannot be read or a worker process was killed."""
        batches = super().__iter__()
        try:
            for batch in batches:
                if isinstance(batch, LoadFailure):
                    raise UserError(batch.message)
                yield batch
        except (UserError, RuntimeError) as error:
            # Stop the worker processes here. Otherwise, the garbage collector could free the queues of the processes
            # first, and then wait five seconds for each process.
            self._iterator = None
            del batches
            refuse_killed_worker(error)
            raise


def refuse_killed_worker(error: BaseException) -> None:
    """Raise `UserError` if `error` reports that a worker process was killed.

    PyTorch raises such errors from a signal handler, so they may occur at any time.

    Raises:
        KeyboardInterrupt, TerminatedRun: If this process has received a signal to stop.
        UserError: If `error` reports that a worker process was killed.
    """
    text = str(error)
    if "DataLoader worker" not in text or not ("killed by signal" in text or "exited unexpectedly" in text):
        return
    if stopping.asked:
        raise stopping.ending(stopping.asked[-1]) from None
    reason = " by another process" if "Terminated" in text else ", probably because of a lack of memory"
    raise UserError(
        f"A worker process of the data loader was killed{reason} ({first_line(error)}). "
        "Reduce data.num_workers, or set data.num_workers=0."
    ) from error


def make_loader(dataset: Dataset[Any], sampler: Sampler[Any], num_workers: int, batch_size: int | None) -> Loader:
    """Create a loader for a dataset that returns complete batches."""
    return Loader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=_unchanged,
        worker_init_fn=stopping.leave_to_parent,
        pin_memory=torch.cuda.is_available(),
    )


def _unchanged(batch: Any) -> Any:
    return batch
