"""Open the data set that a configuration names."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Protocol, cast

from efficient_ft.config.schema import DataConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.tokenizer import Tokenizer
from efficient_ft.data.digits import read_digits
from efficient_ft.data.fetch import fetch
from efficient_ft.data.folder import folder_classes, missing_folder, read_folder
from efficient_ft.data.image_data import ImageData
from efficient_ft.data.label_data import MultiLabelData, TargetData
from efficient_ft.data.labels import missing_labels, read_labels
from efficient_ft.data.listing import Listing
from efficient_ft.data.mask_folder import missing_mask_folder, read_mask_folder
from efficient_ft.data.masks import MaskListing
from efficient_ft.data.published import MASK_SETS, PUBLISHED, TEXT_SETS, PublishedSet, read_published
from efficient_ft.data.segmentation_data import SegmentationData
from efficient_ft.data.text_data import TextData
from efficient_ft.data.texts import TextListing, missing_text_folder, read_texts

#: For each data set that reads a folder of the user, the function that returns the error message for a missing folder.
_MISSING = {"folder": missing_folder, "mask_folder": missing_mask_folder, "text_folder": missing_text_folder}

#: Classes of data sets whose images do not have exactly one class, keyed by the kind of task.
_OF_LABELS: dict[str, type[ImageData]] = {"multilabel": MultiLabelData, "regression": TargetData}


class DataSource(Protocol):
    """A data set that is added by a task kind in another package."""

    def missing(self, config: DataConfig) -> str | None:
        """Return an error message if files are missing, or None otherwise. See `missing_data`."""

    def class_count(self, config: DataConfig) -> int | None:
        """Return the number of network outputs for the data, or None if the files do not exist."""

    def read(self, config: DataConfig) -> Any:
        """Return an object that lists the samples of each split, with the attributes of `listing.Listing`."""


#: Data sets of other packages, keyed by name. `training.kinds.registry.register` adds entries.
SOURCES: dict[str, DataSource] = {}


def missing_data(config: DataConfig) -> str | None:
    """Check that the files of a data set exist or can be downloaded.

    The check takes at most about `core.network.PROBE_SECONDS` seconds.

    Returns:
        None if the files exist or can be downloaded now. Otherwise, a message with the missing files, their expected
        locations, and alternatives.
    """
    if config.name == "digits":
        return None
    if config.name in SOURCES:
        return SOURCES[config.name].missing(config)
    root = Path(config.root).expanduser()
    if config.labels is not None:
        return missing_labels(config)
    if config.name in _MISSING:
        return _MISSING[config.name](root)
    if config.name in MASK_SETS:
        return MASK_SETS[config.name].missing(config.name, root)
    source = _published(config)
    return source.missing(config.name, source.root(root), config.download)


def class_count(config: DataConfig) -> int | None:
    """Count the classes without opening an image. Return None if a folder cannot be read."""
    if config.name == "digits":
        return 10
    if config.name in SOURCES:
        return SOURCES[config.name].class_count(config)
    if config.name == "folder":
        return folder_classes(Path(config.root).expanduser(), config.splits, config.follow_links)
    if config.name in MASK_SETS:
        return len(MASK_SETS[config.name].classes.names)
    try:
        if config.labels is not None:
            return len(read_labels(config).class_names)
        if config.masks is not None:
            return len(_read_masks(config).classes.names)
        if config.name == "text_folder":
            return len(_read_texts(config).class_names)
    except UserError:
        return None
    return _published(config).classes


def read_data(config: DataConfig) -> Listing | MaskListing | TextListing:
    """Download missing files, and list the samples of each split.

    Raises:
        UserError: If the data are missing or damaged.
    """
    if config.name == "digits":
        return read_digits()
    if config.name in SOURCES:
        return cast("Listing", SOURCES[config.name].read(config))
    if config.name == "folder":
        return read_folder(Path(config.root).expanduser(), config.follow_links, config.splits)
    if config.labels is not None:
        return read_labels(config)
    if config.masks is not None:
        return _read_masks(config)
    if config.text is not None:
        return _read_texts(config)
    return read_published(config.name, _fetched(config, _published(config)), config.follow_links)


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
    return TextData(_read_texts(config), config, tokenizer, max_length, seed)


def _fetched(config: DataConfig, source: PublishedSet) -> Path:
    root = source.root(config.root)
    if (problem := source.missing(config.name, root, config.download)) is not None:
        raise UserError(problem)
    fetch(source.pending(root), root)
    return root


def _read_texts(config: DataConfig) -> TextListing:
    assert config.text is not None, "refused by `config.check`"
    if config.name == "text_folder":
        return read_texts(Path(config.root).expanduser(), config.text, config.follow_links, config.splits)
    source = TEXT_SETS[config.name]
    listing: TextListing = source.read(_fetched(config, source), config.text)
    return listing


def _read_masks(config: DataConfig) -> MaskListing:
    root = Path(config.root).expanduser()
    if config.name not in MASK_SETS:
        assert config.masks is not None, "refused by `config.check`"
        return read_mask_folder(root, config.masks, config.splits, config.follow_links)
    source = MASK_SETS[config.name]
    if (problem := source.missing(config.name, root)) is not None:
        raise UserError(problem)
    return source.read(source.root(root), config.follow_links)


def _published(config: DataConfig) -> PublishedSet:
    known = {**PUBLISHED, **TEXT_SETS}
    if config.name not in known:
        raise SettingError("data.name", config.name, ["folder", "labels", "digits", *PUBLISHED])
    return known[config.name]
