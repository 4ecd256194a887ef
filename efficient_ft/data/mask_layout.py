"""Find the image and mask folders of each split, by folder names or by settings."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, most_frequent, some
from efficient_ft.data.file_list import is_folder, visible_entries
from efficient_ft.data.images import EXTENSIONS
from efficient_ft.data.mask_names import Kind, read_name
from efficient_ft.data.masks import MASK_EXTENSIONS
from efficient_ft.data.splits import SPLITS, Chosen, Split, ambiguous, places_of, repeated, splits_in

LAYOUT = (
    "Expected layout: {train,val,test}/images/NAME.jpg with {train,val,test}/masks/NAME.png, or"
    " images/{train,val,test} with masks/{train,val,test}. The file classes.txt contains the class names."
)
_DEPTH = 4  # maximum depth of folders whose names are parsed


@dataclass
class Area:
    """A folder that contains images or masks at any depth."""

    path: Path  # path of the folder
    kind: Kind | None  # kind of the files, or None if the folder names denote no kind
    split: Split | None  # split of the files, or None if the folder names denote no split
    prefix: str  # relative path of the folder above the first folder whose name denotes a kind or a split
    key: tuple[str, ...]  # folder names without the words that denote images or masks
    count: int = 0  # number of image files


@dataclass
class Tree:
    """The folders of a data set."""

    areas: list[Area] = field(default_factory=list)  # folders that contain images and are named after a kind or a split
    plain: dict[str, int] = field(default_factory=dict)  # number of image files in each other folder
    inside: dict[str, int] = field(default_factory=dict)  # number of images in subfolders, for areas of unknown kind
    empty: list[Area] = field(default_factory=list)  # areas without image files or subfolders


def shown(path: Path, root: Path) -> str:
    """Return the path of a folder relative to the root as text, such as ``train/images/``."""
    return "./" if path == root else printable(path.relative_to(root).as_posix()) + "/"


def mask_tree(root: Path, settings: MaskConfig) -> Tree:
    """Parse the names of all folders below the root, and count the images in each folder."""
    tree = Tree()
    seen: set[str] = set()
    areas: dict[Path, Area] = {}

    def visit(folder: Path, area: Area | None, prefix: tuple[str, ...], fixed: bool, depth: int) -> None:
        folders, count = _entries(folder)
        if area is not None:
            if not count and not folders and area.path == folder:
                tree.empty.append(area)
            area.count += count
            if count and area.kind is None and area.path != folder:
                tree.inside[folder.relative_to(root).as_posix()] = count
            if count:
                areas[area.path] = area
        elif count:
            tree.plain[folder.relative_to(root).as_posix()] = count
        names = {name: read_name(name) for name in folders} if depth < _DEPTH else {}
        splits = splits_in({read.rest for read in names.values()})
        for name, path in sorted(folders.items()):
            read = names.get(name)
            kind, sticky = _kind(name, read.kind if read else None, settings)
            kind, sticky = (area.kind if area else None, True) if fixed else (kind, sticky)
            if read and kind != read.kind and not sticky:  # a setting specifies a different folder for this kind
                tree.plain[path.relative_to(root).as_posix()] = _images_below(path)
                continue
            split = splits.get(read.rest) if read else None
            seen.update({name} if sticky else ())
            if kind is None and split is None:
                if not path.is_symlink():
                    visit(path, area, (*prefix, name) if area is None else prefix, fixed, depth + 1)
                continue
            outer = area or Area(root, None, None, "/".join(prefix), prefix)
            key = (*outer.key, read.rest) if read and read.rest else outer.key
            inner = Area(path, kind or outer.kind, split or outer.split, outer.prefix, key)
            visit(path, area if fixed and split is None else inner, prefix, fixed or sticky, depth + 1)

    visit(root, None, (), False, 0)
    for setting in ("folder", "image_folder"):
        value = getattr(settings, setting)
        if value is not None and value not in seen:
            there = sorted({*(area.path.relative_to(root).as_posix() for area in areas.values()), *tree.plain})
            known = f"the name of a folder in {printable(root)}"
            raise SettingError(f"data.masks.{setting}", value, known, f"Found: {some(there)}.")
    tree.areas = [area for area in areas.values() if area.count]
    return tree


def _kind(name: str, read: Kind | None, settings: MaskConfig) -> tuple[Kind | None, bool]:
    """Return the kind of the files in a folder, and whether a setting specifies the folder."""
    if name in (settings.folder, settings.image_folder):
        return ("masks" if name == settings.folder else "images"), True
    if (read == "masks" and settings.folder) or (read == "images" and settings.image_folder):
        return None, False
    return read, False


def _entries(folder: Path) -> tuple[dict[str, Path], int]:
    folders, count = {}, 0
    for entry in visible_entries(folder):
        if is_folder(entry):
            folders[entry.name] = folder / entry.name
        elif entry.name.lower().endswith(EXTENSIONS):
            count += 1
    return folders, count


def _images_below(folder: Path) -> int:
    folders, count = _entries(folder)
    return count + sum(_images_below(inner) for inner in folders.values() if not inner.is_symlink())


#: For each split, pairs of an image folder and its mask folder. The mask folder is None if the images have no masks.
Places = dict[Split, list[tuple[Area, Area | None]]]


def recognized_places(root: Path, tree: Tree, settings: MaskConfig) -> Places:
    """Find the folders of each split by their names.

    Raise `UserError` if the folders are ambiguous, or if images or masks are missing.
    """
    areas = tree.areas
    if "." in tree.plain and not any(a.kind == "images" or a.split for a in areas):
        areas = [*areas, Area(root, "images", None, "", (), tree.plain["."])]
    masks = [area for area in areas if area.kind == "masks"]
    images = [area for area in areas if area.kind == "images" or (area.kind is None and area.split is not None)]
    empty = [a for a in tree.empty if a.kind != "masks" and a.split in ("train", None)]
    if empty and not any(area.split == empty[0].split for area in images):
        raise UserError(f"{printable(empty[0].path.absolute())} has no images.")
    if not masks or not images:
        raise _nothing(root, tree, bool(masks))
    _refuse_prefixes(root, [*masks, *images])
    splits = {area.split for area in images} - {None}
    whole = [area for area in images if area.split is None]
    if splits and whole and any(area.split is None for area in masks) and "train" not in splits:
        splits = set()
    if splits and whole and any(area.split is None and area.key == whole[0].key for area in masks):
        by_split: Chosen = {s: shown(a.path, root)[:-1] for a in images if (s := a.split) is not None}
        every: Chosen = {"train": [shown(a.path, root)[:-1] for a in images]}
        readings = [("only the folders named after splits are used", by_split), ("all images are training data", every)]
        found = f"The folder contains both {_counts(whole, root)} and {_counts([a for a in images if a.split], root)}."
        raise ambiguous(root, found, readings)
    if not splits:
        masks = [area for area in masks if area.split is None] or masks
        return {"train": [(_one(root, whole or images, "image_folder"), _one(root, masks, "folder"))]}
    if "train" not in splits:
        raise UserError(
            f"The folder {printable(root.absolute())} contains {_counts(images, root)}, but no folder of training"
            " images. Set data.splits={train: FOLDER, …}."
        )
    places: Places = {}
    for split in SPLITS:
        here = [area for area in images if area.split == split]
        if not here:
            continue
        if len({area.key for area in here}) > 1:
            names: dict[Split, list[str]] = defaultdict(list)
            for area in images:
                if area.split is not None:
                    names[area.split].append(_split_folder(area, root))
            raise repeated(root, split, names, _counts(here, root))
        clear = [area for area in here if area.kind == "images"]
        area = _one(root, clear if settings.image_folder else here, "image_folder")
        own = [mask for mask in masks if mask.split == area.split] or [mask for mask in masks if mask.split is None]
        places[split] = [(area, _one(root, own, "folder") if own else None)]
    return places


def _split_folder(area: Area, root: Path) -> str:
    """Return the ``data.splits`` path that selects an area: the parent of its images and masks, or the area itself."""
    folder = area.path
    while read_name(folder.name).kind == "images" and not read_name(folder.name).rest and folder.parent != root:
        folder = folder.parent
    return folder.relative_to(root).as_posix()


def _one(root: Path, areas: list[Area], setting: str) -> Area:
    if len(areas) == 1:
        return areas[0]
    noun = "masks" if setting == "folder" else "images"
    names = dict.fromkeys(area.path.name for area in areas if area.kind is not None)
    named = [n if n.replace("_", "").replace("-", "").isalnum() else f"'\"{printable(n)}\"'" for n in names]
    choices = " or ".join(f"data.masks.{setting}={name}" for name in named[:3])
    raise UserError(
        f"The folder {printable(root.absolute())} contains several folders of {noun}: {_counts(areas, root)}. Choose"
        f" one folder with {choices}, or move the other folders out of the data set."
    )


def _counts(areas: Sequence[Area], root: Path) -> str:
    return some([f"{shown(area.path, root)} ({counted(area.count, 'file')})" for area in areas])


def _refuse_prefixes(root: Path, areas: list[Area]) -> None:
    counts = Counter[str]()
    for area in areas:
        counts[area.prefix] += area.count
    if list(counts) == [""]:
        return
    inner = next(prefix for prefix, _ in counts.most_common() if prefix)
    if len(counts) == 1:
        place = printable(root / inner)
        text = f"All images of {printable(root.absolute())} are in {printable(inner)}/. Set data.root={place}."
        raise UserError(text)
    listed = some([f"{prefix or '.'} ({counted(count, 'file')})" for prefix, count in counts.most_common()])
    one = f"If one of these folders is the data set, set data.root={printable(root / inner)}."
    ordered = sorted(prefix or "." for prefix in counts)
    readings: list[tuple[str, Chosen]] = [
        ("all of these folders are training data", {"train": ordered}),
        (f"{ordered[-1]} is the test split", {"train": ordered[:-1], "test": ordered[-1]}),
    ]
    if "" in counts:
        readings = [("these folders are splits", {"train": "FOLDER", "test": "FOLDER"})]
    raise ambiguous(root, f"Images with masks are in several folders: {listed}. {one}", readings)


def _nothing(root: Path, tree: Tree, has_masks: bool) -> UserError:
    lacks = "images" if has_masks else "masks"
    for area in tree.empty:
        if area.kind == "masks" and not has_masks:
            others = Counter(one.suffix.lower() or "no extension" for one in area.path.iterdir() if one.is_file())
            listed = most_frequent(others, 3, "kind") or "no files"
            return UserError(
                f"The folder {printable(area.path.absolute())} contains no masks (found: {listed}). Save each mask as a"
                f" separate image file ({', '.join(MASK_EXTENSIONS)})."
            )
    counts = [(shown(a.path, root), a.count) for a in tree.areas if a.kind]
    counts += [(shown(a.path, root), a.count) for a in tree.areas if not a.kind and not tree.inside]
    counts += [(f"{name}/", count) for name, count in (*tree.inside.items(), *tree.plain.items())]
    there = [f"{name} ({counted(count, 'file')})" for name, count in counts]
    if not there:
        return UserError(f"The folder {printable(root.absolute())} contains no images with masks. {LAYOUT}")
    together = ""
    if not has_masks and any(_named_masks(root / a.path) for a in tree.areas):
        together = " Images and masks must be in separate folders. Move the masks to masks/."
    return UserError(
        f"The folder {printable(root.absolute())} contains no folder of {lacks} with a known name. The following"
        f" folders were found: {some(there)}.{together} Set data.masks.folder=NAME and data.masks.image_folder=NAME,"
        f" or rename the folders. {LAYOUT}"
    )


def _named_masks(folder: Path) -> bool:
    """Return True if a folder contains both files that are named like masks and other images."""
    names = [entry.name for entry in os.scandir(folder) if entry.name.lower().endswith(EXTENSIONS)]
    return len({read_name(os.path.splitext(name)[0]).kind == "masks" for name in names}) == 2


def named_places(root: Path, tree: Tree, chosen: Chosen) -> Places:
    """Return the folders that `chosen` (``data.splits``) lists for each split.

    Raise `UserError` if images or masks are missing.
    """
    places: Places = {}
    for split, paths in places_of(root, chosen).items():
        for path in paths:
            if not path.is_dir():
                raise SettingError(f"data.splits.{split}", path.name, "a folder of images with masks")
            places.setdefault(split, []).append(_named(root, tree, split, path))
    return places


def _named(root: Path, tree: Tree, split: Split, path: Path) -> tuple[Area, Area]:
    inside = [area for area in tree.areas if area.path == path or path in area.path.parents]
    masks = [area for area in inside if area.kind == "masks"]
    images = [area for area in inside if area.kind != "masks"]
    above = [area for area in tree.areas if area.path in path.parents]
    if not images:
        plain = sum(n for name, n in tree.plain.items() if (root / name) == path or path in (root / name).parents)
        count = plain or sum(area.count for area in above if area.kind != "masks")
        if not count:
            raise SettingError(f"data.splits.{split}", path.relative_to(root).as_posix(), "a folder with images")
        images = [Area(path, "images", split, "", _key(path, root), count)]
    every = [area for area in tree.areas if area.kind == "masks"]
    if not masks:  # find the corresponding folder of masks: masks/a for images/a, or a_masks for a
        masks = [area for area in every if area.key == _key(path, root)]
        tails = [path.relative_to(area.path) for area in above if area.kind != "masks"]
        other = [replace(area, path=area.path / tail, split=split) for area in every for tail in tails]
        masks = masks or [area for area in other if area.path.is_dir()]
    if not masks:
        raise UserError(
            f"data.splits.{split}={printable(path.relative_to(root).as_posix())}: there is no matching folder of masks."
            f" Found: {_counts(every, root) or 'none'}. Choose a folder that contains images/ and masks/, or set"
            " data.masks.folder=NAME."
        )
    return _one(root, images, "image_folder"), _one(root, masks, "folder")


def _key(path: Path, root: Path) -> tuple[str, ...]:
    rests = [read_name(name).rest for name in path.relative_to(root).parts]
    return tuple(rest for rest in rests if rest)
