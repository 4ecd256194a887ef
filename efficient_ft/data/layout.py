"""Find the split folders and the class folders of an image data set, without opening any image.

`find_layout` uses the folder names and the number of images in each folder. If a layout is ambiguous, the error message
lists the folders and the settings that resolve the ambiguity.
"""

from __future__ import annotations

import contextlib
import os
import unicodedata
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable, shortened
from efficient_ft.data.counts import counted, some, verb
from efficient_ft.data.file_list import is_hidden, links_in
from efficient_ft.data.images import is_image
from efficient_ft.data.splits import SPLITS, Chosen, Split, ambiguous, part_names, places_of, repeated, show, splits_in

_LETTERS = 60  # maximum length of a folder's name in messages


@dataclass
class Folder:
    """A folder of a data set."""

    path: Path  # path on disk
    name: str = ""  # path relative to the data set folder, with forward slashes; empty for this folder itself
    images: int = 0  # number of files with an image extension directly in the folder
    total: int = 0  # number of files with an image extension at any depth
    folders: dict[str, Folder] = field(default_factory=dict)  # visible subfolders, keyed by name
    link: bool = False  # True for a link that is not followed; such a link counts as one image

    @property
    def filled(self) -> dict[str, Folder]:
        """The subfolders that contain images at any depth."""
        return {name: folder for name, folder in self.folders.items() if folder.total}

    def __str__(self) -> str:
        return f"{self.shown} ({counted(self.total, 'image')})"

    @property
    def shown(self) -> str:
        """The shortened name with a trailing slash, used in messages."""
        return f"{shortened(printable(self.name), _LETTERS)}/" if self.name else printable(self.path)

    def enter(self, entry: os.DirEntry[str]) -> Folder:
        """Create a subfolder for a directory entry, and return the subfolder."""
        inner = self.folders[entry.name] = Folder(Path(entry.path), f"{self.name}/{entry.name}".lstrip("/"))
        return inner


def same_class(name: str) -> str:
    """Normalize a class name, so that names that differ only in case, spaces or Unicode normalization are equal."""
    return unicodedata.normalize("NFC", " ".join(name.split())).casefold()


def scan(root: Path, follow_links: bool) -> tuple[Folder, list[tuple[Path, str | None]]]:
    """Count the images in all folders below `root`, without opening any image.

    Links to folders are followed only above the class folders, and only if they point outside of `root` and
    `follow_links` is True. Every other link above the class folders is recorded both as a folder with one image and as
    a blocked folder.

    Returns:
        The folder `root`, and a list of the blocked folders, which were not scanned. Each entry of the list contains
        the path of a folder and an error message. The message is None if the path is a link.
    """
    top = Folder(root)
    real = Path(os.path.realpath(root))
    waiting, order, blocked = [(top, 0)], [], list[tuple[Path, str | None]]()
    while waiting:
        folder, depth = waiting.pop()
        order.append(folder)
        try:
            entries = list(os.scandir(folder.path))
        except OSError as error:
            if depth <= 2:
                blocked.append((folder.path, error.strerror or "an error"))
            continue
        links = []
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append((folder.enter(entry), depth + 1))
            elif entry.is_symlink() and os.path.isdir(entry.path):
                links.append(entry)
            elif is_image(entry.name):
                with contextlib.suppress(OSError):  # a link that points to itself raises this error
                    folder.images += entry.is_file()
        if depth > 2 or (depth > 0 and folder.images):
            continue  # links in class folders are not followed
        for entry in links:
            inner = folder.enter(entry)
            target = Path(os.path.realpath(entry.path))
            inside = target == real or real in target.parents or target in real.parents
            if inside or not follow_links:
                inner.images, inner.link = 1, True
                blocked.append((inner.path, None))
                order.append(inner)
            else:
                waiting.append((inner, depth + 1))
    for folder in reversed(order):
        folder.folders = dict(sorted(folder.folders.items()))
        folder.total = folder.images + sum(inner.total for inner in folder.folders.values())
    return top, blocked


#: Substrings of folder names that denote unlabeled images.
_UNLABELED = ("unlabel", "unlabl", "pred", "unsup", "unknown")
#: Names of image folders and of mask folders in segmentation data sets.
_PICTURES = frozenset({"image", "images", "img", "imgs", "jpegimages", "photos", "pictures"})
_MASKS = frozenset({"mask", "masks", "label", "labels", "annotation", "annotations", "annotations_png", "gt",
                    "groundtruth", "ground_truth", "segmentation", "segmentationclass", "seg"})  # fmt: skip
_TABLES = (".csv", ".tsv", ".json", ".jsonl", ".txt", ".xlsx", ".xls", ".mat", ".parquet", ".xml", ".pkl")
#: Description of the supported layouts, shown in messages.
EXPECTED = "Expected layout: train/CLASS/*.jpg with val/CLASS/*.jpg or test/CLASS/*.jpg, or CLASS/*.jpg alone."
_BySplit = Mapping[Split, Sequence[str]]  # folder names of each split
_MOST_PLACES = 12  # maximum number of folders in a suggested setting


@dataclass
class Layout:
    """The split folders and the class folders of an image data set."""

    places: dict[Split, list[Folder]]  # folders of each split; their direct subfolders are the classes
    notes: list[str] = field(default_factory=list)  # facts that a user should know, one sentence each
    loose: int = 0  # number of images that are not in a class folder
    unused: list[Folder] = field(default_factory=list)  # folders that belong to no split


def find_layout(root: Path, chosen: Chosen | None = None, follow_links: bool = False) -> Layout:
    """Find the split folders and the class folders below `root`. Raise `UserError` if the layout is ambiguous.

    `chosen` is the setting ``data.splits``. See `read_folder` for the other arguments.
    """
    top, blocked = scan(root, follow_links)
    try:
        return _explicit(top, chosen) if chosen is not None else _recognized(top)
    except SettingError:
        raise
    except UserError:
        for place, reason in blocked:  # the cause may be a folder that could not be scanned
            if reason is not None:
                text = f"The folder {printable(place)} cannot be read ({reason}). Check the permissions of the folder."
                raise UserError(text) from None
            links_in([place], root, follow_links)
        raise


def _explicit(top: Folder, chosen: Chosen) -> Layout:
    places: dict[Split, list[Folder]] = {}
    for split, paths in places_of(top.path, chosen).items():
        for path in paths:
            if not path.is_dir():
                raise SettingError(f"data.splits.{split}", printable(path.name), "a folder of class folders")
            parts = Path(os.path.relpath(path, top.path)).parts
            folder: Folder | None = top
            for part in parts if path != top.path else ():
                folder = folder.folders.get(part) if folder else None
            folder = folder or scan(path, False)[0]
            if folder.images and not folder.filled:
                raise UserError(_without_classes(top, [folder]))
            places.setdefault(split, []).append(folder)
    used = {folder.name for part in places.values() for folder in part}
    loose = top.images if "" in used else 0
    loose += sum(folder.images for part in places.values() for folder in part if folder.name)
    return Layout(places, loose=loose, unused=[] if "" in used else list(_unnamed(top, used)))


def _unnamed(folder: Folder, used: set[str]) -> Iterator[Folder]:
    """Yield the topmost folders that are not used and contain no used folder."""
    for inner in folder.folders.values():
        if inner.name in used:
            continue
        if any(name.startswith(f"{inner.name}/") for name in used):
            yield from _unnamed(inner, used)
        else:
            yield inner


def _recognized(top: Folder) -> Layout:
    named = {name: split for name, split in splits_in(top.folders).items() if top.folders[name].total}
    entered = {name: _entered(top.folders[name]) for name in named}
    by_split: dict[Split, list[str]] = defaultdict(list)
    for name in sorted(named):
        if entered[name].filled:
            by_split[named[name]].append(name)
    if "train" not in by_split:
        return _without_train(top, named, by_split)
    for split, names in by_split.items():
        if len(names) > 1:
            raise repeated(top.path, split, by_split)
    places: dict[Split, list[Folder]] = {split: [entered[by_split[split][0]]] for split in SPLITS if split in by_split}
    for name, split in splits_in(top.folders).items():
        if split in by_split:
            continue
        folder = top.folders[name]
        if folder.total:
            rest = {one: of[0].name for one, of in places.items()}
            raise UserError(
                f"The folder {printable(top.path / name)} contains no class folders, but"
                f" {counted(folder.images, 'image')} without a class. Move these images to {printable(name)}/CLASS/, or"
                f" exclude the folder with 'data.splits={show(rest)}'."
            )
        places[split] = [folder]  # the empty folder is reported later, when its files are listed
    now: dict[Split, str] = {split: of[0].name for split, of in places.items()}
    used = {name.split("/")[0] for name in now.values()}
    others = [folder for name, folder in top.folders.items() if name not in used]
    _refuse_rivals(top, places["train"][0], now, [one for one in others if one.name not in named and not one.link])
    layout = Layout(places, loose=top.images, unused=others)
    for name in sorted(used):
        place = entered.get(name, top.folders[name])
        layout.loose += place.images
        if place.name != name:
            reason = f"because {printable(name)}/ contains nothing else"
            layout.notes.append(f"The folder {printable(place.name)}/ is used, {reason}.")
    evaluated = [of[0] for split, of in places.items() if split != "train"]
    _require_clear(top, places["train"][0], now, layout.notes, {}, evaluated)
    return layout


def _entered(folder: Folder) -> Folder:
    """Return the folder that contains the classes of a split, at most two levels below `folder`."""
    for _ in range(2):
        inner = list(folder.filled.values())
        base = os.path.basename(folder.name)
        if len(inner) != 1 or folder.images or not inner[0].filled:
            break
        other = os.path.basename(inner[0].name)
        both = splits_in([base, other]) if base != other else {}
        if base != other and both.get(base) != both.get(other, "none"):
            break
        folder = inner[0]
    return folder


def _refuse_rivals(top: Folder, train: Folder, now: Mapping[Split, str], others: Sequence[Folder]) -> None:
    """Raise `UserError` if a folder next to ``train`` could be an unrecognized split or a class."""
    classes = {same_class(name) for name in train.filled}
    for other in others:
        shared = [name for name in other.filled if same_class(name) in classes]
        if shared:
            free: list[Split] = [split for split in ("test", "val") if split not in now]  # type: ignore[misc]
            name = printable(other.name)
            readings: list[tuple[str, Chosen]] = [
                *((f"{name} is the {split} split", {**now, split: other.name}) for split in free[:1]),
                (f"{name} also contains training data", {**now, "train": [now["train"], other.name]}),
                (f"{name} is not used", now),
            ]
            found = f"The folder {other} contains folders with names of classes: {some(shared)}."
            raise ambiguous(top.path, found, readings)
    flat = [one for one in others if one.images and not _is_unlabeled(one.name)]
    if len(now) == 1 and len(flat) > 1:
        found = f"The folder {train} contains class folders, but {_listed(flat)} contain images directly."
        raise ambiguous(top.path, found, [("train is the training data", now), ("all are classes", {"train": "."})])


def _is_unlabeled(name: str) -> bool:
    return any(word in name.casefold() for word in _UNLABELED)


def _without_train(top: Folder, named: Mapping[str, Split], by_split: _BySplit) -> Layout:
    """Return the layout of a data set without a recognized training split. The subfolders of `top` are the classes."""
    folders = top.filled
    if not folders:
        if top.images and not top.folders:
            raise UserError(_without_classes(top, [top]))
        trains = [name for name, split in splits_in(top.folders).items() if split == "train"]
        holder = [top.folders[name] for name in trains if top.folders[name].folders]
        return Layout({"train": holder[:1] or [top]})  # the empty folder is reported later, when its files are listed
    rest = [name for name in folders if name not in named and not _is_unlabeled(name)]
    nested = {name for names in by_split.values() for name in names}
    flat = sorted((name for name in named if name not in nested), key=lambda name: (SPLITS.index(named[name]), name))
    if any(named[name] == "train" for name in flat) and (len({named[n] for n in flat}) > 1 or by_split or not rest):
        raise UserError(_without_classes(top, [folders[name] for name in flat]))
    parts = part_names(folders)
    if len(parts) == len(folders) > 1 and all(folder.images for folder in folders.values()):
        raise UserError(_without_classes(top, list(folders.values())))
    if named and not rest:
        raise UserError(
            f"The folder {printable(top.path.absolute())} contains {some(sorted(named))}/, but no folder train/ with"
            " class folders. Add the training images, or specify their folder with 'data.splits={train: FOLDER}'."
        )
    _refuse_wrapper(top)
    layout = Layout({"train": [top]}, loose=top.images)
    _require_clear(top, top, {"train": "."}, layout.notes, by_split, ())
    flat += [name for name in parts if name not in named and folders[name].images]
    if flat:
        kind = verb(len(flat), "is treated as a class instead of a split", "are treated as classes instead of splits")
        layout.notes.append(f"{some(flat)} {kind}, because no subfolders were found.")
    return layout


def _without_classes(top: Folder, flat: Sequence[Folder]) -> str:
    tables = labels_hint([top.path, *(one.path for one in flat if one is not top)])
    classes = len(top.filled) > 1 and flat[0] is not top
    other = f" If these folders are the classes, set 'data.splits={show({'train': '.'})}'." if classes else ""
    place = "" if flat[0] is top else f" (in {printable(top.path.absolute())})"
    return f"No class folders were found in {_listed(flat)}{place}.{tables} {EXPECTED}{other}"


def labels_hint(folders: Sequence[Path]) -> str:
    """Return a sentence that lists the files that may contain labels, or an empty string if there are no such files."""
    places = [folder for folder in folders if folder.is_dir()]
    names = [e.name for place in places for e in os.scandir(place) if e.name.lower().endswith(_TABLES)]
    do = "Use data=labels data.labels.file=FILE, or sort the images into class folders."
    return f" The labels may be in {some(sorted(names), 3)}. {do}" if names else ""


def _listed(folders: Sequence[Folder]) -> str:
    return some([str(folder) for folder in folders], 6)


def _refuse_wrapper(top: Folder) -> None:
    folders = list(top.filled.values())
    inner = folders[0]
    if len(folders) == 1 and not inner.images:
        while len(inner.filled) == 1 and not inner.images and next(iter(inner.filled.values())).filled:
            inner = next(iter(inner.filled.values()))
        if len(inner.filled) > 1:
            raise UserError(
                f"The only folder with images in {printable(top.path.absolute())} is {printable(inner.name)}, which"
                f" contains {some(list(inner.filled))}. Set data.root={printable(top.path / inner.name)}."
            )
    trains = [(one, one.folders[n]) for one in folders for n, s in splits_in(one.filled).items() if s == "train"]
    sets = {one.name: one for one, train in trains if train.filled}
    if len(sets) == 1:
        (only,) = sets.values()
        raise UserError(
            f"The folder {printable(top.path.absolute())} contains no folder train/, but its subfolder {only} contains"
            f" {some(list(only.filled))}. Set data.root={printable(top.path / only.name)}."
        )
    keys = {same_class(folder.name): folder for folder in folders}
    if len(keys) == 2 and keys.keys() & _PICTURES and keys.keys() & _MASKS and keys.keys() <= _PICTURES | _MASKS:
        raise UserError(
            f"The folder {printable(top.path.absolute())} contains {_listed(folders)}. These folders look like images"
            " and masks instead of classes. For segmentation, use data=mask_folder. If these folders are classes, set"
            " 'data.splits={train: .}'."
        )


def _require_clear(
    top: Folder, place: Folder, now: Chosen, notes: list[str], by_split: _BySplit, evaluated: Sequence[Folder]
) -> None:
    """Raise `UserError` if it is unclear whether the folders in `place` are the classes.

    Add a note to `notes` if subfolders of the classes contain images.
    """
    classes = list(place.filled.values())
    depths: Counter[int] = Counter()
    levels: list[dict[str, list[Folder]]] = []  # folders at each depth below the classes, keyed by normalized name
    examples: dict[int, Folder] = {}
    waiting = [(one, 0) for one in reversed(classes)]
    while waiting:
        one, at = waiting.pop()
        if one.images:
            depths[at] += one.images
            examples.setdefault(at, one)
        while one.filled and len(levels) <= at:
            levels.append({})
        for name, subfolder in one.filled.items():
            levels[at].setdefault(same_class(name), []).append(subfolder)
            waiting.append((subfolder, at + 1))
    if len(depths) < 2 and 0 in depths:
        return
    if len(classes) == 1:
        if not classes[0].images and len(classes[0].filled) > 1:
            inner = {**now, "train": classes[0].name}
            raise UserError(
                f"The only folder in {printable(place.path)} is {classes[0]}, which contains"
                f" {some(list(classes[0].filled))}. If these inner folders are classes, set"
                f" 'data.splits={show(inner)}'. All splits must contain the same class folders."
            )
        return
    for level in levels if sum(depths.values()) > 2 * depths[0] else ():
        shared = [folders for folders in level.values() if len(folders) > 1]
        if shared and len(level) > 1:  # a single common subfolder, such as 'images', is ignored
            raise _same_folders(top, place, now, shared, by_split, evaluated)
    if len(depths) > 1:
        counts = [f"{counted(depths[d], 'image')} (for example in {examples[d].shown})" for d in sorted(depths)[:3]]
        found = (
            f"The class folders contain images at {len(depths)} depths: {'; '.join(counts)}. If the deeper folders are"
            " separate classes, move all images to the same depth."
        )
        raise ambiguous(top.path, found, [("the top-level folders are the classes of all images below them", now)])
    inner_count = sum(len(folders) for folders in levels[-1].values())
    notes.append(
        f"The classes are the top-level folders of {printable(place.path)} ({some(list(place.filled))}). The images in"
        f" {counted(inner_count, 'subfolder')} of the class folders belong to these classes."
    )


def _same_folders(
    top: Folder, place: Folder, now: Chosen, shared: list[list[Folder]], by_split: _BySplit, evaluated: Sequence[Folder]
) -> UserError:
    """Return the error for top-level folders (such as years, folds or splits) whose subfolders have the same names."""
    inside = {folder.name.rpartition("/")[0] for folders in shared for folder in folders}
    holders = [one for one in _walk(place) if one.name in inside]
    names = sorted({os.path.basename(folder.name) for folders in shared for folder in folders})
    found = f"The folders {_listed(holders)} contain subfolders with the same names: {some(names)}."
    classes = ("the top-level folders are the classes of all images below them", now)
    if "train" in splits_in(names).values():
        inner = [(split, one.folders[name].name) for one in holders for name, split in splits_in(one.filled).items()]
        if any(folder.images for folders in shared for folder in folders) or len(inner) > _MOST_PLACES:
            found += " To keep the splits of these folders, move the images to train/CLASS and test/CLASS."
            return ambiguous(top.path, found, [classes])
        joined: Any = {split: [name for s, name in inner if s == split] for split in dict(inner)}
        return ambiguous(top.path, found, [("these subfolders are splits that should be merged", joined), classes])
    splits = {name: split for split, of in by_split.items() for name in of}
    parts = [one for one in holders if one.name not in splits]
    readings: list[tuple[str, Chosen]] = []
    others: Any = {**{split: value for split, value in now.items() if split != "train"}, **by_split}
    if len(parts) <= _MOST_PLACES:
        if not others and len(parts) > 1:
            last = min(parts[::-1], key=lambda one: one.total) if len(parts) == 2 else parts[-1]
            train = [one.name for one in parts if one is not last]
            readings.append((f"{printable(last.name)} is the test split", {"train": train, "test": last.name}))
        words = "all of these folders are training data" if len(parts) > 1 else f"{parts[0].name} is the training data"
        readings.append((words, {"train": [one.name for one in parts], **others}))
    are_classes = all(place.filled.keys() & one.filled.keys() for one in evaluated)
    return ambiguous(top.path, found, [*readings, classes] if are_classes or not readings else readings)


def _walk(folder: Folder) -> Iterator[Folder]:
    for inner in folder.filled.values():
        yield inner
        yield from _walk(inner)
