"""Open the data set that a configuration names."""

from __future__ import annotations

from collections import ChainMap
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, cast

from efficient_ft.config.schema import DataConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data.digits import read_digits
from efficient_ft.data.folder import folder_classes, missing_folder, read_folder
from efficient_ft.data.image_data import ImageData
from efficient_ft.data.label_data import MultiLabelData, TargetData
from efficient_ft.data.labels import missing_labels, read_labels
from efficient_ft.data.listing import Listing
from efficient_ft.data.mask_folder import missing_mask_folder, read_mask_folder
from efficient_ft.data.masks import MaskListing
from efficient_ft.data.published import MASK_SETS, PUBLISHED, TEXT_SETS
from efficient_ft.data.segmentation_data import SegmentationData
from efficient_ft.data.text_data import TextData
from efficient_ft.data.texts import TextListing, missing_text_folder, read_texts

#: Classes of data sets whose images do not have exactly one class, keyed by the kind of task.
_OF_LABELS: dict[str, type[ImageData]] = {"multilabel": MultiLabelData, "regression": TargetData}


class DataSource(Protocol):
    """A data set that a configuration can name. Task kinds in other packages may add data sets."""

    def missing(self, config: DataConfig) -> str | None:
        """Return an error message if files are missing, or None otherwise. See `missing_data`."""

    def class_count(self, config: DataConfig) -> int | None:
        """Return the number of network outputs for the data, or None if the files do not exist."""

    def read(self, config: DataConfig) -> Any:
        """Return an object that lists the samples of each split, with the attributes of `listing.Listing`."""


@dataclass(frozen=True)
class _OwnData:
    """A data set that is not published. Unless `count` is given, the classes are counted in the listing."""

    missing: Callable[[DataConfig], str | None]
    read: Callable[[DataConfig], Any]
    count: Callable[[DataConfig], int | None] | None = None

    def class_count(self, config: DataConfig) -> int | None:
        if self.count is not None:
            return self.count(config)
        try:
            return len(self.read(config).class_names)
        except UserError:
            return None


def _root(config: DataConfig) -> Path:
    return Path(config.root).expanduser()


def _read_masks(config: DataConfig) -> MaskListing:
    assert config.masks is not None, "refused by `config.check`"
    return read_mask_folder(_root(config), config.masks, config.splits, config.follow_links)


def _read_texts(config: DataConfig) -> TextListing:
    assert config.text is not None, "refused by `config.check`"
    return read_texts(_root(config), config.text, config.follow_links, config.splits)


_OWN: dict[str, Any] = {
    "folder": _OwnData(
        lambda config: missing_folder(_root(config)),
        lambda config: read_folder(_root(config), config.follow_links, config.splits),
        lambda config: folder_classes(_root(config), config.splits, config.follow_links),
    ),
    "labels": _OwnData(missing_labels, read_labels),
    "digits": _OwnData(lambda config: None, lambda config: read_digits()),
    "mask_folder": _OwnData(lambda config: missing_mask_folder(_root(config)), _read_masks),
    "text_folder": _OwnData(lambda config: missing_text_folder(_root(config)), _read_texts),
}
#: All data sets, keyed by name. `training.kinds.registry.register` adds data sets of other packages.
SOURCES: ChainMap[str, Any] = ChainMap(_OWN, PUBLISHED, TEXT_SETS, MASK_SETS)


def missing_data(config: DataConfig) -> str | None:
    """Check that the files of a data set exist or can be downloaded.

    The check takes at most about `core.network.PROBE_SECONDS` seconds.

    Returns:
        None if the files exist or can be downloaded now. Otherwise, a message with the missing files, their expected
        locations, and alternatives.
    """
    return _source(config).missing(config)


def class_count(config: DataConfig) -> int | None:
    """Count the classes without opening an image. Return None if a folder cannot be read."""
    return _source(config).class_count(config)


def read_data(config: DataConfig) -> Listing | MaskListing | TextListing:
    """Download missing files, and list the samples of each split.

    Raises:
        UserError: If the data are missing or damaged.
    """
    listing: Listing | MaskListing | TextListing = _source(config).read(config)
    return listing


def _source(config: DataConfig) -> DataSource:
    if config.name not in SOURCES:
        raise SettingError("data.name", config.name, list(SOURCES))
    source: DataSource = SOURCES[config.name]
    return source


def open_data(config: DataConfig, input: InputSpec, seed: int) -> ImageData | SegmentationData:
    """Open an image data set. Missing files are downloaded, and the samples are listed and split.

    See `ImageData` and `SegmentationData` for the arguments.

    Raises:
        UserError: If the data are missing or damaged, or cannot be split as configured.
    """
    listing = read_data(config)
    if isinstance(listing, MaskListing):
        return SegmentationData(listing, config, input, seed)
    if not isinstance(listing, Listing):
        raise UserError(f"data={config.name} contains texts, but images are required. Choose an image data set.")
    kind = ImageData if config.labels is None else _OF_LABELS.get(config.labels._task, ImageData)
    return kind(listing, config, input, seed)


def open_texts(config: DataConfig, tokenizer: Tokenizer, max_length: int, seed: int) -> TextData:
    """Open a text data set. See `TextData` for the arguments.

    Raises:
        UserError: If the data are missing or damaged, or cannot be split as configured.
    """
    return TextData(cast("TextListing", read_data(config)), config, tokenizer, max_length, seed)
