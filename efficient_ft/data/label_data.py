"""Data sets of images with several labels, or with numbers, that are ready for training."""

from __future__ import annotations

import math
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

from efficient_ft.config.schema import DataConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data.counts import some, verb
from efficient_ft.data.image_data import ImageData
from efficient_ft.data.inspect_images import inspect_images
from efficient_ft.data.inspection import Inspection
from efficient_ft.data.label_forms import LabelForm, Numbers, SeveralLabels
from efficient_ft.data.listing import Listing, Samples, stratified_split
from efficient_ft.data.loader import SplitDataset

#: Minimum number of images with a label for which the threshold of this label is tuned without a warning.
_FEW = 5


class _LabelFileData(ImageData):
    """Images whose labels are rows of a matrix (N, outputs)."""

    form: ClassVar[type[LabelForm]]

    def _hold_out(self, samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
        assert self._config.labels is not None
        groups = self.form(self._config.labels).groups(samples.labels)
        return stratified_split(samples, fraction, seed, groups)

    def _labels(self, part: Samples) -> None:  # type: ignore[override]
        return None

    def inspect(self, *, thorough: bool = False) -> Inspection:
        """Inspect the images. Images with different labels are images of different classes."""
        every = np.concatenate([part.labels for part in self._parts.values()])
        rows, numbers = np.unique(every, axis=0, return_inverse=True)
        ends = np.cumsum([len(part) for part in self._parts.values()])[:-1]
        each = zip(self._parts.items(), np.split(numbers.reshape(-1), ends), strict=True)
        parts = {split: Samples(part.images, ids) for (split, part), ids in each}
        names = [self._text(row) for row in rows]
        input = self.transform_eval.input
        near = self.form.has_classes  # the targets of similar images usually differ
        return inspect_images(parts, names, input, self.decoding, thorough=thorough, classes=False, near_labels=near)

    def _text(self, row: np.ndarray) -> str:
        """Return the labels of an image as text."""
        raise NotImplementedError


class MultiLabelData(_LabelFileData):
    """Images with any number of labels each. The labels are float32 (N, labels) with the values 0 and 1."""

    task, form = "multilabel", SeveralLabels

    def _per_class(self, part: Samples) -> np.ndarray:
        counts: np.ndarray = part.labels.sum(0).astype(np.int64)
        return counts

    def warn_of_few_images(self) -> None:
        """Add a warning if the thresholds of some labels are tuned on very few images with the label."""
        counts = self._per_class(self._parts[self.best_split])
        few = [f"{name} ({count})" for name, count in zip(self.class_names, counts, strict=True) if count < _FEW]
        if few:
            self._warnings.append(
                f"Fewer than {_FEW} {self.best_split} images have {verb(len(few), 'this label', 'these labels')}:"
                f" {some(few, 10)}. Thresholds that are tuned on so few images are not reliable. Add images, increase"
                " data.val_fraction, or set multilabel.thresholds=0.5."
            )

    def _text(self, row: np.ndarray) -> str:
        names = [plain_line(name) for name, flag in zip(self.class_names, row, strict=True) if flag]
        return ", ".join(names) or "(no label)"

    def labeled(self, inputs: Any, targets: Tensor, input: InputSpec) -> list[tuple[Any, str]]:
        return [(one, self._text(row)) for one, row in zip(self.shown(inputs, input), targets.numpy(), strict=True)]


class TargetData(_LabelFileData):
    """Images with one or more numbers each. Loaders return scaled targets, float32 (B, targets).

    Attributes:
        mean, std: mean and standard deviation of each target over the training split.

    Raises:
        UserError: If all training images have the same value of a target.
    """

    task, form, outputs = "regression", Numbers, "targets"

    def __init__(self, listing: Listing, config: DataConfig, input: InputSpec, seed: int) -> None:
        super().__init__(listing, config, input, seed)
        train = self._parts["train"].labels
        self.mean, self.std = train.mean(0), train.std(0)
        constant = [name for name, std in zip(self.class_names, self.std, strict=True) if not std > 0]
        if constant:
            raise UserError(
                f"All training images have the same target {plain_line(constant[0])!r}. Choose another target with"
                " data.labels.label=NAME."
            )

    def inspect(self, *, thorough: bool = False) -> Inspection:
        found = super().inspect(thorough=thorough)
        train = self._parts["train"].labels
        found.facts["targets"] = {}
        for k, name in enumerate(self.class_names):
            low, high, mean, std = train[:, k].min(), train[:, k].max(), self.mean[k], self.std[k]
            found.facts["targets"][name] = {"min": low, "max": high, "mean": mean, "std": std}
            digits = max(
                6, 4 + math.ceil(math.log10(max(abs(low) / std, abs(high) / std, 1)))
            )  # distinguish close values
            span = f"{low:.{digits}g} to {high:.{digits}g} (mean {mean:.{digits}g}, standard deviation {std:.4g})"
            found.lines.append(f"targets in {plain_line(name)!r}: {span}")
        return found

    def _dataset(self, split: str, *, training: bool) -> SplitDataset:
        dataset = super()._dataset(split, training=training)
        dataset.labels = ((dataset.labels - torch.from_numpy(self.mean)) / torch.from_numpy(self.std)).float()
        return dataset

    def _text(self, row: np.ndarray) -> str:
        if len(row) == 1:
            return f"{row[0]:.5g}"
        pairs = zip(self.class_names, row, strict=True)
        return ", ".join(f"{plain_line(name)} {value:.5g}" for name, value in pairs)

    def labeled(self, inputs: Any, targets: Tensor, input: InputSpec) -> list[tuple[Any, str]]:
        rows = targets.numpy() * self.std + self.mean
        return [(one, self._text(row)) for one, row in zip(self.shown(inputs, input), rows, strict=True)]
