"""Decoded images on disk: each file of a split is decoded and resized once, by whichever run reads it first."""

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
    """The resized pixels of a split's files, uint8, read and written by index.

    One store serves every run that resizes the same files to the same size. It never holds pixels of other files, nor
    those that another version of the decoder would give.

    Args:
        root: the folder of all such stores.
        samples: the split; its images are files.
        transform: its `resize` gives the pixels, of one size.

    Attributes:
        folder: of this store.
        bytes: of all its images.
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
        """The resized image; None: it has not been kept yet, or is damaged."""
        found = self._store.read([index])
        return None if found is None else Image.fromarray(found.numpy().reshape(self._shape))

    def keep(self, index: int, image: Image.Image) -> None:
        """Keep a resized image. Once the disk is full this says so and keeps no more."""
        if self._full:
            return
        pixels = torch.from_numpy(np.array(image).reshape(1, -1))
        try:
            self._store.write([index], pixels)
        except StoreFullError:
            self._full = True
            log.warning(
                "The disk of %s is full. Images that are not kept there are decoded in every epoch.", self.folder
            )
