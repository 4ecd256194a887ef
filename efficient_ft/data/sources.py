"""The data sets: which files each consists of, and how its lists are read.

`LISTED` holds the published ones, by name; `read_folder` reads a user's own images; `read_digits` the real
data set that ships inside scikit-learn. Each gives a `Listing`: samples and class names, nothing decoded.
torchvision's classes read the lists of the sets it knows, so that splits and labels are everyone's.
"""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from torchvision import datasets
from torchvision.datasets.utils import check_integrity

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.data.fetch import Archive, unreachable
from efficient_ft.data.images import EXTENSIONS, class_name, is_image, shown

INSTEAD = (
    "Use instead: data=folder data.root=DIR (your own images, DIR/train/CLASS/*.jpg and DIR/test/CLASS/*.jpg, "
    "or DIR/CLASS/*.jpg), or data=digits (needs no files)."
)
_VAL_NAMES = ("val", "valid", "validation")
_TEST_SEED = 0  # the test images of a set without official ones do not depend on the run's seed
_TEST_FRACTION = 0.2


@dataclass
class Samples:
    """Images that are not loaded yet, or already in memory, with their labels.

    Args:
        images: N paths, or uint8 (N, H, W, 3).
        labels: int64 (N,).
    """

    images: list[str] | np.ndarray
    labels: np.ndarray

    def __len__(self) -> int:
        return len(self.labels)

    def take(self, indices: np.ndarray) -> Samples:
        """Those at `indices`, in that order."""
        images = self.images[indices] if isinstance(self.images, np.ndarray) else [self.images[i] for i in indices]
        return Samples(images, self.labels[indices])

    def join(self, other: Samples) -> Samples:
        """These and then the others, both of files."""
        assert isinstance(self.images, list)
        assert isinstance(other.images, list)
        return Samples(self.images + other.images, np.concatenate([self.labels, other.labels]))


@dataclass
class Listing:
    """A data set as its publisher, or the user's folders, divide it.

    Args:
        val: the official validation images; None where a part of `train` has to serve.
        test: None where there are none but validation images.
        recipe_trains_on_val: published results train on `train` and `val` together.
        notes: what a user should know, one sentence each.
    """

    class_names: list[str]
    train: Samples
    val: Samples | None = None
    test: Samples | None = None
    recipe_trains_on_val: bool = False
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Source:
    """A published data set: its files below `data.root`, and the reader of its lists.

    Args:
        title: its name in messages.
        classes: how many there are.
        folder: where everything lies; `data.root` may also be this folder itself.
        archives: the files.
        read: root → listing; raises anything on damaged lists.
        intact: a further look at unpacked files, where the publisher gives checksums.
        by_hand: why it cannot be downloaded; None if it can.
    """

    title: str
    classes: int
    folder: str
    archives: tuple[Archive, ...]
    read: Callable[[Path], Listing]
    intact: Callable[[Path], bool] | None = None
    by_hand: str | None = None

    def root(self, root: str | os.PathLike[str]) -> Path:
        """The folder that holds `folder`, also when the user named `folder` itself."""
        path = Path(root).expanduser()
        if path.name == self.folder and not (path / self.folder).exists() and path.is_dir():
            return path.parent
        return path

    def needed(self, root: Path) -> list[Archive]:
        """The archives that have to be fetched or unpacked."""
        return [archive for archive in self.archives if archive.state(root) != "ready"]

    def missing(self, name: str, root: Path, download: bool) -> str | None:
        """None if all is there or can be fetched; else what to put where, and what to use instead."""
        absent = [archive for archive in self.archives if archive.state(root) in ("absent", "partial", "broken")]
        for archive in absent:
            if archive.state(root) == "broken" and self.by_hand is None:
                return (
                    f"data={name}: {(root / str(archive.unpacks)).absolute()} is incomplete, it lacks "
                    f"{', '.join(archive.lacks(root))}. Delete that folder and run again. {INSTEAD}"
                )
        if not absent:
            if self.intact is None or self.needed(root) or self.intact(root):
                return None
            return (
                f"data={name}: files in {(root / self.folder).absolute()} are damaged (their checksums differ). "
                f"Delete that folder and run again. {INSTEAD}"
            )
        if self.by_hand is not None:
            why = self.by_hand
        elif not download:
            why = "data.download=false forbids to fetch them."
        else:
            assert absent[0].url is not None
            reason = unreachable(absent[0].url, absent[0].size)
            if reason is None:
                return None
            why = f"They cannot be fetched: {reason}."
        lines = [f"data={name}: {self.title} is not complete in {root.absolute()}. {why}", "Put there by hand:"]
        for archive in absent:
            lines.append(f"  {archive.wanted(root)}")
            if archive.url is not None:
                lines.append(f"    from {archive.url}")
        return "\n".join([*lines, INSTEAD])


# ---------------------------------------------------------------- the published sets


def _cifar(kind: type[datasets.CIFAR10]) -> tuple[Callable[[Path], Listing], Callable[[Path], bool]]:
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


def _listed(dataset: Any) -> Samples:
    """The paths and labels of one of torchvision's data sets, which keep them under different names."""
    if hasattr(dataset, "_samples"):
        paths, labels = zip(*dataset._samples, strict=True)
    else:
        paths = dataset._images if hasattr(dataset, "_images") else dataset._image_files
        labels = dataset._labels
    return Samples([os.fspath(path) for path in paths], np.asarray(labels, dtype=np.int64))


def _flowers(root: Path) -> Listing:
    train, val, test = (_listed(datasets.Flowers102(root, split)) for split in ("train", "val", "test"))
    names = getattr(datasets.Flowers102, "classes", None)  # older versions of torchvision have no names
    names = list(names) if names else [f"flower {i}" for i in range(1, 103)]
    return Listing(names, train, val, test, recipe_trains_on_val=True)


def _food(root: Path) -> Listing:
    train, test = datasets.Food101(root, "train"), datasets.Food101(root, "test")
    return Listing(list(train.classes), _listed(train), test=_listed(test))


def _pets(root: Path) -> Listing:
    train, test = datasets.OxfordIIITPet(root, "trainval"), datasets.OxfordIIITPet(root, "test")
    return Listing(list(train.classes), _listed(train), test=_listed(test))


def _aircraft(root: Path) -> Listing:
    train, val, test = (datasets.FGVCAircraft(root, split) for split in ("train", "val", "test"))
    return Listing(list(train.classes), _listed(train), _listed(val), _listed(test), recipe_trains_on_val=True)


def _cars(root: Path) -> Listing:
    train, test = datasets.StanfordCars(root, "train"), datasets.StanfordCars(root, "test")
    return Listing([str(name) for name in train.classes], _listed(train), test=_listed(test))


def _cub(root: Path) -> Listing:
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
        return Samples(paths, np.asarray([order[int(labels[number])] for number in chosen], dtype=np.int64))

    names = [classes[number].strip().split(".", 1)[-1].replace("_", " ") for number in sorted(classes)]
    return Listing(names, part("1"), test=part("0"))


def _cifar_source(kind: type[datasets.CIFAR10], title: str, classes: int, size: int) -> Source:
    read, intact = _cifar(kind)
    archive = Archive(kind.filename, kind.base_folder, kind.url, kind.tgz_md5, size)
    return Source(title, classes, kind.base_folder, (archive,), read, intact)


_OXFORD = "https://www.robots.ox.ac.uk/~vgg/data"
_FLOWERS = f"{_OXFORD}/flowers/102"
_PETS = f"{_OXFORD}/pets/data"

# Addresses and checksums are those of torchvision (a test compares them); sizes are those of the publishers.
LISTED: dict[str, Source] = {
    "cifar10": _cifar_source(datasets.CIFAR10, "CIFAR-10", 10, 170498071),
    "cifar100": _cifar_source(datasets.CIFAR100, "CIFAR-100", 100, 169001437),
    "flowers102": Source(
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
        _flowers,
    ),
    "food101": Source(
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
        _food,
    ),
    "pets": Source(
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
        _pets,
    ),
    "aircraft": Source(
        "FGVC-Aircraft",
        100,
        "fgvc-aircraft-2013b",
        (
            Archive(
                "fgvc-aircraft-2013b.tar.gz",
                "fgvc-aircraft-2013b",
                f"{_OXFORD}/fgvc-aircraft/archives/fgvc-aircraft-2013b.tar.gz",
                size=2753340328,
                holds=("data/images", "data/variants.txt"),
            ),
        ),
        _aircraft,
    ),
    "cars": Source(
        "Stanford Cars",
        196,
        "stanford_cars",
        (
            Archive("stanford_cars/cars_train.tgz", "stanford_cars/cars_train"),
            Archive("stanford_cars/cars_test.tgz", "stanford_cars/cars_test"),
            Archive(
                "stanford_cars/car_devkit.tgz",
                "stanford_cars/devkit",
                holds=("cars_train_annos.mat", "cars_meta.mat"),
            ),
            Archive("stanford_cars/cars_test_annos_withlabels.mat"),
        ),
        _cars,
        by_hand="Its publisher has taken the download away, so its files have to come from a copy you have.",
    ),
    "cub200": Source(
        "CUB-200-2011",
        200,
        "CUB_200_2011",
        (
            Archive(
                "CUB_200_2011.tgz",
                "CUB_200_2011",
                holds=("images", "images.txt", "classes.txt", "image_class_labels.txt", "train_test_split.txt"),
            ),
        ),
        _cub,
        by_hand="It is read from a local copy: https://data.caltech.edu/records/65de6-vp158 has the archive.",
    ),
}


def read_listed(name: str, root: Path) -> Listing:
    """The lists of a published data set whose archives are `ready`.

    Raises:
        UserError: a list is damaged, or listed images are not there.
    """
    source = LISTED[name]
    where = (root / source.folder).absolute()
    again = f"Remove {where} and run again (archives beside it are kept), or put a whole copy there."
    try:
        listing = source.read(root)
    except Exception as error:  # every format has its own ways to be damaged
        raise UserError(f"data={name}: the lists in {where} cannot be read ({error}). {again}") from error
    for part in (listing.train, listing.val, listing.test):
        if (
            part is not None
            and len(part)
            and not 0 <= part.labels.min() <= part.labels.max() < len(listing.class_names)
        ):
            raise UserError(f"data={name}: the lists in {where} hold labels without a class. {again}")
    gone = _gone([part for part in (listing.train, listing.val, listing.test) if part is not None])
    if gone:
        raise UserError(
            f"data={name}: {len(gone)} images that its lists name are not there, the first is {shown(gone[0])}. {again}"
        )
    return listing


def _gone(parts: Sequence[Samples]) -> list[str]:
    """Listed files that do not exist; one look per folder instead of one per file."""
    folders: dict[str, set[str]] = {}
    gone = []
    for part in parts:
        for path in part.images if isinstance(part.images, list) else ():
            folder, name = os.path.split(path)
            if folder not in folders:
                folders[folder] = set(os.listdir(folder)) if os.path.isdir(folder) else set()
            if name not in folders[folder]:
                gone.append(path)
    return gone


# ---------------------------------------------------------------- digits


def read_digits() -> Listing:
    """The 1797 handwritten digits (8×8, 17 greys) of scikit-learn, a fifth of them for testing.

    Source: E. Alpaydin, C. Kaynak, Optical Recognition of Handwritten Digits, UCI, 1998.
    """
    from sklearn.datasets import load_digits

    digits = load_digits()
    grey = (digits.images * (255 / 16)).round().astype(np.uint8)
    samples = Samples(np.repeat(grey[..., None], 3, axis=-1), digits.target.astype(np.int64))
    train, test = split_off(samples, _TEST_FRACTION, _TEST_SEED)
    return Listing([str(i) for i in range(10)], train, test=test)


# ---------------------------------------------------------------- a user's own folders


def missing_folder(root: Path) -> str | None:
    """None if there is a folder, else what is expected there."""
    if root.is_dir():
        return None
    state = "is a file, not a folder" if root.exists() else "does not exist"
    return (
        f"data=folder: data.root={root} {state} ({root.absolute()}). Expected are class folders of images: "
        "DIR/train/CLASS/*.jpg and DIR/val/... or DIR/test/..., or DIR/CLASS/*.jpg (a part is then held out "
        "for testing). Use instead: data=digits (needs no files)."
    )


def folder_classes(root: Path) -> int | None:
    """How many class folders there are to train on, without looking at any image; None without a folder of them."""
    if not root.is_dir():
        return None
    folders = _subfolders(root)
    train = _subfolders(folders["train"]) if "train" in folders else {}
    return len(train or folders) or None


def read_folder(root: Path) -> Listing:
    """Class folders under `train/` and `val/` (or `valid/`, `validation/`) and/or `test/`; or class folders alone.

    A `val/` folder validates; a `test/` folder tests. Without either, a fifth of every class is held out for
    testing, the same images for every seed. Images lie anywhere below their class folder; hidden files and
    files that are no images by their extension are left out and counted in the notes.

    Raises:
        UserError: no folder, no or a single class, a class without images, classes that training lacks.
    """
    problem = missing_folder(root)
    if problem is not None:
        raise UserError(problem)
    folders = _subfolders(root)
    notes: list[str] = []
    train = folders.get("train")
    if train is None or not _subfolders(train):
        if train is not None and folders.keys() <= {"train", "test", *_VAL_NAMES}:
            raise UserError(f"{train.absolute()} has no class folders: expected is train/CLASS/*.jpg.")
        split = [name for name in (*_VAL_NAMES, "test") if name in folders]
        if split and train is None and all(_subfolders(folders[name]) for name in split):
            raise UserError(f"{root.absolute()} has {split[0]}/ but no train/ with class folders to train on.")
        names, samples = _scan(root, notes)
        return _held_out(names, samples, notes)

    validation = [name for name in _VAL_NAMES if name in folders]
    if len(validation) > 1:
        raise UserError(f"{root.absolute()} has {' and '.join(f'{n}/' for n in validation)}: keep one of them.")
    names, samples = _scan(train, notes)
    others = sorted(folders.keys() - {"train", "test", *_VAL_NAMES})
    if others:
        notes.append(f"Not used: {', '.join(shown(name) for name in others)} in {shown(root)}.")
    val = _scan_more(folders[validation[0]], names, notes) if validation else None
    test = _scan_more(folders["test"], names, notes) if "test" in folders else None
    if val is None and test is None:
        notes.append(f"{shown(root)} has train/ alone.")
        return _held_out(names, samples, notes)
    if test is None:
        notes.append(f"There is no test/ folder: accuracy is that on {validation[0]}/, which also chooses the epoch.")
    return Listing(names, samples, val, test, notes=notes)


def _held_out(names: list[str], samples: Samples, notes: list[str]) -> Listing:
    train, test = split_off(samples, _TEST_FRACTION, _TEST_SEED)
    if not len(test):
        raise UserError("Every class has a single image: none can be held out for testing. Add images.")
    notes.append(f"{len(test)} of {len(samples)} images are held out for testing, the same for every seed.")
    return Listing(names, train, test=test, notes=notes)


def _subfolders(folder: Path) -> dict[str, Path]:
    """Its folders by name, without hidden ones."""
    try:
        return {
            entry.name: Path(entry.path)
            for entry in os.scandir(folder)
            if entry.is_dir() and not entry.name.startswith(".") and entry.name != "__MACOSX"
        }
    except OSError as error:
        raise UserError(f"{shown(folder)} cannot be read ({error.strerror}).") from error


def _scan(folder: Path, notes: list[str]) -> tuple[list[str], Samples]:
    """Class names, sorted, and all images of a folder of class folders."""
    classes: dict[str, Path] = {}
    for name, path in sorted(_subfolders(folder).items()):
        if class_name(name) in classes:
            raise UserError(f"{folder.absolute()} has two folders for the class {class_name(name)!r}; merge them.")
        classes[class_name(name)] = path
    found, ignored = {}, Counter[str]()
    for name, path in classes.items():
        found[name], other = _images_below(path)
        ignored.update(other)
    if not any(found.values()):
        loose = sum(1 for path in folder.iterdir() if path.is_file() and is_image(path))
        hint = f" There are {loose} images outside of class folders." if loose else ""
        raise UserError(
            f"{folder.absolute()} has no class folders with images.{hint} Expected is CLASS/*.jpg, one folder per "
            f"class. Readable are {' '.join(EXTENSIONS)}.{_seen(ignored)}"
        )
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise UserError(
            f"{folder.absolute()} has class folders without images: {_some(empty)}. Add images or remove the "
            f"folders. Readable are {' '.join(EXTENSIONS)}.{_seen(ignored)}"
        )
    names = sorted(found)
    if len(names) == 1:
        raise UserError(f"{folder.absolute()} has a single class, {names[0]!r}: there is nothing to tell apart.")
    if ignored:
        notes.append(f"{sum(ignored.values())} files in {shown(folder)} are no images and not used.{_seen(ignored)}")
    paths = [path for name in names for path in found[name]]
    labels = [label for label, name in enumerate(names) for _ in found[name]]
    return names, Samples(paths, np.asarray(labels, dtype=np.int64))


def _scan_more(folder: Path, names: list[str], notes: list[str]) -> Samples:
    """The images of `val/` or `test/`, labelled by the classes of training."""
    paths: list[str] = []
    labels: list[int] = []
    known = {name: label for label, name in enumerate(names)}
    absent = set(names)
    ignored = Counter[str]()
    unknown = []
    for name, path in sorted(_subfolders(folder).items(), key=lambda item: class_name(item[0])):
        files, other = _images_below(path)
        ignored.update(other)
        if class_name(name) not in known:
            unknown.append(class_name(name))
        elif files:
            absent.discard(class_name(name))
            paths += files
            labels += [known[class_name(name)]] * len(files)
    if unknown:
        raise UserError(
            f"{folder.absolute()} has classes that train/ lacks: {_some(unknown)}.{did_you_mean(unknown[0], names)} "
            "The class folders must have the same names."
        )
    if not paths:
        raise UserError(f"{folder.absolute()} has no images in class folders.{_seen(ignored)}")
    if absent:
        notes.append(f"{shown(folder)} has no images of {len(absent)} classes: {_some(sorted(absent))}.")
    if ignored:
        notes.append(f"{sum(ignored.values())} files in {shown(folder)} are no images and not used.{_seen(ignored)}")
    return Samples(paths, np.asarray(labels, dtype=np.int64))


def _images_below(folder: Path) -> tuple[list[str], Counter[str]]:
    """Sorted paths of all images at any depth, and the extensions of the other visible files."""
    images: list[str] = []
    other = Counter[str]()
    visited = set()
    for place, inner, files in os.walk(folder, followlinks=True):
        real = os.path.realpath(place)
        inner[:] = [] if real in visited else [d for d in inner if not d.startswith(".") and d != "__MACOSX"]
        if real in visited:  # a link that leads back
            continue
        visited.add(real)
        for name in files:
            if name.startswith("."):
                continue
            if is_image(name):
                images.append(os.path.join(place, name))
            else:
                other[Path(name).suffix.lower() or "without extension"] += 1
    return sorted(images), other


def _seen(ignored: Counter[str]) -> str:
    if not ignored:
        return ""
    return f" Other files: {', '.join(f'{kind} ×{count}' for kind, count in ignored.most_common(5))}."


def _some(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more


def split_off(samples: Samples, fraction: float, seed: int) -> tuple[Samples, Samples]:
    """Hold out a fraction of every class: (the rest, the held out), each in the order it came.

    Of a class with at least two images at least one is held out and one kept. A class's choice depends on
    the seed and its own images alone: a new image in one class moves no image of another.
    """
    by_class: defaultdict[int, list[int]] = defaultdict(list)
    for position, label in enumerate(samples.labels.tolist()):
        by_class[label].append(position)
    out = np.zeros(len(samples), dtype=bool)
    for label, positions in by_class.items():
        n = len(positions)
        count = min(max(int(n * fraction + 0.5), 1), n - 1)
        chosen = np.random.default_rng([seed, label]).permutation(n)[:count]
        out[np.asarray(positions)[chosen]] = True
    return samples.take(np.flatnonzero(~out)), samples.take(np.flatnonzero(out))
