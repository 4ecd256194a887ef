"""Readers of the published data sets' own lists: root folder → `Listing`.

torchvision's classes read the lists of the sets that they support, so that splits and labels are the usual ones.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from efficient_ft.data.listing import Listing, Samples
from efficient_ft.data.paths import Paths


def cifar_reader(kind: type[datasets.CIFAR10]) -> tuple[Callable[[Path], Listing], Callable[[Path], bool]]:
    """Return the reader of CIFAR-10 or CIFAR-100, and the check of its files against torchvision's checksums."""

    def read(root: Path) -> Listing:
        train, test = kind(root, train=True), kind(root, train=False)
        return Listing(
            list(train.classes),
            Samples(train.data, np.asarray(train.targets, dtype=np.int64)),
            test=Samples(test.data, np.asarray(test.targets, dtype=np.int64)),
        )

    def intact(root: Path) -> bool:
        files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        return all(check_integrity(root / kind.base_folder / name, md5) for name, md5 in files)

    return read, intact


def _samples(dataset: Any) -> Samples:
    """Paths and labels of a torchvision data set; its classes store them under different names."""
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths = dataset._images if hasattr(dataset, "_images") else dataset._image_files
        labels = dataset._labels
    return Samples(Paths(map(os.fspath, paths)), np.asarray(labels, dtype=np.int64))


def read_flowers(root: Path) -> Listing:
    """List Flowers-102: official train, val and test."""
    train, val, test = (_samples(datasets.Flowers102(root, split)) for split in ("train", "val", "test"))
    names = getattr(datasets.Flowers102, "classes", None)  # older versions of torchvision have no names
    names = list(names) if names else [f"flower {i}" for i in range(1, 103)]
    return Listing(names, train, val, test, recipe_trains_on_val=True)


def read_food(root: Path) -> Listing:
    """List Food-101: official train and test."""
    train, test = datasets.Food101(root, "train"), datasets.Food101(root, "test")
    return Listing(list(train.classes), _samples(train), test=_samples(test))


def read_pets(root: Path) -> Listing:
    """List Oxford-IIIT Pet: official trainval and test."""
    train, test = datasets.OxfordIIITPet(root, "trainval"), datasets.OxfordIIITPet(root, "test")
    return Listing(list(train.classes), _samples(train), test=_samples(test))


def read_aircraft(root: Path) -> Listing:
    """List FGVC-Aircraft by variant: official train, val and test."""
    train, val, test = (datasets.FGVCAircraft(root, split) for split in ("train", "val", "test"))
    return Listing(list(train.classes), _samples(train), _samples(val), _samples(test), recipe_trains_on_val=True)


def read_cars(root: Path) -> Listing:
    """List Stanford Cars: official train and test."""
    train, test = datasets.StanfordCars(root, "train"), datasets.StanfordCars(root, "test")
    return Listing([str(name) for name in train.classes], _samples(train), test=_samples(test))


def read_cub(root: Path) -> Listing:
    """List CUB-200-2011 from its text files: official train and test.

    Raises:
        OSError: a list cannot be read.
        ValueError: a list is damaged, or the lists name different images.
        KeyError: an image belongs to a class that classes.txt does not list.
    """
    folder = root / "CUB_200_2011"

    def table(name: str) -> dict[int, str]:
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        return {int(key): value for key, value in (line.split(maxsplit=1) for line in lines if line.strip())}

    images, classes = table("images.txt"), table("classes.txt")
    labels, training = table("image_class_labels.txt"), table("train_test_split.txt")
    if not images.keys() == labels.keys() == training.keys():
        raise ValueError("images.txt, image_class_labels.txt and train_test_split.txt name different images")
    order = {number: position for position, number in enumerate(sorted(classes))}

    def part(flag: str) -> Samples:
        chosen = [number for number in sorted(images) if training[number].strip() == flag]
        paths = [os.fspath(folder / "images" / images[number].strip()) for number in chosen]
        return Samples(Paths(paths), np.asarray([order[int(labels[number])] for number in chosen], dtype=np.int64))

    names = [classes[number].strip().split(".", 1)[-1].replace("_", " ") for number in sorted(classes)]
    return Listing(names, part("1"), test=part("0"))
