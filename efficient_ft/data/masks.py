"""Lists of segmentation data: images with masks, the classes of their ids, splits. Nothing is decoded here but masks.

A mask is an image file whose pixel values are class ids: 8 or 16 bits, or indices of a palette.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
from PIL import Image

from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.below import Below, files_below, links_in
from efficient_ft.data.images import EXTENSIONS, FORMATS

#: Names of ids in classes.txt that are no class.
_NO_CLASS = frozenset({"void", "unlabeled", "unlabelled", "ignore", "ignored"})
_SPLITS = {"train": ("train",), "val": ("val", "valid", "validation"), "test": ("test",)}
_LAYOUT = "Expected layout: {train,val,test}/images/NAME.jpg with {train,val,test}/masks/NAME.png, and classes.txt."
_MASK_EXTENSIONS = (".png", ".bmp", ".tif", ".tiff", ".gif")


@dataclass(frozen=True)
class Classes:
    """The classes of a data set and their ids in its masks.

    Attributes:
        names: by index, as the network has them.
        ids: of the same classes, in the masks.
        ignored: ids of pixels without a label; 255 is one always.
    """

    names: tuple[str, ...]
    ids: tuple[int, ...]
    ignored: frozenset[int] = frozenset({IGNORED})

    @property
    def table(self) -> np.ndarray:
        """uint8 (65536,): the index of the class of each id, `IGNORED`, or 254 for an unknown id."""
        table = np.full(1 << 16, 254, dtype=np.uint8)
        table[list(self.ids)] = np.arange(len(self.ids))
        table[sorted(self.ignored)] = IGNORED
        return table


@dataclass(frozen=True)
class MaskSamples:
    """Images and their masks, as paths in the same order."""

    images: list[str]
    masks: list[str]

    def __len__(self) -> int:
        return len(self.images)

    def take(self, indices: Sequence[int]) -> MaskSamples:
        """Return the samples at `indices`, in that order."""
        return MaskSamples([self.images[i] for i in indices], [self.masks[i] for i in indices])

    def content_digest(self) -> str:
        """16 hex digits that tell any change apart: each file's path, size and date."""
        found = hashlib.blake2b(digest_size=8)
        for path in (*self.images, *self.masks):
            status = os.stat(path)
            found.update(
                f"{os.path.abspath(path)} {status.st_size} {status.st_mtime_ns}\n".encode(errors="surrogateescape")
            )
        return found.hexdigest()


@dataclass
class MaskListing:
    """A segmentation data set with the splits of its publisher or of the user's folders; see `listing.Listing`."""

    classes: Classes
    train: MaskSamples
    val: MaskSamples | None = None
    test: MaskSamples | None = None
    notes: list[str] = field(default_factory=list)
    origins: dict[str, str] = field(default_factory=dict)
    left_out: dict[str, int] = field(default_factory=dict)

    def digest(self) -> str:
        """8 hex digits that tell two copies apart: of the classes, and names and sizes of up to 256 files a split."""
        found = hashlib.blake2b(repr((self.classes.names, self.classes.ids)).encode(), digest_size=4)
        for name, part in (("train", self.train), ("val", self.val), ("test", self.test)):
            if part is None or not len(part):
                continue
            found.update(f"{name} {len(part)}".encode())
            for i in np.linspace(0, len(part) - 1, min(len(part), 256)).round().astype(int):
                for path in (part.images[i], part.masks[i]):
                    found.update(f"{os.path.basename(path)} {os.path.getsize(path)}".encode(errors="surrogateescape"))
        return found.hexdigest()


def hold_out(samples: MaskSamples, fraction: float, seed: int) -> tuple[MaskSamples, MaskSamples]:
    """Hold out a fraction of the images, at least one. Returns (kept, held out), each in the order of `samples`."""
    count = min(max(round(len(samples) * fraction), 1), len(samples) - 1)
    chosen = set(np.random.default_rng([seed, len(samples)]).permutation(len(samples))[:count].tolist())
    kept = [i for i in range(len(samples)) if i not in chosen]
    return samples.take(kept), samples.take(sorted(chosen))


def missing_mask_folder(root: Path) -> str | None:
    """Say what belongs in a folder that does not exist; None: it does."""
    return None if root.is_dir() else f"data.root={printable(root)}: no such folder. {_LAYOUT}"


def read_mask_folder(
    root: Path, names: Sequence[str] | None = None, ignored: Sequence[int] = (), follow_links: bool = False
) -> MaskListing:
    """List the images and masks below `root`.

    Two layouts are read: ``images/`` and ``masks/`` in ``train/`` and in ``val/`` and/or ``test/``; or these two
    folders only. If there is neither ``val/`` nor ``test/``, a fifth of the images is held out for testing, the same
    for every seed. A mask has the name of its image, apart from the extension.

    Args:
        root: the folder; may be a link.
        names: of the classes, in the order of their ids from 0; None: the lines of ``classes.txt``. An id named
            ``void`` (or unlabeled, ignore) is no class: its pixels have no label.
        ignored: further ids without a label, besides 255.
        follow_links: use what links out of `root` lead to, and say so in the notes.

    Raises:
        UserError: no such folder, no classes, an image without a mask or a mask without an image, or a link out of
            `root` that is not to be followed.
    """
    classes = _classes(root, names, ignored)
    places: dict[str, Path] = {}
    for split, folders in _SPLITS.items():
        there = [folder for folder in folders if (root / folder / "images").is_dir()]
        if there:
            places[split] = root / there[0]
    if not places and (root / "images").is_dir():
        places["train"] = root
    if "train" not in places:
        raise UserError(f"{printable(root.absolute())} has no folder of images with masks. {_LAYOUT}")
    inner = [place / kind for place in places.values() for kind in ("images", "masks")]
    splits = [place for place in places.values() if place != root]
    notes = links_in([*splits, *inner, root / "classes.txt"], root, follow_links)
    listed = frozenset(map(os.path.realpath, inner))
    below = Below(root=os.path.realpath(root), listed=listed, follow_links=follow_links)
    found = {split: _pairs(place, below) for split, place in places.items()}
    notes += below.notes(root)
    train, val, test = found["train"], found.get("val"), found.get("test")
    if val is None and test is None:
        if len(train) < 2:
            raise UserError(f"{printable(root.absolute())} has a single image: none can be held out for testing.")
        train, test = hold_out(train, 0.2, seed=0)
        notes.append(
            f"{len(test)} of {len(train) + len(test)} images are held out for testing, the same for every seed."
        )
    return MaskListing(classes, train, val, test, notes)


def _classes(root: Path, names: Sequence[str] | None, ignored: Sequence[int]) -> Classes:
    problem = missing_mask_folder(root)
    if problem is not None:
        raise UserError(problem)
    if names is None:
        file = root / "classes.txt"
        if not file.is_file():
            raise UserError(
                f"{printable(root.absolute())} has no classes.txt, which names the classes of ids 0, 1, … in the masks,"
                " one a line. Write it, or set data.masks.classes=[NAME,…]."
            )
        names = [
            line.strip() for line in file.read_text(encoding="utf-8", errors="replace").splitlines() if line.strip()
        ]
    without = {number for number, name in enumerate(names) if name.lower() in _NO_CLASS} | {IGNORED, *ignored}
    ids = tuple(number for number in range(len(names)) if number not in without)
    if len(ids) < 2:
        raise UserError(f"{printable(root.absolute())} has {len(ids)} classes. Segmentation needs at least two.")
    if len(ids) > 254:
        raise UserError(f"{printable(root.absolute())} has {len(ids)} classes; at most 254 are possible.")
    return Classes(tuple(names[i] for i in ids), ids, frozenset(without))


def _pairs(folder: Path, below: Below) -> MaskSamples:
    """The images in ``images/`` of a folder, and the masks of the same names in ``masks/``, at any depth."""
    images = _files(folder / "images", EXTENSIONS, below)
    masks = _files(folder / "masks", _MASK_EXTENSIONS, below)
    if not images:
        raise UserError(f"{printable((folder / 'images').absolute())} has no images.")
    lacking = sorted(images.keys() - masks.keys())
    if lacking:
        raise UserError(
            f"{printable(images[lacking[0]])} has no mask {printable((folder / 'masks').absolute())}/{lacking[0]}.png"
            f"{_more(lacking)}. Add it, or remove the image."
        )
    names = sorted(images)
    return MaskSamples([images[name] for name in names], [masks[name] for name in names])


def _files(folder: Path, extensions: Sequence[str], below: Below) -> dict[str, str]:
    """Paths of the files with these extensions, by their place in the folder without extension."""
    found: dict[str, str] = {}
    if not folder.is_dir():
        return found
    files_below(folder, below)
    if below.links or below.special or below.again:
        raise UserError(below.notes(folder)[0])
    files, below.files = below.files, []
    for path in files:
        stem, extension = os.path.splitext(path)
        if extension.lower() not in extensions:
            continue
        key = os.path.relpath(stem, folder)
        if key in found:
            raise UserError(f"{printable(folder)} has two files for {printable(key)}. Keep one of them.")
        found[key] = path
    return found


def _more(names: Sequence[str]) -> str:
    return f", nor have {len(names) - 1} further images theirs" if len(names) > 1 else ""


def read_mask(
    path: str, classes: Classes, size: tuple[int, int] | None = None, table: np.ndarray | None = None
) -> np.ndarray:
    """Read a mask as indices of classes.

    Args:
        path: the file.
        classes: of the data set.
        size: (width, height) of its image; None: not compared.
        table: `Classes.table`, to make it once; None: it is made here.

    Returns:
        uint8 (H, W): indices of classes, `IGNORED` where there is no label.

    Raises:
        UserError: the file cannot be read, has colors instead of ids, another size than its image, ids of no class, or
            no labeled pixel.
    """
    try:
        with Image.open(path, formats=FORMATS) as image:
            image.load()
            mode, values = image.mode, np.asarray(image)
    except MemoryError:
        raise
    except Exception as error:  # Pillow's decoders raise all kinds on damaged files
        raise UserError(f"{printable(path)}: not readable as a mask ({error or type(error).__name__}).") from error
    if values.ndim != 2 or mode == "F":
        raise UserError(
            f"{printable(path)}: a mask has one class id per pixel (8 or 16 bits, or a palette); this file has the mode"
            f" {mode}."
        )
    if size is not None and (values.shape[1], values.shape[0]) != size:
        raise UserError(
            f"{printable(path)}: the mask is {values.shape[1]}×{values.shape[0]}, its image {size[0]}×{size[1]}. They"
            " must have one size."
        )
    ids = values.astype(np.int64)
    outside = (ids < 0) | (ids >= 1 << 16)
    indices = (classes.table if table is None else table)[np.where(outside, 0, ids)]
    unknown = outside | (indices == 254)
    if unknown.any():
        numbers, counts = np.unique(ids[unknown], return_counts=True)
        listed = ", ".join(f"{n} ({c} pixels)" for n, c in zip(numbers[:5], counts[:5], strict=True))
        more = f" and {len(numbers) - 5} more" if len(numbers) > 5 else ""
        known = f"{min(classes.ids)} to {max(classes.ids)}"
        raise UserError(
            f"{printable(path)}: ids of no class: {listed}{more}. The classes have ids {known}; pixels without a label"
            f" have {', '.join(map(str, sorted(classes.ignored)))} (data.masks.ignored)."
        )
    if (indices == IGNORED).all():
        raise UserError(f"{printable(path)}: no pixel has a label. Remove the image and its mask.")
    return indices


def class_colors(count: int) -> np.ndarray:
    """uint8 (count, 3): colors of classes that differ well, the palette of Pascal VOC."""
    colors = np.zeros((count, 3), dtype=np.uint8)
    for number in range(count):
        value = number + 1
        for bit in range(8):
            for channel in range(3):
                colors[number, channel] |= ((value >> channel) & 1) << (7 - bit)
            value >>= 3
    return colors
