"""Batches of images for the comparison of gradients."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import torch
from torch.utils.data import DataLoader, Subset
from torchvision.datasets import ImageFolder

from efficient_ft.bench.gradients import Batch
from efficient_ft.config import ModelConfig
from efficient_ft.core.errors import UserError
from efficient_ft.data import Transform, read_image
from efficient_ft.data.images import is_image
from efficient_ft.models.factory import input_of


def image_folder(folder: Path, config: ModelConfig) -> ImageFolder:
    """Open FOLDER/CLASS/* (classes are sorted), with the evaluation transform of the network.

    Raises:
        UserError: the folder does not exist, or has no class folders with images.
    """
    if not folder.is_dir():
        raise UserError(f"{folder}: no such folder.")
    try:
        return ImageFolder(str(folder), Transform(input_of(config)), loader=read_image, is_valid_file=is_image)
    except FileNotFoundError as error:
        raise UserError(f"{folder} must hold FOLDER/CLASS/*.jpg ({error}).") from error


def shuffled_batches(images: ImageFolder, batch: int, count: int, skip: int, seed: int) -> Iterator[Batch]:
    """Load disjoint batches in the order of a seeded shuffle. Fewer batches are returned if there are too few images.

    Args:
        images: the data set.
        batch: number of images in a batch.
        count: number of batches.
        skip: number of batches to skip.
        seed: seed of the shuffle.
    """
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(seed)).tolist()
    chosen = order[skip * batch : (skip + count) * batch]
    return iter(DataLoader(Subset(images, chosen), batch, drop_last=True))
