"""A data set of texts opened for training: its splits and their loaders, which tokenize batch by batch."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from efficient_ft.core.errors import UserError
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data.inspection import Inspection
from efficient_ft.data.listing import stratified_split
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.texts import TextListing, Texts

if TYPE_CHECKING:
    from efficient_ft.config.schema import DataConfig

#: Texts whose length is looked at when a data set is opened.
_LOOKED_AT = 1000


class TextDataset(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """The texts of a split by (epoch, index)."""

    def __init__(self, samples: Texts, tokenizer: Tokenizer, max_length: int) -> None:
        self._samples, self._tokenizer, self._max_length = samples, tokenizer, max_length
        self._labels = torch.from_numpy(samples.labels)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Load a batch: the network's inputs, int64 (B, L) each, and the labels (B,)."""
        numbers = [index for _, index in keys]
        texts = [self._samples.texts[index] for index in numbers]
        return self._tokenizer.batch(texts, self._max_length), self._labels[numbers]


class TextData(OpenedData[Texts, TextDataset]):
    """A data set of texts ready for training and evaluation.

    Args:
        listing: the lists of the data set.
        config: the `data` section of the configuration.
        tokenizer: of the network.
        max_length: the largest number of tokens; what is beyond is cut.
        seed: of the run; decides the validation split and the order.

    Attributes:
        tokenizer: of the network.

    Raises:
        SettingError: a setting does not fit the data set.
        UserError: the data set cannot be split, or rows of it cannot be used.
    """

    task, noun = "text", "text"

    def __init__(
        self, listing: TextListing, config: DataConfig, tokenizer: Tokenizer, max_length: int, seed: int
    ) -> None:
        super().__init__(config, seed, listing.class_names, listing)
        self.tokenizer, self._max_length = tokenizer, max_length
        if listing.skipped and config.on_corrupt == "stop":
            first, *others = listing.skipped.values()
            more = f" {len(others)} further rows cannot be used either." if others else ""
            raise UserError(f"{first}{more} Correct them, or leave them out: data.on_corrupt=skip.")
        if listing.skipped:
            self._skipped.update(listing.skipped)
            self._notes.append(f"{len(self._skipped)} unusable texts are left out (data.on_corrupt=skip).")
        self._parts = self._choose_splits(listing.train, listing.val, listing.test, stratified_split)
        lengths = tokenizer.lengths(self._parts["train"].texts[:_LOOKED_AT])
        cut = sum(length > max_length for length in lengths)
        if cut:
            self._notes.append(
                f"{cut} of {len(lengths)} training texts looked at have more than model.max_length={max_length} tokens,"
                f" and are cut; the longest has {max(lengths)}."
            )

    @property
    def columns(self) -> int:
        """Texts of a sample: 1, or 2 of a pair."""
        return len(self._parts["train"].texts[0])

    def inspect(self, *, thorough: bool = False) -> Inspection:
        return Inspection()

    def _labels(self, part: Texts) -> np.ndarray:
        return part.labels

    def _dataset(self, split: str, *, training: bool) -> TextDataset:
        return TextDataset(self._parts[split], self.tokenizer, self._max_length)
