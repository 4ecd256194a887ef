"""Read the user's images from class folders."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, most_frequent, some, verb
from efficient_ft.data.file_list import FileList, Paths, is_folder, links_in, visible_entries
from efficient_ft.data.images import EXTENSIONS, class_name, is_image, reading_hint
from efficient_ft.data.layout import Layout, find_layout, labels_hint, same_class
from efficient_ft.data.listing import Listing, Samples, hold_out_test
from efficient_ft.data.splits import Chosen, Split, show

_Places = Mapping[Split, Sequence[Path]]
_EXTENSIONS = f"Supported extensions: {' '.join(EXTENSIONS)}."
#: Advice in the error message for folders in the YOLO layout.
_YOLO = "images/ and labels/ contain data for object detection. Export the data with one folder per class. "


def missing_folder(root: Path) -> str | None:
    """Return an error message if `root` is not a folder, or None if it is a folder."""
    if root.is_dir():
        return None
    state = "is a file" if root.exists() else "does not exist"
    packed = root.exists() and root.suffix.lower() in (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".bz2", ".xz")
    unpack = " Unpack the archive and pass the unpacked folder." if packed else ""
    return (
        f"data.root must be a folder of images, got {root} ({root.absolute()} {state}).{unpack} The expected "
        "layout is DIR/train/CLASS/*.jpg with DIR/val/CLASS/*.jpg or DIR/test/CLASS/*.jpg. In the layout "
        "DIR/CLASS/*.jpg, one fifth of the images is held out for testing. Alternatively, use data=digits, which "
        "requires no files."
    )


def folder_classes(root: Path, splits: Chosen | None = None, follow_links: bool = False) -> int | None:
    """Return the number of training classes, or None if there are no classes or the layout is ambiguous.

    Class folders are counted without opening any image.
    """
    if not root.is_dir():
        return None
    try:
        layout = find_layout(root, splits, follow_links)
    except UserError:
        return None
    return len({class_name(name) for place in layout.places["train"] for name in place.folders}) or None


def read_folder(root: Path, follow_links: bool = False, splits: Chosen | None = None) -> Listing:
    """List the images below `root`.

    The images must be in ``train/CLASS`` and in ``val/CLASS`` or ``test/CLASS`` (or both), or only in ``CLASS``. Splits
    are recognized by common spellings of their names, or specified by ``data.splits``. If there is neither a validation
    nor a test split, one fifth of every class is held out for testing. The held-out images are the same for every seed.
    Class folders may contain images at any depth. Hidden files are ignored. Other unused files are counted in
    `Listing.left_out`.

    Args:
        root: folder of the data set, or a link to this folder.
        follow_links: if True, follow links that lead out of `root`, and list these links in the notes.
        splits: folders of each split, as in ``data.splits``, or None to recognize the splits by name.

    Raises:
        UserError: If the folder does not exist, the layout is ambiguous, there are fewer than two classes, a class has
            fewer than two training images, or a link leads out of `root` and `follow_links` is False.
    """
    if (problem := missing_folder(root)) is not None:
        raise UserError(problem)
    layout = find_layout(root, splits, follow_links)
    places = {split: [folder.path for folder in of] for split, of in layout.places.items()}
    classes = [one.path for of in layout.places.values() for place in of for one in place.folders.values()]
    tops = [path for of in places.values() for path in of if path != root]
    # The folders between root and each split are also checked, because they may be links.
    inner = [one for path in tops for one in (*reversed([p for p in path.parents if root in p.parents]), path)]
    notes = links_in(dict.fromkeys([*inner, *classes]), root, follow_links)
    for place in dict.fromkeys((root, *tops)):
        lost = sorted(one.path for one in os.scandir(place) if one.is_symlink() and not os.path.exists(one.path))
        if lost:
            notes.append(f"Broken links are ignored: {some(lost, 1)}.")
    notes += layout.notes
    empty = [folder.name for folder in layout.unused if not folder.total or folder.link]
    if empty:
        notes.append(f"The following folders in {printable(root)} are not used: {some(empty)}.")
    files = FileList(root, classes, follow_links)
    others = Counter[str]()
    origins: dict[str, str] = {
        split: some([f"{root.absolute().name if one == root else os.path.relpath(one, root)}/" for one in of])
        for split, of in places.items()
    }
    names, train = _scan_train(places["train"], files, others, notes)
    val, test = (_scan_eval(root, places, split, names, files, others) for split in ("val", "test"))
    notes += files.notes(root)
    if val is not None and test is None:
        notes.append(
            f"There is no test split. The images in {origins['val']} are used to select the best epoch and to report"
            " the accuracy."
        )
    elif test is None:
        train, test = hold_out_test(train)
        origins["test"] = f"a fifth of each class, held out of {origins['train']}"
    return Listing(names, train, val, test, notes=notes, origins=origins, left_out=_left_out(others, layout, files))


def _scan_split(places: Sequence[Path], files: FileList) -> tuple[dict[str, Paths], Counter[str]]:
    """Return the sorted images of each class in a split, and the number of other files for each extension."""
    classes: dict[str, list[Path]] = {}
    for place in places:
        names = sorted(entry.name for entry in visible_entries(place) if is_folder(entry))
        for name, count in Counter(map(class_name, names)).items():
            if count > 1:
                raise UserError(f"{place.absolute()} contains two folders for the class {name!r}. Merge these folders.")
        for name in names:
            classes.setdefault(class_name(name), []).append(place / name)
    images, others = {}, Counter[str]()
    for name, folders in sorted(classes.items()):
        parts = []
        for folder in folders:
            below = files.below(folder)
            others.update(Path(path).suffix.lower() or "no extension" for path in below if not is_image(path))
            parts.append(Paths(path for path in below if is_image(path)))
        images[name] = Paths.join(parts)
    return images, others


def _scan_train(
    places: Sequence[Path], files: FileList, others: Counter[str], notes: list[str]
) -> tuple[list[str], Samples]:
    where = some([str(place.absolute()) for place in places])
    found, ignored = _scan_split(places, files)
    if not any(found.values()):
        raise UserError(
            f"There are no class folders with images in {where}. The expected layout is CLASS/*.jpg, with one folder "
            f"per class. {_EXTENSIONS}{_other_files(ignored)}"
        )
    empty = [repr(name) for name, paths in found.items() if not paths]
    if empty:
        yolo = _YOLO if {name.casefold() for name in found} == {"images", "labels"} else ""
        raise UserError(
            f"The following class folders in {where} contain no images: {some(empty, 5)}. Add images or remove the "
            f"folders. {yolo}"
            f"{_EXTENSIONS}{_other_files(ignored)}"
        )
    names = list(found)
    if len(names) == 1:
        raise UserError(
            f"The training split in {where} has only one class, {names[0]!r}, with"
            f" {counted(len(found[names[0]]), 'image')}. At least two classes are required, each in a separate folder."
            f"{labels_hint([*places, *(place / names[0] for place in places)])}"
        )
    single = [repr(name) for name in names if len(found[name]) == 1]
    if single:
        raise UserError(
            f"Of the {len(names)} classes in {where}, {some(single, 5)} {verb(len(single))} a single training image"
            f" ({sum(map(len, found.values())):,} images in total). Each class needs at least two images. Add images,"
            f" remove the {verb(len(single), 'folder', 'folders')} from all splits, or move the images to another"
            " class."
        )
    others.update(ignored)
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[same_class(name)].append(f"{name!r} ({len(found[name]):,})")
    for same in alike.values():
        if len(same) > 1:
            notes.append(
                f"The following class names differ only in case or spaces: {', '.join(same)}. These names are trained"
                " as separate classes. If the names denote the same class, merge the folders."
            )
    return names, _samples(found, names)


def _samples(found: Mapping[str, Paths], names: Sequence[str]) -> Samples:
    """Concatenate the images of all classes. The label of an image is the index of its class in `names`."""
    parts, index = list(found.values()), {name: label for label, name in enumerate(names)}
    labels = np.asarray([index[name] for name in found])
    return Samples(Paths.join(parts), np.repeat(labels, [len(part) for part in parts]))


def _scan_eval(
    root: Path, splits: _Places, split: Split, names: list[str], files: FileList, others: Counter[str]
) -> Samples | None:
    if split not in splits:
        return None
    where = some([str(place.absolute()) for place in splits[split]])
    found, ignored = _scan_split(splits[split], files)
    known = frozenset(names)
    unknown = {name: len(paths) for name, paths in found.items() if paths and name not in known}
    if unknown:
        first = next(iter(unknown))
        near = next((f" The class {first!r} differs from {one!r} only in case or spaces." for one in names
                     if same_class(one) == same_class(first)), did_you_mean(first, names))  # fmt: skip
        rest: Chosen = {s: [os.path.relpath(place, root) for place in of] for s, of in splits.items() if s != split}
        raise UserError(
            f"The split in {where} contains classes that are not in the training split: "
            f"{some(list(map(repr, unknown)), 5)} ({counted(sum(unknown.values()), 'image')}).{near} All splits must"
            f" have the same class folders. To exclude this split, set 'data.splits={show(rest)}'."
        )
    found = {name: paths for name, paths in found.items() if paths}
    if not found:
        raise UserError(f"No images were found in the class folders of {where}. {_EXTENSIONS}{_other_files(ignored)}")
    others.update(ignored)
    return _samples(found, names)


def _left_out(others: Counter[str], layout: Layout, files: FileList) -> dict[str, int]:
    left_out: dict[str, int] = {}
    for kind in [kind for kind in others if reading_hint(kind)]:
        left_out[f"{kind} files: {reading_hint(kind)}"] = others.pop(kind)
    if others:
        left_out[f"not images: {most_frequent(others, 5, 'kind')}"] = others.total()
    if layout.loose:
        left_out["images outside of class folders"] = layout.loose
    unused = [folder for folder in layout.unused if folder.total and not folder.link]
    for folder in unused[:3]:
        left_out[f"images in {printable(folder.name)}/"] = folder.total
    if len(unused) > 3:
        left_out[f"images in {counted(len(unused) - 3, 'more folder')}"] = sum(one.total for one in unused[3:])
    for reason, paths in (
        ("links to folders", files.links),
        ("neither files nor folders", files.special),
        ("links to files of the data set", files.again),
    ):
        if paths:
            left_out[reason] = len(paths)
    return left_out


def _other_files(others: Counter[str]) -> str:
    if not others:
        return ""
    hints = dict.fromkeys(f" For {kind} files: {hint}." for kind in others if (hint := reading_hint(kind)))
    return f" Other files: {most_frequent(others, 5, 'kind')}.{''.join(hints)}"
