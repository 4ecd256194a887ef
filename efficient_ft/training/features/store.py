"""Stored features of the splits of a run.

A row of a store contains the features of one view of an image. In segmentation, a row also contains the mask of this
view, so that neither the image nor its mask is decoded again. The row of a text also contains its attention mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Dataset

from efficient_ft.core.terminal import shown_path
from efficient_ft.core.tokenizer import padded_length
from efficient_ft.data.loader import LoadFailure
from efficient_ft.data.row_store import RowStore, StoreFullError
from efficient_ft.models.prefix import KEPT_INPUTS, FrozenPrefix
from efficient_ft.models.prefix_lengths import PrefixLengths
from efficient_ft.record.results import FeaturesReport
from efficient_ft.task import Inputs
from efficient_ft.training.features.row_form import RowForm
from efficient_ft.training.output.console import say

#: Key of the stored features in a batch of texts, which also contains the attention mask.
_STORED = "stored"


def is_stored(inputs: Inputs) -> bool:
    """Return True if the inputs of a batch are stored features."""
    return _STORED in inputs if isinstance(inputs, Mapping) else inputs.dtype == torch.uint8


class FeatureDataset(Dataset[Any]):
    """A data set whose samples are stored features, or images or texts if the features are not stored yet.

    Keys are pairs (epoch, index). Epoch e uses view e mod `SplitFeatures.views`.
    """

    def __init__(self, images: Any, features: SplitFeatures) -> None:
        self._images, self._features = images, features

    def __len__(self) -> int:
        return len(self._images)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[Inputs, Tensor, Tensor] | LoadFailure:
        """Load a batch (inputs, targets, rows). If a file cannot be read, return the failure instead.

        If all features of the batch are stored, the inputs are stored features (see `SplitFeatures.load`). Otherwise,
        the inputs are images, float32 (B, C, H, W), or texts. The targets have the format of the data set. Row numbers
        are int64 (B,).
        """
        features = self._features
        keys = [(epoch % features.views, index) for epoch, index in keys]
        rows = [features.first + view * len(self) + index for view, index in keys]
        stored = features.store.read([row - features.skipped for row in rows])
        if stored is None:
            loaded = self._images.__getitems__(keys)
            return loaded if isinstance(loaded, LoadFailure) else (*loaded, torch.tensor(rows))
        return *features.load(stored, self._images, [index for _, index in keys]), torch.tensor(rows)


@dataclass(eq=False)
class SplitFeatures:
    """The features of the training images, or of the images that select the best epoch.

    Attributes:
        prefix: the frozen prefix for images of this split.
        form: the storage format.
        store: the store, which other splits may share.
        views: number of views of each image.
        first: number of the row of the first image in its first view.
        skipped: number of rows that precede the first row of the store.
        mask: size (H, W) of the stored masks, or None if the data set has no masks.

    The stored features of a batch are uint8 (B, `form.bytes`).
    """

    prefix: FrozenPrefix
    form: RowForm
    store: RowStore
    views: int
    first: int = 0
    skipped: int = 0
    mask: tuple[int, ...] | None = None
    _warned: bool = False
    _known: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self._known = self.store.written()

    def load(self, rows: Tensor, images: Any, indices: Sequence[int]) -> tuple[Inputs, Tensor]:
        """Convert rows of the store, uint8 (B, bytes), to stored features and targets.

        `images` is the data set, and `indices` are the samples of the rows.
        """
        if self.mask is None:
            return rows, images.labels[indices]
        stored, masks = rows.split([self.form.bytes, math.prod(self.mask)], 1)
        return stored.contiguous(), masks.view(len(rows), *self.mask).long()

    def fits(self, images: Any, targets: Tensor) -> bool:
        """Return False for evaluated images of another size, whose features are not stored."""
        return self.mask is None or (images.shape[-2:], targets.shape[1:]) == (self.prefix.size, self.mask)

    def replaced(self, stored: Any) -> AbstractContextManager[Any]:
        """Return a context manager in which the network computes its output from stored features.

        The context manager yields a placeholder to pass to the network.
        """
        return from_stored(self.prefix, self.form, stored)

    def encode(self, images: Any, targets: Tensor, rows: Tensor) -> Inputs:
        """Compute and store the features of images (B, C, H, W). Return the stored features."""
        stored = self.form.encode(self.prefix.to_rows(self.prefix.features(images)))
        row = stored.cpu()
        if self.mask is not None:
            row = torch.cat([row, targets.to("cpu", torch.uint8).flatten(1)], 1)
        self._write(rows.cpu() - self.skipped, row)
        return stored

    def _write(self, rows: Tensor, stored: Tensor) -> None:
        if self._known[rows.numpy()].all() and not self._warned:
            self._warned = True
            say(f"Some features in {shown_path(self.store.folder)} are damaged. These features are computed again.")
        if self.store.full:
            return
        try:
            self.store.write(rows.tolist(), stored)
        except StoreFullError:
            self.store.full = True
            say(
                f"The disk of the folder {shown_path(self.store.folder)} is full. The run continues, and features that"
                " are not stored are computed in every epoch."
            )


@dataclass(eq=False)
class TextFeatures(SplitFeatures):
    """The features of the texts of a split. `prefix` is the prefix for the longest text.

    A row has a fixed length: the features and the attention mask of a text are padded to the length of the longest
    text. Loading a batch removes the padding that is longer than in a batch of tokens. The features of padding tokens
    are stored too, because methods that compress activations use them.

    The stored features of a batch are a mapping with uint8 (B, `form.bytes`) and the attention mask, int64 (B, L).

    Attributes:
        lengths: the frozen prefix for texts of any length.
        longest: number of tokens in a row.
        max_length: maximum number of tokens in a text.
    """

    lengths: PrefixLengths = field(kw_only=True)
    longest: int = field(kw_only=True)
    max_length: int = field(kw_only=True)

    def load(self, rows: Tensor, images: Any, indices: Sequence[int]) -> tuple[Inputs, Tensor]:
        stored, mask = rows.split([self.form.bytes, self.longest], 1)
        last = int(mask.any(0).nonzero().max()) + 1
        mask = mask[:, : padded_length(last, self.max_length)].long()
        return {_STORED: stored.contiguous(), KEPT_INPUTS[0]: mask}, images.labels[indices]

    def fits(self, images: Any, targets: Tensor) -> bool:
        return True

    def replaced(self, stored: Any) -> AbstractContextManager[Any]:
        kept = {name: stored[name] for name in KEPT_INPUTS}
        length, dimension = kept[KEPT_INPUTS[0]].shape[1], self.lengths.dimension
        features = self.prefix.from_rows(self.form.decode(stored[_STORED])).to(self.prefix.dtype)
        if dimension is not None:
            features = features.narrow(dimension, 0, length).contiguous()
        return self.lengths.at(length).replaced(features, kept)

    def encode(self, images: Any, targets: Tensor, rows: Tensor) -> Inputs:
        kept = {name: images[name] for name in KEPT_INPUTS}
        stored = self.form.encode(
            self.prefix.to_rows(self._padded(self.prefix.features(images), self.lengths.dimension))
        )
        mask = self._padded(kept[KEPT_INPUTS[0]].to("cpu", torch.uint8), 1)
        self._write(rows.cpu() - self.skipped, torch.cat([stored.cpu(), mask], 1))
        return {_STORED: stored, **kept}

    def _padded(self, tokens: Tensor, dimension: int | None) -> Tensor:
        """Pad a tensor with zeros to the longest text."""
        if dimension is None:
            return tokens
        shape = list(tokens.shape)
        shape[dimension] = self.longest - shape[dimension]
        return torch.cat([tokens, tokens.new_zeros(shape)], dimension)


class RunFeatures:
    """The features of one run, which are read from stores, or computed and then stored.

    Args:
        train: features of the training images.
        evaluated: features of the images that select the best epoch, or None if these images are not stored.
    """

    def __init__(self, train: SplitFeatures, evaluated: SplitFeatures | None) -> None:
        self.train, self.evaluated = train, evaluated
        self._computed = self._read = 0

    @property
    def prefix(self) -> FrozenPrefix:
        """The frozen prefix for training images."""
        return self.train.prefix

    @property
    def stores(self) -> list[RowStore]:
        """The stores of all splits. A shared store is listed once."""
        found = [self.train.store]
        if self.evaluated is not None and self.evaluated.store is not self.train.store:
            found.append(self.evaluated.store)
        return found

    @property
    def full(self) -> bool:
        """True if a row could not be stored because the disk was full."""
        return any(store.full for store in self.stores)

    def training(self, images: Any) -> Dataset[Any]:
        """Return the data set of the training images. Images whose features are not stored are loaded from `images`."""
        return FeatureDataset(images, self.train)

    def evaluation(self, images: Any) -> Dataset[Any]:
        """Return the data set of the split that selects the best epoch. See `training`."""
        return images if self.evaluated is None else FeatureDataset(images, self.evaluated)

    @contextmanager
    def input(self, images: Inputs, targets: Tensor, rows: Tensor | None = None) -> Iterator[Any]:
        """Return a context manager in which the network computes its output from the features of a batch.

        The context manager yields a placeholder to pass to the network. `images` contains images, texts or stored
        features, `targets` the targets, and `rows` the row numbers, as loaded by `FeatureDataset`. The features of
        images and texts are computed and stored. If `rows` is None, the features of the split are not stored, and
        `images` is yielded.
        """
        if rows is None:
            yield images
            return
        split = self.train
        if self.evaluated is not None and int(rows[0]) >= self.evaluated.first:
            split = self.evaluated
        if is_stored(images):
            self._read += len(rows)
            stored = images
        elif not split.fits(images, targets):
            yield images  # an evaluated image of another size
            return
        else:
            self._computed += len(rows)
            stored = split.encode(images, targets, rows)
        with split.replaced(stored) as placeholder:
            yield placeholder

    def report(self) -> FeaturesReport:
        """Return the report for results.json."""
        return {
            "end": self.prefix.end,
            "reason": self.prefix.reason,
            "shape": list(self.prefix.shape),
            "dtype": self.train.form.name,
            "views": self.train.views,
            "bytes": sum(store.rows * store.row_bytes for store in self.stores),
            "computed": self._computed,
            "read": self._read,
        }


def from_stored(prefix: FrozenPrefix, form: RowForm, stored: Tensor) -> AbstractContextManager[Tensor]:
    """Return a context manager in which the network computes its output from stored features, uint8 (B, bytes).

    The context manager yields a placeholder to pass to the network.
    """
    return prefix.replaced(prefix.from_rows(form.decode(stored)).to(prefix.dtype))
