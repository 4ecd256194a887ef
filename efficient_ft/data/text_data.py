"""Text data sets that are ready for training. The loaders tokenize each batch."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from efficient_ft.config.schema import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer, padded_length
from efficient_ft.data.inspect_texts import inspect_texts
from efficient_ft.data.inspection import Inspection
from efficient_ft.data.listing import splits_of, stratified_split
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.reading import Reading
from efficient_ft.data.texts import TextListing, Texts, reasons_of

#: Number of texts whose lengths are measured at once.
_MEASURED = 1000


class TextDataset(Dataset[tuple[dict[str, Tensor], Tensor]]):
    """A dataset of the texts of a split, indexed by (epoch, index). `labels` contains all labels, int64 (N,)."""

    def __init__(self, samples: Texts, tokenizer: Tokenizer, max_length: int) -> None:
        self._samples, self._tokenizer, self._max_length = samples, tokenizer, max_length
        self.labels = torch.from_numpy(samples.labels)

    def __len__(self) -> int:
        return len(self._samples)

    def __getitems__(self, keys: list[tuple[int, int]]) -> tuple[dict[str, Tensor], Tensor]:
        """Load a batch: the network inputs, int64 (B, L) each, and the labels, int64 (B,)."""
        numbers = [index for _, index in keys]
        texts = [self._samples.texts[index] for index in numbers]
        return self._tokenizer.batch(texts, self._max_length), self.labels[numbers]


class TextData(OpenedData[Texts, TextDataset]):
    """A text data set that is ready for training and evaluation.

    Args:
        listing: listing of the texts in each split.
        config: the `data` section of the configuration.
        tokenizer: tokenizer of the network.
        max_length: maximum number of tokens; longer texts are truncated.
        seed: seed of the run, which determines the validation split and the order.

    Raises:
        SettingError: If a setting is incompatible with the data set.
        UserError: If the data set cannot be split, or if some rows cannot be used.
    """

    task, noun = "text", "text"

    def __init__(
        self, listing: TextListing, config: DataConfig, tokenizer: Tokenizer, max_length: int, seed: int
    ) -> None:
        super().__init__(config, seed, listing.class_names, listing)
        self.tokenizer, self.max_length = tokenizer, max_length
        if listing.skipped:
            total = len(listing.skipped) + sum(map(len, splits_of(listing).values()))
            found = f"{len(listing.skipped):,} of {total:,} texts cannot be used: {reasons_of(listing.skipped)}."
            if config.on_corrupt == "stop":
                first = next(iter(listing.skipped.values()))
                advice = "Correct these texts, or set data.on_corrupt=skip to skip them."
                raise UserError(f"{found} The first unusable text is {first} {advice}")
            self._skipped.update(listing.skipped)
            self._notes.append(f"{found} These texts are skipped (data.on_corrupt=skip).")
        self._parts = self._choose_splits(splits_of(listing), stratified_split)

    @property
    def columns(self) -> int:
        """Number of texts per sample: 1, or 2 for pairs."""
        return len(self._parts["train"].texts[0])

    def longest(self) -> int:
        """Return the length of the longest batch that the training split and the split for the best epoch can have."""
        texts = [text for split in ("train", self.best_split) for text in self._parts[split].texts]
        longest = 0
        for start in range(0, len(texts), _MEASURED):
            longest = max(longest, *self.tokenizer.measure(texts[start : start + _MEASURED])[0])
            if longest >= self.max_length:
                break
        return padded_length(min(longest, self.max_length), self.max_length)

    def inspect(self, *, thorough: bool = False) -> Inspection:
        return inspect_texts(self._parts, self.class_names, self.tokenizer, self.max_length, thorough=thorough)

    def reading(self, *, training: bool) -> Reading:
        return Reading((self.max_length,))

    def shown(self, inputs: Any, input: InputSpec) -> list[Any]:
        return self.tokenizer.decode(inputs["input_ids"])

    def _labels(self, part: Texts) -> np.ndarray:
        return part.labels

    def _dataset(self, split: str, *, training: bool) -> TextDataset:
        return TextDataset(self._parts[split], self.tokenizer, self.max_length)
