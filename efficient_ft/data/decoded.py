"""Store decoded and resized images on disk, so that only the first run decodes each file."""

from __future__ import annotations

import hashlib
import json
import logging
import math
from functools import cached_property
from pathlib import Path

import numpy as np
import PIL
import torch
import torchvision
from PIL import Image

from efficient_ft.data.listing import Samples
from efficient_ft.data.row_store import RowStore, StoreFullError
from efficient_ft.data.transforms import Transform

log = logging.getLogger(__name__)

#: The format of a store. Increase it if the content of a store changes.
_FORMAT = 1


class DecodedImages:
    """A store of the resized uint8 images of a split.

    All runs that resize the same files to the same size share a store. Changed files and different decoder versions use
    a different store.

    Args:
        root: folder of all stores.
        samples: samples of the split, whose images are files.
        transform: transform whose `resize` returns images of one size.

    Attributes:
        folder: folder of this store.
        bytes: total size of the images.
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
        self._full = False

    @cached_property
    def _store(self) -> RowStore:
        return RowStore(self.folder, self._about, self._count, math.prod(self._shape))

    def read(self, index: int) -> Image.Image | None:
        """Return a resized image, or None if it has not been stored or is damaged."""
        found = self._store.read([index])
        return None if found is None else Image.fromarray(found.numpy().reshape(self._shape))

    def keep(self, index: int, image: Image.Image) -> None:
        """Store a resized image. If the disk is full, log a warning and store no further images."""
        if self._full:
            return
        pixels = torch.from_numpy(np.array(image).reshape(1, -1))
        try:
            self._store.write([index], pixels)
        except StoreFullError:
            self._full = True
            log.warning("The disk of %s is full. Further images are decoded in every epoch.", self.folder)
