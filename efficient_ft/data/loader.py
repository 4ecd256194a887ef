"""Loading the images of a split: a dataset that augments by (seed, epoch, index), and the loader of its batches."""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, Sampler

from efficient_ft.core import stopping
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.data.decoded import DecodedImages
from efficient_ft.data.listing import Samples
from efficient_ft.data.paths import Paths
from efficient_ft.data.transforms import Transform

_CACHE_BYTES = 64 << 20  # resized images are cached in memory below this size


@dataclass
class LoadFailure:
    """A user error on its way out of a worker process; as an exception it would carry the worker's traceback."""

    message: str


class SplitDataset(Dataset[tuple[Tensor, int]]):
    """The images of a split by (epoch, index), augmented: float32 (C, H, W) and the label.

    Augmentation depends on (seed, epoch, index) only: not on the number of worker processes, the order of access or
    the state of any global generator. Small images that are in memory are resized once and cached.

    Args:
        samples: the split.
        transform: applied to each image.
        seed: of the augmentation.
        decoded: keeps the resized images of files; None: files are decoded whenever they are read.
    """

    def __init__(self, samples: Samples, transform: Transform, seed: int, decoded: DecodedImages | None = None) -> None:
        self._transform, self._seed, self._decoded = transform, seed, decoded
        self._labels = torch.from_numpy(samples.labels)
        self._paths: Paths | None = None
        self._pixels: Tensor | None = None
        self._resized = False
        if isinstance(samples.images, Paths):
            self._paths = samples.images
        else:
            pixels = samples.images
            height, width = transform.resize_size or pixels.shape[1:3]
            if len(pixels) * height * width * 3 <= _CACHE_BYTES:
                pixels = np.stack([np.asarray(transform.resize(Image.fromarray(p))) for p in pixels])
                self._resized = True
            # A tensor: spawned worker processes share its memory.
            self._pixels = torch.from_numpy(np.ascontiguousarray(pixels))

    def __len__(self) -> int:
        return len(self._labels)

    @property
    def labels(self) -> Tensor:
        """The label of every image, int64 (N,)."""
        return self._labels

    def _image(self, index: int) -> Image.Image:
        if self._pixels is not None:
            image = Image.fromarray(self._pixels[index].numpy())
            return image if self._resized else self._transform.resize(image)
        assert self._paths is not None
        kept = None if self._decoded is None else self._decoded.read(index)
        if kept is not None:
            return kept
        image = self._transform.resize(self._transform.read(self._paths[index]))
        if self._decoded is not None:
            self._decoded.keep(index, image)
        return image

    def _augmented(self, keys: list[tuple[int, int]]) -> list[Image.Image]:
        # torchvision's transforms draw from torch's CPU generator; its state is restored afterwards. Not through
        # fork_rng and manual_seed, which would also seed a GPU's generator.
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
        """Load one image.

        Raises:
            UserError: its file cannot be read.
        """
        image = self._transform.normalize(self._augmented([key]))[0]
        return image, int(self._labels[key[1]])

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Tensor, Tensor] | LoadFailure:
        """Load a batch: float32 (B, C, H, W) and int64 (B,), or the failure to read one of its files."""
        try:
            images = self._augmented(keys)
        except UserError as error:
            return LoadFailure(str(error))
        return self._transform.normalize(images), self._labels[[index for _, index in keys]]


def sample_seed(seed: int, epoch: int, index: int) -> int:
    """Return a 63-bit seed for one image in one epoch, the same on every machine."""
    digest = hashlib.blake2b(struct.pack("<qqq", seed, epoch, index), digest_size=8).digest()
    return int.from_bytes(digest, "little") >> 1


class Loader(DataLoader[tuple[Tensor, int]]):
    """A `DataLoader` that raises user errors of its worker processes without their tracebacks.

    No worker starts before the first batch is requested: Lightning creates the first iterator before it sets the epoch
    of a resumed run, and workers running by then would load the wrong epoch.
    """

    def __iter__(self) -> Iterator[Any]:  # type: ignore[override]
        """Iterate over the batches.

        Raises:
            UserError: an image cannot be read, or a worker process was killed.
        """
        batches = super().__iter__()
        try:
            for batch in batches:
                if isinstance(batch, LoadFailure):
                    raise UserError(batch.message)
                yield batch
        except (UserError, RuntimeError) as error:
            # End the workers now: the garbage collector may free their queues first and then wait five seconds for
            # each of them.
            self._iterator = None
            del batches
            refuse_killed_worker(error)
            raise


def refuse_killed_worker(error: BaseException) -> None:
    """Refuse to go on without a process that loads data.

    PyTorch notices its end by a signal, wherever the program is then: not only while it waits for a batch.

    Raises:
        KeyboardInterrupt, TerminatedRun: the same, after a signal that asked this process to end.
        UserError: `error` says that such a process was killed.
    """
    text = str(error)
    if "DataLoader worker" not in text or not ("killed by signal" in text or "exited unexpectedly" in text):
        return
    if stopping.asked:
        raise stopping.ending(stopping.asked[-1]) from None
    reason = "by another process" if "Terminated" in text else "usually for lack of memory"
    raise UserError(
        f"A worker process that loads data was killed, {reason} ({first_line(error)}). "
        "Reduce data.num_workers, or set data.num_workers=0."
    ) from error


def make_loader(dataset: Dataset[Any], sampler: Sampler[Any], num_workers: int, batch_size: int | None) -> Loader:
    """Create the loader of a dataset whose `__getitems__` (or, without a batch size, `__getitem__`) gives batches."""
    return Loader(
        dataset,
        batch_size=batch_size,
        sampler=sampler,
        num_workers=num_workers,
        persistent_workers=num_workers > 0,
        collate_fn=_no_collate,
        worker_init_fn=stopping.leave_to_parent,
        pin_memory=torch.cuda.is_available(),
    )


def _no_collate(batch: Any) -> Any:
    return batch
