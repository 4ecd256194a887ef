"""Published data sets, with their files, downloads and lists of samples.

Most image lists are read by torchvision, so the splits and labels are the same as in torchvision.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

import numpy as np
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from efficient_ft.config.schema import DataConfig, MaskConfig
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.network import unreachable
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.fetch import Archive, fetch
from efficient_ft.data.file_list import Paths, refuse_elsewhere
from efficient_ft.data.listing import Listing, Samples, splits_of
from efficient_ft.data.mask_folder import read_mask_folder
from efficient_ft.data.masks import Classes, MaskListing, MaskSamples
from efficient_ft.data.splits import Split
from efficient_ft.data.text_places import SplitRows
from efficient_ft.data.text_rows import read_rows
from efficient_ft.data.texts import TextListing, listing_of

_ALTERNATIVES = (
    "You can also use your own images with data=folder data.root=DIR (DIR/train/CLASS/*.jpg and DIR/test/CLASS/*.jpg, "
    "or DIR/CLASS/*.jpg), or use data=digits, which requires no files."
)


@dataclass(frozen=True)
class PublishedSet:
    """A published data set, with its files below `data.root` and the function that reads its lists."""

    title: str  # name shown in messages
    classes: int  # number of classes
    folder: str  # subfolder that contains all files; `data.root` may also be this folder
    archives: tuple[Archive, ...]  # files of the data set
    lists: Callable[[Path, DataConfig], Any]  # function that lists the samples below a root folder
    intact: Callable[[Path], bool] | None = None  # function that verifies the checksums of the unpacked files
    by_hand: str | None = None  # reason why the data set cannot be downloaded, or None if it can be downloaded
    alternatives: str = _ALTERNATIVES  # sentence about other data sets, shown in messages

    def root(self, root: str | os.PathLike[str]) -> Path:
        """Return the folder that contains `folder`, even if `root` is `folder` itself."""
        path = Path(root).expanduser()
        if path.name == self.folder and not (path / self.folder).exists() and path.is_dir():
            return path.parent
        return path

    def absent(self, root: Path) -> list[Archive]:
        """Return the archives that must be downloaded or copied to the folder `root`."""
        return [archive for archive in self.archives if archive.state(root) in ("absent", "partial", "broken")]

    def class_count(self, config: DataConfig) -> int:
        """Return the number of classes."""
        return self.classes

    def read(self, config: DataConfig) -> Any:
        """Download and unpack missing files, and list the samples of each split. Raise `UserError` if this fails."""
        if (problem := self.missing(config)) is not None:
            raise UserError(problem)
        root = self.root(config.root)
        fetch(self.archives, root)
        return self.lists(root, config)

    def missing(self, config: DataConfig) -> str | None:
        """Return an error message if files are missing and cannot be downloaded, or None otherwise.

        The message contains the missing files, their expected locations, and alternatives. With ``data.download=true``,
        the server is queried for missing files.
        """
        name, root = config.name, self.root(config.root)
        absent = self.absent(root)
        for archive in absent:
            if archive.state(root) == "broken" and self.by_hand is None:
                return (
                    f"data={name}: the folder {(root / str(archive.unpacks)).absolute()} is incomplete. The folder does"
                    f" not contain {', '.join(archive.lacks(root))}. Delete this folder and run the command again."
                    f" {self.alternatives}"
                )
        if not absent:
            packed = any(archive.state(root) != "ready" for archive in self.archives)
            if self.intact is None or packed or self.intact(root):
                return None
            return (
                f"data={name}: files in {(root / self.folder).absolute()} are damaged (the checksums differ). "
                f"Delete this folder and run the command again. {self.alternatives}"
            )
        if self.by_hand is not None:
            why = self.by_hand
        elif not config.download:
            why = "data.download=false disables the download."
        else:
            assert absent[0].url is not None
            reason = unreachable(absent[0].url, absent[0].size)
            if reason is None:
                return None
            why = f"The missing files cannot be downloaded: {reason}."
        state = f"data={name}: the files of {self.title} in {root.absolute()} are not complete. {why}"
        lines = [state, "Copy these files to the following locations:"]
        for archive in absent:
            lines.append(f"  {archive.describe(root)}")
            if archive.url is not None:
                lines.append(f"    from {archive.url}")
        return "\n".join([*lines, self.alternatives])


def _read_images(read: Callable[[Path], Listing], root: Path, config: DataConfig) -> Listing:
    """List the samples of a published image data set with `read`, and check them.

    Raise `UserError` if a list is damaged, or if listed images do not exist or are outside of the data set.
    """
    name = config.name
    where = (root / PUBLISHED[name].folder).absolute()
    again = f"Remove {where} and run the command again (the archives are kept), or use a complete copy of the data set."
    try:
        listing = read(root)
    except Exception as error:  # readers raise exceptions of many types on damaged lists
        raise UserError(f"data={name}: the lists in {where} cannot be read ({error}). {again}") from error
    splits: dict[str, Samples] = splits_of(listing)
    listing.origins = dict.fromkeys(splits, "official")
    for part in splits.values():
        if len(part) and not 0 <= part.labels.min() <= part.labels.max() < len(listing.class_names):
            raise UserError(f"data={name}: the lists in {where} contain labels without a class. {again}")
    files = [part.images for part in splits.values() if isinstance(part.images, Paths)]
    names_in = cache(lambda folder: frozenset(os.listdir(folder) if os.path.isdir(folder) else ()))
    listed = (path for paths in files for path in paths)  # reading each folder once is faster than checking each file
    gone = [path for path in listed if os.path.basename(path) not in names_in(os.path.dirname(path))]
    if gone:
        raise UserError(
            f"data={name}: {counted(len(gone), 'listed image')} {verb(len(gone), 'does', 'do')} not exist, for example"
            f" {printable(gone[0])}. {again}"
        )
    for paths in files:
        refuse_elsewhere(paths, where, config.follow_links)
    return listing


def _samples(dataset: Any) -> Samples:
    """Return the paths and labels of a torchvision data set.

    The names of the attributes that contain paths and labels differ between torchvision classes.
    """
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths = dataset._images if hasattr(dataset, "_images") else dataset._image_files
        labels = dataset._labels
    return Samples(Paths(map(os.fspath, paths)), np.asarray(labels, dtype=np.int64))


def _reader(kind: Any, *splits: str) -> Callable[[Path, DataConfig], Listing]:
    """Create a function that lists a torchvision data set with the splits (train, test) or (train, val, test)."""

    def read(root: Path) -> Listing:
        parts = [kind(root, split) for split in splits]
        train, *val, test = map(_samples, parts)
        names = [str(name) for name in parts[0].classes]
        return Listing(names, train, val[0] if val else None, test, recipe_trains_on_val=bool(val))

    return partial(_read_images, read)


def _read_cub(root: Path) -> Listing:
    """List the samples of CUB-200-2011. Raise OSError, ValueError or KeyError if a list is damaged."""
    folder = root / "CUB_200_2011"

    def table(name: str) -> dict[int, str]:
        lines = (folder / name).read_text(encoding="utf-8").splitlines()
        return {int(key): value for key, value in (line.split(maxsplit=1) for line in lines if line.strip())}

    images, classes = table("images.txt"), table("classes.txt")
    labels, training = table("image_class_labels.txt"), table("train_test_split.txt")
    if not images.keys() == labels.keys() == training.keys():
        raise ValueError("images.txt, image_class_labels.txt and train_test_split.txt list different images")
    order = {number: position for position, number in enumerate(sorted(classes))}

    def part(flag: str) -> Samples:
        chosen = [number for number in sorted(images) if training[number].strip() == flag]
        paths = [os.fspath(folder / "images" / images[number].strip()) for number in chosen]
        return Samples(Paths(paths), np.asarray([order[int(labels[number])] for number in chosen], dtype=np.int64))

    names = [classes[number].strip().split(".", 1)[-1].replace("_", " ") for number in sorted(classes)]
    return Listing(names, part("1"), test=part("0"))


def _cifar(kind: type[datasets.CIFAR10], title: str, classes: int, size: int) -> PublishedSet:
    def read(root: Path) -> Listing:
        train, test = kind(root, train=True), kind(root, train=False)
        parts = [Samples(one.data, np.asarray(one.targets, dtype=np.int64)) for one in (train, test)]
        return Listing(list(train.classes), parts[0], test=parts[1])

    def intact(root: Path) -> bool:
        files = [*kind.train_list, *kind.test_list, (kind.meta["filename"], kind.meta["md5"])]
        return all(check_integrity(root / kind.base_folder / name, md5) for name, md5 in files)

    archive = Archive(kind.filename, kind.base_folder, kind.url, kind.tgz_md5, size)
    return PublishedSet(title, classes, kind.base_folder, (archive,), partial(_read_images, read), intact)


def _file(
    folder: str, url: str, md5: str | None, size: int | None = None, unpacks: str | None = None, *contents: str
) -> Archive:
    """Describe a file at a URL. The file and the folder `unpacks` are stored in `folder`."""
    path = f"{folder}/{url.rpartition('/')[2]}"
    return Archive(path, None if unpacks is None else f"{folder}/{unpacks}", url, md5, size, contents)


_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_FLOWERS = f"{_OXFORD}/flowers/102"
_PETS = f"{_OXFORD}/pets/data"

#: Image data sets, keyed by name. URLs and checksums are taken from torchvision, and sizes from the publishers.
PUBLISHED: dict[str, PublishedSet] = {
    "cifar10": _cifar(datasets.CIFAR10, "CIFAR-10", 10, 170498071),
    "cifar100": _cifar(datasets.CIFAR100, "CIFAR-100", 100, 169001437),
    "flowers102": PublishedSet(
        "Flowers-102",
        102,
        "flowers-102",
        (
            _file("flowers-102", f"{_FLOWERS}/102flowers.tgz", "52808999861908f626f3c1f4e79d11fa", 344862509, "jpg"),
            _file("flowers-102", f"{_FLOWERS}/imagelabels.mat", "e0620be6f572b9609742df49c70aed4d"),
            _file("flowers-102", f"{_FLOWERS}/setid.mat", "a5357ecc9cb78c4bef273ce3793fc85c"),
        ),
        _reader(datasets.Flowers102, "train", "val", "test"),
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
        _reader(datasets.Food101, "train", "test"),
    ),
    "pets": PublishedSet(
        "Oxford-IIIT Pet",
        37,
        "oxford-iiit-pet",
        (
            _file("oxford-iiit-pet", f"{_PETS}/images.tar.gz", "5c4f3ee8e5d25df40f4fd59a7f44e54c", 791918971, "images"),
            _file(
                "oxford-iiit-pet",
                f"{_PETS}/annotations.tar.gz",
                "95a8c909bbe2e81eed6a22bccdf3f68f",
                19173078,
                "annotations",
                "trainval.txt",
                "test.txt",
            ),
        ),
        _reader(datasets.OxfordIIITPet, "trainval", "test"),
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
        _reader(datasets.FGVCAircraft, "train", "val", "test"),
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
        _reader(datasets.StanfordCars, "train", "test"),
        by_hand="The publisher has withdrawn the download, so an existing copy of the files is required.",
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
        partial(_read_images, _read_cub),
        by_hand="Download the archive manually from https://data.caltech.edu/records/65de6-vp158.",
    ),
}


#: File name and number of rows of each RTE split.
_RTE: dict[Split, tuple[str, int]] = {"train": ("train.tsv", 2490), "test": ("dev.tsv", 277)}


def _read_rte(root: Path, config: DataConfig) -> TextListing:
    """List the samples of RTE (Wang et al., "GLUE", ICLR 2019), a task of recognizing entailment between sentences."""
    assert config.text is not None, "refused by `config.check`"
    folder, found, settings = root / "RTE", SplitRows(), config.text
    for split, (name, count) in _RTE.items():
        rows, read = read_rows(folder / name, settings)
        if len(rows) != count:
            raise UserError(
                f"The file {printable((folder / name).absolute())} contains {counted(len(rows), 'row')} instead of"
                f" {count:,}. Remove the folder and run the command again to download the data set."
            )
        found.rows[split], found.origins[split], found.columns = rows, f"{name} ({read.origin})", read.columns
        found.notes += read.notes
    listing = listing_of(found, folder, settings)
    listing.notes.append("The RTE test labels are not public. As in the papers, validation texts are used for testing.")
    return listing


_RTE_URL = "https://dl.fbaipublicfiles.com/glue/data/RTE.zip"
_RTE_ARCHIVE = Archive("RTE.zip", "RTE", _RTE_URL, contents=("train.tsv", "dev.tsv"))
_OWN_TEXTS = "You can also use your own texts with data=text_folder data.root=FILE (a .csv, .tsv or .jsonl file)."
TEXT_SETS = {"rte": PublishedSet("RTE (GLUE)", 2, "RTE", (_RTE_ARCHIVE,), _read_rte, alternatives=_OWN_TEXTS)}


#: The eleven evaluated classes of CamVid (Brostow, Fauqueur, Cipolla, "Semantic object classes in video", 2009).
_CAMVID = (
    "sky", "building", "pole", "road", "pavement", "tree", "sign_symbol", "fence", "car", "pedestrian", "bicyclist",
)  # fmt: skip
_VOC = (
    "background", "aeroplane", "bicycle", "bird", "boat", "bottle", "bus", "car", "cat", "chair", "cow", "diningtable",
    "dog", "horse", "motorbike", "person", "pottedplant", "sheep", "sofa", "train", "tvmonitor",
)  # fmt: skip
#: The 19 evaluated classes of Cityscapes. The keys are the ids in ``*_gtFine_labelIds.png``.
_CITYSCAPES = {
    7: "road", 8: "sidewalk", 11: "building", 12: "wall", 13: "fence", 17: "pole", 19: "traffic light",
    20: "traffic sign", 21: "vegetation", 22: "terrain", 23: "sky", 24: "person", 25: "rider", 26: "car", 27: "truck",
    28: "bus", 31: "train", 32: "motorcycle", 33: "bicycle",
}  # fmt: skip
_CITYSCAPES_IDS = 34


@dataclass(frozen=True)
class MaskSet:
    """A published segmentation data set, which must be downloaded manually."""

    title: str  # name shown in messages
    folder: str  # default folder below `data.root`
    classes: Classes  # classes of the masks
    contents: tuple[str, ...]  # required paths, relative to the folder
    lists: Callable[[Path, bool], MaskListing]  # function (folder, follow_links) that lists the splits
    source: str  # download location, shown in messages

    def root(self, root: str | os.PathLike[str]) -> Path:
        """Return the folder of the data set, which is `root` or a folder below `root`."""
        path = Path(root).expanduser()
        return path / self.folder if (path / self.folder).is_dir() else path

    def absent(self, root: Path) -> list[str]:
        """Return the required paths that do not exist in the folder `root`."""
        return [entry for entry in self.contents if not (root / entry).exists()]

    def class_count(self, config: DataConfig) -> int:
        """Return the number of classes."""
        return len(self.classes.names)

    def read(self, config: DataConfig) -> MaskListing:
        """List the images and masks of each split. Raise `UserError` if a file is missing or damaged."""
        if (problem := self.missing(config)) is not None:
            raise UserError(problem)
        return self.lists(self.root(config.root), config.follow_links)

    def missing(self, config: DataConfig) -> str | None:
        """Return an error message with the missing files and their expected location, or None if all files exist."""
        folder = self.root(config.root)
        if not (absent := self.absent(folder)):
            return None
        return (
            f"data={config.name} ({self.title}): the folder {printable(folder.absolute())} does not contain"
            f" {', '.join(absent)}.\n"
            f"Download the data set from {self.source} and set data.root to the folder that contains"
            f" {', '.join(self.contents)}. For other layouts, use data=mask_folder."
        )


def _camvid(root: Path, follow_links: bool) -> MaskListing:
    names = None if (root / "classes.txt").is_file() else [*_CAMVID, "void"]
    return read_mask_folder(root, MaskConfig(classes=names), follow_links=follow_links)


def _voc(root: Path, follow_links: bool) -> MaskListing:
    lists = root / "ImageSets" / "Segmentation"
    train = next((lists / name for name in ("trainaug.txt", "train_aug.txt") if (lists / name).is_file()), None)
    if train is None:
        missing = "trainaug.txt, the list of the augmented training set"
        raise UserError(f"The folder {printable(lists.absolute())} does not contain {missing}.")
    parts = []
    for file in (train, lists / "val.txt"):
        stems = [Path(name).stem for name in _names(file)]  # some lists contain paths instead of names
        images = [root / "JPEGImages" / f"{stem}.jpg" for stem in stems]
        masks = [root / "SegmentationClassAug" / f"{stem}.png" for stem in stems]
        parts.append(_existing(images, masks, root, follow_links))
    return MaskListing(MASK_SETS["voc2012_aug"].classes, parts[0], None, parts[1], notes=_on_val("Pascal VOC 2012"))


def _names(file: Path) -> list[str]:
    again = "Restore this file from the published data set."
    try:
        found = [line.split()[0] for line in file.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, ValueError) as error:
        raise UserError(f"The file {printable(file)} cannot be read ({first_line(error)}). {again}") from error
    if not found:
        raise UserError(f"The file {printable(file)} contains no names of images. {again}")
    return found


def _cityscapes(root: Path, follow_links: bool) -> MaskListing:
    parts = []
    for split in ("train", "val"):
        folder, labels = root / "leftImg8bit" / split, root / "gtFine" / split
        images = sorted(folder.glob("*/*_leftImg8bit.png"))
        if not images:
            raise UserError(f"The folder {printable(folder.absolute())} contains no file CITY/*_leftImg8bit.png.")
        names = [one.relative_to(folder).as_posix().replace("_leftImg8bit", "_gtFine_labelIds") for one in images]
        parts.append(_existing(images, [labels / name for name in names], root, follow_links))
    return MaskListing(MASK_SETS["cityscapes"].classes, parts[0], None, parts[1], notes=_on_val("Cityscapes"))


def _existing(images: Sequence[Path], masks: Sequence[Path], root: Path, follow_links: bool) -> MaskSamples:
    for path in (*images, *masks):
        if not path.is_file():
            raise UserError(f"{printable(path)}: the file does not exist. The copy of the data set is incomplete.")
    samples = MaskSamples(list(map(str, images)), list(map(str, masks)))
    refuse_elsewhere((*samples.images, *samples.masks), root, follow_links)
    return samples


def _on_val(title: str) -> list[str]:
    return [f"The {title} test labels are not public. As in the papers, the validation images are used for testing."]


_UNLABELED = frozenset({IGNORED, *(i for i in range(_CITYSCAPES_IDS) if i not in _CITYSCAPES)})
# fmt: off
MASK_SETS: dict[str, MaskSet] = {
    "camvid": MaskSet(
        "CamVid", "camvid", Classes(_CAMVID, tuple(range(len(_CAMVID))), frozenset({len(_CAMVID), IGNORED})),
        ("train/images", "train/masks"), _camvid,
        "http://mi.eng.cam.ac.uk/research/projects/VideoRec/CamVid/ (train, val and test with images/ and masks/)",
    ),
    "voc2012_aug": MaskSet(
        "Pascal VOC 2012, augmented", "VOCdevkit/VOC2012", Classes(_VOC, tuple(range(len(_VOC)))),
        ("JPEGImages", "SegmentationClassAug", "ImageSets/Segmentation/val.txt"), _voc,
        "http://host.robots.ox.ac.uk/pascal/VOC/voc2012/ and http://home.bharathh.info/pubs/codes/SBD/download.html",
    ),
    "cityscapes": MaskSet(
        "Cityscapes", "cityscapes", Classes(tuple(_CITYSCAPES.values()), tuple(_CITYSCAPES), _UNLABELED),
        ("leftImg8bit/train", "gtFine/train", "leftImg8bit/val", "gtFine/val"), _cityscapes,
        "https://www.cityscapes-dataset.com (requires an account)",
    ),
}
# fmt: on
