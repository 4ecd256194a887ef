"""The data set that a configuration names: what is missing of it, how many classes it has, and opening it."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.data.digits import read_digits
from efficient_ft.data.fetch import fetch
from efficient_ft.data.folder import folder_classes, missing_folder, read_folder
from efficient_ft.data.image_data import ImageData
from efficient_ft.data.listing import Listing
from efficient_ft.data.published import PUBLISHED, PublishedSet, read_published

if TYPE_CHECKING:
    from efficient_ft.config.schema import DataConfig


def missing_data(config: DataConfig) -> str | None:
    """Look for the files of a data set without fetching any; takes at most about `core.network.PROBE_SECONDS`.

    Returns:
        None if the data are present or can be fetched now, else a message: what belongs where, and alternatives.
    """
    if config.name == "digits":
        return None
    if config.name == "folder":
        return missing_folder(Path(config.root).expanduser())
    source = _published(config)
    return source.missing(config.name, source.root(config.root), config.download)


def class_count(config: DataConfig) -> int | None:
    """Count the classes without opening an image; None for a folder that does not exist."""
    if config.name == "digits":
        return 10
    if config.name == "folder":
        return folder_classes(Path(config.root).expanduser())
    return _published(config).classes


def read_data(config: DataConfig) -> Listing:
    """Fetch the files if necessary, and read the lists.

    Raises:
        UserError: the data are missing or damaged.
    """
    if config.name == "digits":
        return read_digits()
    if config.name == "folder":
        return read_folder(Path(config.root).expanduser())
    source = _published(config)
    root = source.root(config.root)
    problem = source.missing(config.name, root, config.download)
    if problem is not None:
        raise UserError(problem)
    fetch(source.pending(root), root)
    return read_published(config.name, root)


def open_data(config: DataConfig, input: InputSpec, seed: int) -> ImageData:
    """Fetch the files if necessary, read the lists, and split.

    Args:
        config: the `data` section of the configuration.
        input: the network's input size, normalization and interpolation.
        seed: of the run; decides the validation split, the order and the augmentation.

    Raises:
        UserError: the data are missing, damaged, or cannot be split as configured.
    """
    return ImageData(read_data(config), config, input, seed)


def _published(config: DataConfig) -> PublishedSet:
    if config.name not in PUBLISHED:
        raise SettingError("data.name", config.name, ["folder", "digits", *PUBLISHED])
    return PUBLISHED[config.name]
