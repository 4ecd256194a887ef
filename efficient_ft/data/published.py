"""The published data sets: the files of each, where they are downloaded from, and what is missing."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torchvision import datasets

from efficient_ft.core.errors import UserError
from efficient_ft.core.network import unreachable
from efficient_ft.core.text import printable
from efficient_ft.data.below import refuse_elsewhere
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.fetch import Archive
from efficient_ft.data.listing import Listing, Samples
from efficient_ft.data.paths import Paths
from efficient_ft.data.readers import (
    cifar_reader,
    read_aircraft,
    read_cars,
    read_cub,
    read_flowers,
    read_food,
    read_pets,
)

_ALTERNATIVES = (
    "Or use data=folder data.root=DIR (your own images, DIR/train/CLASS/*.jpg and DIR/test/CLASS/*.jpg, "
    "or DIR/CLASS/*.jpg), or data=digits (needs no files)."
)


@dataclass(frozen=True)
class PublishedSet:
    """A published data set: its files below `data.root`, and the reader of its lists.

    Args:
        title: its name in messages.
        classes: the number of classes.
        folder: the subfolder that holds everything; `data.root` may also be this folder.
        archives: the files.
        read: lists the samples below the root; of texts it takes `data.text` as well. May raise any exception on
            damaged lists.
        intact: checks the unpacked files against the publisher's checksums, where there are any.
        by_hand: the reason why it cannot be downloaded; None if it can.
        alternatives: other data, for messages.
    """

    title: str
    classes: int
    folder: str
    archives: tuple[Archive, ...]
    read: Callable[..., Any]
    intact: Callable[[Path], bool] | None = None
    by_hand: str | None = None
    alternatives: str = _ALTERNATIVES

    def root(self, root: str | os.PathLike[str]) -> Path:
        """Return the folder that contains `folder`, also if `root` names `folder`."""
        path = Path(root).expanduser()
        if path.name == self.folder and not (path / self.folder).exists() and path.is_dir():
            return path.parent
        return path

    def pending(self, root: Path) -> list[Archive]:
        """Return the archives that are to be fetched or unpacked."""
        return [archive for archive in self.archives if archive.state(root) != "ready"]

    def missing(self, name: str, root: Path, download: bool) -> str | None:
        """Look for the files below `root`; ask the host for those that are absent.

        Args:
            name: the value of `data.name`, for the message.
            root: the folder that contains `folder`.
            download: whether absent files may be fetched.

        Returns:
            None if all files are present or can be fetched, else a message: which file belongs where, and alternatives.
        """
        absent = [archive for archive in self.archives if archive.state(root) in ("absent", "partial", "broken")]
        for archive in absent:
            if archive.state(root) == "broken" and self.by_hand is None:
                return (
                    f"data={name}: {(root / str(archive.unpacks)).absolute()} is incomplete, it lacks "
                    f"{', '.join(archive.lacks(root))}. Delete that folder and run again. {self.alternatives}"
                )
        if not absent:
            if self.intact is None or self.pending(root) or self.intact(root):
                return None
            return (
                f"data={name}: files in {(root / self.folder).absolute()} are damaged (their checksums differ). "
                f"Delete that folder and run again. {self.alternatives}"
            )
        if self.by_hand is not None:
            why = self.by_hand
        elif not download:
            why = "data.download=false forbids fetching them."
        else:
            assert absent[0].url is not None
            reason = unreachable(absent[0].url, absent[0].size)
            if reason is None:
                return None
            why = f"They cannot be fetched: {reason}."
        lines = [f"data={name}: {self.title} is not complete in {root.absolute()}. {why}", "Put there by hand:"]
        for archive in absent:
            lines.append(f"  {archive.describe(root)}")
            if archive.url is not None:
                lines.append(f"    from {archive.url}")
        return "\n".join([*lines, self.alternatives])


def read_published(name: str, root: Path, follow_links: bool = False) -> Listing:
    """List the published data set `name`, whose archives are all `ready` below `root`.

    Args:
        name: the data set.
        root: contains its folder.
        follow_links: use the targets of links out of its folder.

    Raises:
        UserError: a list is damaged, or listed images do not exist or are outside of the data set.
    """
    source = PUBLISHED[name]
    where = (root / source.folder).absolute()
    again = f"Remove {where} and run again (its archives are kept), or put a complete copy there."
    try:
        listing = source.read(root)
    except Exception as error:  # every format raises its own kinds on damage
        raise UserError(f"data={name}: the lists in {where} cannot be read ({error}). {again}") from error
    splits = {"train": listing.train, "val": listing.val, "test": listing.test}
    listing.origins = {split: "official" for split, part in splits.items() if part is not None}
    parts = [part for part in splits.values() if part is not None]
    for part in parts:
        if len(part) and not 0 <= part.labels.min() <= part.labels.max() < len(listing.class_names):
            raise UserError(f"data={name}: the lists in {where} hold labels without a class. {again}")
    gone = _nonexistent(parts)
    if gone:
        raise UserError(
            f"data={name}: {counted(len(gone), 'listed image')} {verb(len(gone), 'does', 'do')} not exist, such as"
            f" {printable(gone[0])}. {again}"
        )
    for part in parts:
        refuse_elsewhere(part.images if isinstance(part.images, Paths) else (), where, follow_links)
    return listing


def _nonexistent(parts: Sequence[Samples]) -> list[str]:
    """Listed files that do not exist; reads each folder once instead of asking for each file."""
    folders: dict[str, set[str]] = {}
    gone = []
    for part in parts:
        for path in part.images if isinstance(part.images, Paths) else ():
            folder, name = os.path.split(path)
            if folder not in folders:
                folders[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            if name not in folders[folder]:
                gone.append(path)
    return gone


def _cifar_source(kind: type[datasets.CIFAR10], title: str, classes: int, size: int) -> PublishedSet:
    read, intact = cifar_reader(kind)
    archive = Archive(kind.filename, kind.base_folder, kind.url, kind.tgz_md5, size)
    return PublishedSet(title, classes, kind.base_folder, (archive,), read, intact)


_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_FLOWERS = f"{_OXFORD}/flowers/102"
_PETS = f"{_OXFORD}/pets/data"

#: By name. URLs and checksums are torchvision's (a test compares them), sizes the publishers'.
PUBLISHED: dict[str, PublishedSet] = {
    "cifar10": _cifar_source(datasets.CIFAR10, "CIFAR-10", 10, 170498071),
    "cifar100": _cifar_source(datasets.CIFAR100, "CIFAR-100", 100, 169001437),
    "flowers102": PublishedSet(
        "Flowers-102",
        102,
        "flowers-102",
        (
            Archive(
                "flowers-102/102flowers.tgz",
                "flowers-102/jpg",
                f"{_FLOWERS}/102flowers.tgz",
                "52808999861908f626f3c1f4e79d11fa",
                344862509,
            ),
            Archive(
                "flowers-102/imagelabels.mat",
                url=f"{_FLOWERS}/imagelabels.mat",
                md5="e0620be6f572b9609742df49c70aed4d",
            ),
            Archive("flowers-102/setid.mat", url=f"{_FLOWERS}/setid.mat", md5="a5357ecc9cb78c4bef273ce3793fc85c"),
        ),
        read_flowers,
    ),
    "food101": PublishedSet(
        "Food-101",
        101,
        "food-101",
        (
            Archive(
                "food-101.tar.gz",
                "food-101",
                "http://data.vision.ee.ethz.ch/cvl/food-101.tar.gz",
                "85eeb15f3717b99a5da872d97d918f87",
                4996278331,
                ("images", "meta/train.json", "meta/test.json"),
            ),
        ),
        read_food,
    ),
    "pets": PublishedSet(
        "Oxford-IIIT Pet",
        37,
        "oxford-iiit-pet",
        (
            Archive(
                "oxford-iiit-pet/images.tar.gz",
                "oxford-iiit-pet/images",
                f"{_PETS}/images.tar.gz",
                "5c4f3ee8e5d25df40f4fd59a7f44e54c",
                791918971,
            ),
            Archive(
                "oxford-iiit-pet/annotations.tar.gz",
                "oxford-iiit-pet/annotations",
                f"{_PETS}/annotations.tar.gz",
                "95a8c909bbe2e81eed6a22bccdf3f68f",
                19173078,
                ("trainval.txt", "test.txt"),
            ),
        ),
        read_pets,
    ),
    "aircraft": PublishedSet(
        "FGVC-Aircraft",
        100,
        "fgvc-aircraft-2013b",
        (
            Archive(
                "fgvc-aircraft-2013b.tar.gz",
                "fgvc-aircraft-2013b",
                f"{_OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
                size=2753340328,
                contents=("data/images", "data/variants.txt"),
            ),
        ),
        read_aircraft,
    ),
    "cars": PublishedSet(
        "Stanford Cars",
        196,
        "stanford_cars",
        (
            Archive("stanford_cars/cars_train.tgz", "stanford_cars/cars_train"),
            Archive("stanford_cars/cars_test.tgz", "stanford_cars/cars_test"),
            Archive(
                "stanford_cars/car_devkit.tgz",
                "stanford_cars/devkit",
                contents=("cars_train_annos.mat", "cars_meta.mat"),
            ),
            Archive("stanford_cars/cars_test_annos_withlabels.mat"),
        ),
        read_cars,
        by_hand="Its publisher has withdrawn the download, so its files have to come from a copy you have.",
    ),
    "cub200": PublishedSet(
        "CUB-200-2011",
        200,
        "CUB_200_2011",
        (
            Archive(
                "CUB_200_2011.tgz",
                "CUB_200_2011",
                contents=("images", "images.txt", "classes.txt", "image_class_labels.txt", "train_test_split.txt"),
            ),
        ),
        read_cub,
        by_hand="It is read from a local copy: https://data.caltech.edu/records/65de6-vp158 has the archive.",
    ),
}
