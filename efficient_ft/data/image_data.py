"""A data set opened for training: its splits and their loaders."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from tqdm import tqdm

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.decoded import DecodedImages
from efficient_ft.data.images import Decoding, read_image
from efficient_ft.data.inspect_images import PIXELS, inspect_images
from efficient_ft.data.inspection import Inspection, decoding_threads
from efficient_ft.data.listing import Listing, Samples, stratified_split
from efficient_ft.data.loader import SplitDataset
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.paths import Paths
from efficient_ft.data.reading import Header, Reading, headers, largest_file
from efficient_ft.data.row_store import require_room
from efficient_ft.data.transforms import Transform

if TYPE_CHECKING:
    from efficient_ft.config.schema import DataConfig


class ImageData(OpenedData[Samples, SplitDataset]):
    """A data set ready for training and evaluation.

    Args:
        listing: the lists of the data set.
        config: the `data` section of the configuration.
        input: the network's input size, normalization and interpolation.
        seed: of the run; decides the validation split, the order and the augmentation.

    Attributes:
        class_names: by label.
        splits: number of images by split: `train`, and `val` and/or `test`.
        best_split: the split on which the best epoch is selected.
        decoding: options for decoding image files.
        transform_eval: a PIL image or a path → float32 (C, H, W), as in evaluation.

    Raises:
        SettingError: a setting does not fit the data set: no test images to select on, no fraction to hold out.
        UserError: the data set cannot be split, or too few readable images remain.
    """

    task, noun = "classification", "image"
    decoding: Decoding

    def __init__(self, listing: Listing, config: DataConfig, input: InputSpec, seed: int) -> None:
        super().__init__(config, seed, listing.class_names, listing)
        augment = config.augment
        self.decoding = Decoding(config.value_range, config.max_pixels)
        self._train_transform = Transform(
            input,
            augment.name,
            augment.scale,
            augment.flip,
            augment.resize,
            augment.vertical_flip,
            augment.pick,
            self.decoding,
        )
        self.transform_eval = Transform(input, decoding=self.decoding)
        if config.on_corrupt == "skip":
            listing = self._without_corrupt(listing)
        self._decoded: dict[str, DecodedImages] = {}
        self._parts = self._split(listing)
        train = len(self._parts["train"])
        if train < config.batch_size:
            self._notes.append(
                f"Batches hold all {train} training images, fewer than data.batch_size={config.batch_size}."
            )

    def _split(self, listing: Listing) -> dict[str, Samples]:
        train, val = listing.train, listing.val
        if self.best_split == "test" and self._config.train_on_val and listing.recipe_trains_on_val and val is not None:
            train, val = train.join(val), None  # nothing is selected on them
        return self._choose_splits(train, val, listing.test, stratified_split)

    def _without_corrupt(self, listing: Listing) -> Listing:
        """`listing` without the files that cannot be read, which are recorded in `_skipped`."""
        parts: dict[str, Any] = {}
        for name in ("train", "val", "test"):
            part: Samples | None = getattr(listing, name)
            if part is not None and isinstance(part.images, Paths):
                bad = find_unreadable(part.images, name, self.decoding)
                self._skipped.update(bad)
                part = part.take(np.asarray([i for i, p in enumerate(part.images) if p not in bad], dtype=np.int64))
            parts[name] = part
        left = set(np.unique(parts["train"].labels).tolist())
        gone = [name for label, name in enumerate(listing.class_names) if label not in left]
        if gone:
            raise UserError(
                f"No readable training image is left of the class {gone[0]!r} (data.on_corrupt=skip). "
                "Replace its files."
            )
        for name in ("val", "test"):
            if parts[name] is not None and not len(parts[name]):
                raise UserError(
                    f"No readable image is left in the {name} split (data.on_corrupt=skip). Replace its files."
                )
        if self._skipped:
            self._notes.append(
                f"{counted(len(self._skipped), 'unreadable image')} {verb(len(self._skipped), 'is', 'are')} left out"
                " (data.on_corrupt=skip)."
            )
        return replace(listing, **parts)

    def inspect(self, *, thorough: bool = False) -> Inspection:
        return inspect_images(
            self._parts, self.class_names, self.transform_eval.input, self.decoding, thorough=thorough
        )

    def reading(self, *, training: bool) -> Reading:
        transform = self._train_transform if training else self.transform_eval
        found = self._headers(("train",) if training else ("val", "test"), transform.resize_size)
        decode = max((one.decode_bytes for one in found), default=0)
        height, width = transform.resize_size or transform.input.image_size
        kept = 4 * height * width  # Pillow's pixels
        if transform.resize_size is None:  # crops of the original images
            kept = 4 * math.prod(transform.input.image_size)
        size = transform.input.image_size
        return Reading(size, decode + kept, kept, 6 * math.prod(size), largest_file(found))

    def inspection_bytes(self) -> int:
        found = self._headers(("train", "val", "test"), None)
        largest = max((one.pixels for one in found), default=0)
        return decoding_threads(largest, PIXELS) * max((one.decode_bytes for one in found), default=0)

    def _headers(self, splits: Sequence[str], target_size: tuple[int, int] | None) -> list[Header]:
        """Read the headers of the image files of some splits."""
        found: list[Header] = []
        for split in splits:
            part = self._parts.get(split)
            if part is not None and isinstance(part.images, Paths):
                found += headers(part.images, self.decoding, target_size)
        return found

    def _labels(self, part: Samples) -> np.ndarray:
        return part.labels

    def content_digest(self) -> str:
        """Return hex digits of the training samples, the samples that select the best epoch, and the decoding."""
        digest = super().content_digest()
        return digest if self.decoding.value_range is None else f"{digest} {self.decoding.value_range}"

    def _dataset(self, split: str, *, training: bool) -> SplitDataset:
        transform = self._train_transform if training else self.transform_eval
        return SplitDataset(self._parts[split], transform, self._seed, self._decoded.get(split))

    def keep_decoded(self, epochs: int) -> None:
        """Keep decoded images on disk from now on, if `data.keep_decoded` and the room there allow it.

        Those that every epoch reads: the training images, and those on which the best epoch is chosen. A note says what
        is kept, or why nothing is. Images in memory need no decoding.

        Args:
            epochs: of the run; a single one gains nothing.

        Raises:
            SettingError: with ``data.keep_decoded=on``, if images have no common size, or there is no room.
        """
        config, on = self._config, self._config.keep_decoded == "on"
        transforms = {"train": self._train_transform, self.best_split: self.transform_eval}
        files = {split: part for split, part in self._parts.items() if split in transforms and part.is_files}
        if config.keep_decoded == "off" or not files or (epochs == 1 and not on):
            return
        if any(transforms[split].resized_shape is None for split in files):
            if on:
                raise SettingError("data.augment.resize", "none", "input, or a size, with data.keep_decoded=on")
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
            "Decoded images are kept for later epochs and runs (data.keep_decoded):"
            f" {format_bytes(sum(sizes.values()))} in {config.decoded_folder}, which may be deleted at any time."
        )


def find_unreadable(paths: Paths, split: str = "", decoding: Decoding | None = None) -> dict[str, str]:
    """Decode every file and return those that cannot be read: path → reason.

    Only a full decode finds a truncated file, so this costs about as much as loading one epoch. Threads suffice: Pillow
    decodes without Python's lock.

    Args:
        paths: image files.
        split: its name in the progress bar.
        decoding: options for decoding them; None for the default.
    """

    def problem(path: str) -> str | None:
        try:
            read_image(path, decoding=decoding)
        except UserError as error:
            return str(error)
        return None

    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        reasons = tqdm(
            pool.map(problem, paths), total=len(paths), desc=f"reading {split} images", leave=False, disable=None
        )
        return {path: reason for path, reason in zip(paths, reasons, strict=True) if reason is not None}
