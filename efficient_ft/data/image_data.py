"""Data sets of labeled images that are ready for training."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from efficient_ft.config.augment import describe, mixes
from efficient_ft.config.schema import DataConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data.augment import MixedDataset, further_steps
from efficient_ft.data.file_list import Paths
from efficient_ft.data.images import Decoding, read_image
from efficient_ft.data.inspect_images import inspect_images
from efficient_ft.data.inspection import Inspection, decoding_threads, find_failures, in_threads
from efficient_ft.data.listing import Listing, Samples, splits_of, stratified_split
from efficient_ft.data.loader import DecodedImages, Loader, SplitDataset
from efficient_ft.data.opened import OpenedData, Wrap
from efficient_ft.data.reading import Header, Reading, headers, largest_file
from efficient_ft.data.row_store import require_room
from efficient_ft.data.transforms import Transform

#: Number of images that `ImageData.decode` decodes before it checks the time.
_TOGETHER = 64


class ImageData(OpenedData[Samples, SplitDataset]):
    """A data set of labeled images that is ready for training and evaluation.

    Args:
        listing: listing of the images of each split.
        config: the `data` section of the configuration.
        input: input size, normalization and interpolation of the network.
        seed: seed of the run, which determines the validation split, the order and the augmentation.

    Attributes:
        transform_eval: transform for evaluation, which converts a PIL image or a path to a float32 tensor (C, H, W).

    Raises:
        SettingError: If a setting is incompatible with the data set.
        UserError: If the data set cannot be split, or too few readable images remain.
    """

    task, noun = "classification", "image"
    decoding: Decoding

    def __init__(self, listing: Listing, config: DataConfig, input: InputSpec, seed: int) -> None:
        super().__init__(config, seed, listing.class_names, listing)
        augment = config.augment
        self.decoding = Decoding(config.value_range, config.max_pixels)
        options = (augment.scale, augment.flip, augment.resize, augment.vertical_flip, augment.pick)
        name = "none" if augment.name == "none" else "resize_crop"
        further = further_steps(augment, input.mean)
        self._train_transform = Transform(input, name, *options, self.decoding)
        self._train_transform.extend(further)
        self.transform_eval = Transform(input, decoding=self.decoding)
        if config.on_corrupt == "skip":
            listing = self._without_corrupt(listing)
        self._decoded: dict[str, DecodedImages] = {}
        self._parts = self._split(listing)
        if further or mixes(augment):
            self._notes.append(f"Training images are also transformed by {describe(augment)}.")
        count = len(self._parts["train"])
        if count < config.batch_size:
            limit = f"which are fewer than data.batch_size={config.batch_size}"
            self._notes.append(f"Each batch contains all {count} training images, {limit}.")

    def _split(self, listing: Listing) -> dict[str, Samples]:
        parts: dict[str, Samples] = splits_of(listing)
        recipe = self._config.train_on_val and listing.recipe_trains_on_val
        if self.best_split == "test" and recipe and "val" in parts:  # the best epoch is not selected on `val`
            parts["train"] = parts["train"].join(parts.pop("val"))
        return self._choose_splits(parts, self._hold_out)

    def _hold_out(self, samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
        return stratified_split(samples, fraction, seed)

    def _without_corrupt(self, listing: Listing) -> Listing:
        parts: dict[str, Samples] = splits_of(listing)
        for name, part in parts.items():
            if isinstance(part.images, Paths):
                # Every image is decoded completely, because truncated files are not detected otherwise.
                paths = list(part.images)
                bad = find_failures(self._read, paths, f"reading {name} images")
                self._skipped.update(bad)
                left = [i for i, path in enumerate(paths) if path not in bad]
                parts[name] = part.take(np.asarray(left, dtype=np.int64))
        counts = self._per_class(parts["train"])
        gone = [] if counts is None else [repr(listing.class_names[label]) for label in np.flatnonzero(counts == 0)]
        skip = "(data.on_corrupt=skip). Replace the unreadable files."
        if gone:
            raise UserError(f"The class {gone[0]} has no readable training image {skip}")
        for name, part in parts.items():
            if not len(part):
                raise UserError(f"The {name} split has no readable image {skip}")
        self._note_skipped("unreadable")
        return replace(listing, train=parts["train"], val=parts.get("val"), test=parts.get("test"))

    def _read(self, path: str) -> None:
        read_image(path, decoding=self.decoding)

    def inspect(self, *, thorough: bool = False) -> Inspection:
        input = self.transform_eval.input
        return inspect_images(self._parts, self.class_names, input, self.decoding, thorough=thorough)

    def reading(self, *, training: bool) -> Reading:
        transform = self._train_transform if training else self.transform_eval
        found = self._headers(("train",) if training else ("val", "test"), transform.resize_size)
        decode = max((one.decode_bytes for one in found), default=0)
        size = transform.input.image_size
        kept = 4 * math.prod(transform.resize_size or size)  # number of bytes of a resized image or crop
        mixed = training and mixes(self._config.augment)  # the unmixed batch and one temporary tensor in fp32
        return Reading(size, decode + kept, kept, (24 if mixed else 6) * math.prod(size), largest_file(found))

    def inspection_bytes(self) -> int:
        found = self._headers(("train", "val", "test"), None)
        threads = decoding_threads(one.pixels for one in found)
        return threads * max((one.decode_bytes for one in found), default=0)

    def _headers(self, splits: Sequence[str], target_size: tuple[int, int] | None) -> list[Header]:
        files = [self._parts[split].images for split in splits if split in self._parts]
        every = (headers(paths, self.decoding, target_size) for paths in files if isinstance(paths, Paths))
        return [header for found in every for header in found]

    def _labels(self, part: Samples) -> np.ndarray:
        return part.labels

    def content_digest(self) -> str:
        digest = super().content_digest()
        return digest if self.decoding.value_range is None else f"{digest} {self.decoding.value_range}"

    def _dataset(self, split: str, *, training: bool) -> SplitDataset:
        transform = self._train_transform if training else self.transform_eval
        return SplitDataset(self._parts[split], transform, self._seed, self._decoded.get(split))

    def train_loader(self, rank: int = 0, world: int = 1, wrap: Wrap[SplitDataset] | None = None) -> Loader:
        """Return a loader of shuffled, augmented and possibly mixed batches. See `OpenedData.train_loader`.

        With MixUp or CutMix, the targets are probabilities, float32 (B, classes). With `wrap`, images are not mixed.
        """
        if wrap is None and mixes(self._config.augment):
            augment, classes, seed = self._config.augment, self.num_classes, self._seed
            return super().train_loader(rank, world, lambda images: MixedDataset(images, augment, classes, seed))
        return super().train_loader(rank, world, wrap)

    def keep_decoded(self, epochs: int) -> None:
        """Keep decoded images on disk for a run of `epochs` epochs.

        The training images and the images on which the best epoch is selected are kept if `data.keep_decoded` and the
        free space permit this. A note in the report states whether the images are kept. If ``data.keep_decoded=on``,
        raise `SettingError` if the images are not resized to one size, or if there is not enough space.
        """
        config, on = self._config, self._config.keep_decoded == "on"
        transforms = {"train": self._train_transform, self.best_split: self.transform_eval}
        files = {name: self._parts[name] for name in transforms if isinstance(self._parts[name].images, Paths)}
        if config.keep_decoded == "off" or not files or (epochs == 1 and not on):
            return
        if any(transforms[split].resized_shape is None for split in files):
            if on:
                raise SettingError("data.augment.resize", "none", "input or a size if data.keep_decoded=on")
            return
        stores = {split: DecodedImages(Path(config.decoded_folder), files[split], transforms[split]) for split in files}
        sizes = {store.folder: store.bytes for store in stores.values()}
        try:
            require_room("data.decoded", config.decoded_limit, sizes, "decoded images", "Or use data.keep_decoded=off.")
        except SettingError as error:
            if on:
                raise
            self._notes.append(f"Images are decoded in every epoch (data.keep_decoded=auto): {error}")
            return
        self._decoded = stores
        self._notes.append(
            "Decoded images are kept for later epochs and runs (data.keep_decoded). The folder"
            f" {config.decoded_folder} ({format_bytes(sum(sizes.values()))}) may be deleted at any time."
        )

    def decode(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        threads = decoding_threads(one.pixels for one in self._headers(tuple(self._decoded), None))
        # An evaluation reads all images of its split, and few steps of training read only some training images.
        for split, store in reversed(self._decoded.items()):
            dataset, missing = self._dataset(split, training=split == "train"), store.missing()
            with store.opened():
                for first in range(0, len(missing), _TOGETHER):
                    if time.monotonic() > end:
                        return
                    list(in_threads(dataset.store, missing[first : first + _TOGETHER], threads))
