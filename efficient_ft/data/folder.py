"""A user's own images in class folders."""

from __future__ import annotations

import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path

import numpy as np

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.text import printable
from efficient_ft.data.below import Below, files_below, links_in
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.folder_tree import same_class
from efficient_ft.data.images import EXTENSIONS, class_name, is_image, reading_hint
from efficient_ft.data.layout import Layout, find_layout, labels_hint
from efficient_ft.data.listing import Listing, Samples, hold_out_test
from efficient_ft.data.paths import Paths, is_hidden
from efficient_ft.data.splits import Chosen, Split, show, some

_EXTENSIONS = f"Supported extensions: {' '.join(EXTENSIONS)}."


def missing_folder(root: Path) -> str | None:
    """None if `root` is a folder, else a message with the expected layout."""
    if root.is_dir():
        return None
    state = "is a file" if root.exists() else "does not exist"
    packed = root.exists() and root.suffix.lower() in (".zip", ".tar", ".gz", ".tgz", ".7z", ".rar", ".bz2", ".xz")
    unpack = " Unpack the archive, and pass the folder." if packed else ""
    return (
        f"data.root must be a folder of images, got {root} ({root.absolute()} {state}).{unpack} Expected layout: "
        "DIR/train/CLASS/*.jpg with DIR/val/ or DIR/test/ of the same form, or DIR/CLASS/*.jpg (a fifth is then held "
        "out for testing). Or use data=digits, which needs no files."
    )


def folder_classes(root: Path, splits: Chosen | None = None, follow_links: bool = False) -> int | None:
    """Count the training class folders, without opening an image; None if there are none or the layout is ambiguous.

    Args:
        root: the folder.
        splits: as in `read_folder`.
        follow_links: as in `read_folder`.
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

    Two layouts are supported: ``train/CLASS`` with ``val/CLASS`` and/or ``test/CLASS`` (in any usual spelling, or as
    set by ``data.splits``), and ``CLASS`` alone. If there is neither ``val/`` nor ``test/``, a fifth of every class is
    held out for testing, the same images for every seed. Class folders may contain images at any depth. Hidden files
    are ignored; other unused files are counted in `Listing.left_out`.

    Args:
        root: the folder; may be a link.
        follow_links: use the targets of links out of `root`, and list them in the notes.
        splits: the folders of each split, as in ``data.splits``; None to recognize them by name.

    Raises:
        UserError: the folder does not exist, the layout is ambiguous, there are fewer than two classes, a class has
            fewer than two training images, or a link leads out of `root` and `follow_links` is False.
    """
    problem = missing_folder(root)
    if problem is not None:
        raise UserError(problem)
    layout = find_layout(root, splits, follow_links)
    places = {split: [folder.path for folder in of] for split, of in layout.places.items()}
    classes = [one.path for of in layout.places.values() for place in of for one in place.folders.values()]
    tops = [path for of in places.values() for path in of if path != root]
    inner = [one for path in tops for one in _between(path, root)]
    notes = links_in(dict.fromkeys([*inner, *classes]), root, follow_links)
    for place in dict.fromkeys((root, *tops)):
        notes += _lost_links(place)
    notes += layout.notes
    empty = [folder.name for folder in layout.unused if not folder.total or folder.link]
    if empty:
        notes.append(f"Not used: {some(empty)} in {printable(root)}.")
    below = Below(
        root=os.path.realpath(root), listed=frozenset(map(os.path.realpath, classes)), follow_links=follow_links
    )
    others = Counter[str]()
    origins: dict[str, str] = {split: _origin(root, of) for split, of in places.items()}
    names, train = _scan_train(places["train"], below, others, notes)
    found = {split: _scan_eval(root, places, split, names, below, others) for split in ("val", "test")}
    notes += below.notes(root)
    left_out = _left_out(others, layout, below)
    if found["val"] is not None or found["test"] is not None:
        if found["test"] is None:
            notes.append(
                f"There is no test split. The accuracy is reported on {origins['val']}, which also selects the best "
                "epoch."
            )
        return Listing(names, train, found["val"], found["test"], notes=notes, origins=origins, left_out=left_out)
    train, test = hold_out_test(train)
    origins["test"] = f"a fifth of each class, held out of {origins['train']}"
    return Listing(names, train, test=test, notes=notes, origins=origins, left_out=left_out)


def _origin(root: Path, places: Sequence[Path]) -> str:
    """Return the folders of a split as short text, relative to the data set's folder."""
    return some([f"{root.absolute().name if place == root else os.path.relpath(place, root)}/" for place in places])


def _between(path: Path, root: Path) -> list[Path]:
    """Return the folders from below `root` down to `path`."""
    return [*reversed([one for one in path.parents if root in one.parents]), path]


def _subfolders(folder: Path) -> dict[str, Path]:
    """Visible subfolders by name."""
    try:
        return {
            entry.name: Path(entry.path)
            for entry in os.scandir(folder)
            if (os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()) and not is_hidden(entry.name)
        }
    except OSError as error:
        raise UserError(f"{printable(folder)} cannot be read ({error.strerror}). Check its permissions.") from error


def _lost_links(folder: Path) -> list[str]:
    """A sentence about links in a folder of classes that lead nowhere."""
    lost = sorted(one.path for one in os.scandir(folder) if one.is_symlink() and not os.path.exists(one.path))
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    return [f"Ignored: {printable(lost[0])}, a link to what does not exist{more}."] if lost else []


def _folders_of(places: Sequence[Path]) -> dict[str, list[Path]]:
    """Return the class folders of a split by class name, sorted."""
    classes: dict[str, list[Path]] = {}
    for place in places:
        here: set[str] = set()
        for name, path in sorted(_subfolders(place).items()):
            if class_name(name) in here:
                raise UserError(f"{place.absolute()} has two folders for the class {class_name(name)!r}. Merge them.")
            here.add(class_name(name))
            classes.setdefault(class_name(name), []).append(path)
    return dict(sorted(classes.items()))


def _scan_train(
    places: Sequence[Path], below: Below, others: Counter[str], notes: list[str]
) -> tuple[list[str], Samples]:
    """Return the sorted class names and all training images."""
    where = some([str(place.absolute()) for place in places])
    ignored = Counter[str]()
    found = {name: _images_below(paths, below, ignored) for name, paths in _folders_of(places).items()}
    if not any(found.values()):
        raise UserError(
            f"{where} has no class folders with images. Expected layout: CLASS/*.jpg, one folder per class. "
            f"{_EXTENSIONS}{_other_files(ignored)}"
        )
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise UserError(
            f"{where} has class folders without images: {_first_names(empty)}. Add images or remove the folders. "
            f"{_boxes_hint(found)}{_EXTENSIONS}{_other_files(ignored)}"
        )
    names = list(found)
    if len(names) == 1:
        raise UserError(
            f"{where} has a single class, {names[0]!r}, with {counted(len(found[names[0]]), 'image')}. Classification"
            " needs at least two classes, each in its own folder."
            f"{labels_hint([*places, *(place / names[0] for place in places)])}"
        )
    single = [name for name in names if len(found[name]) == 1]
    if single:
        raise UserError(
            f"{_first_names(single)} of the {len(names)} classes in {where} {verb(len(single))} a single training image"
            f" ({sum(map(len, found.values())):,} images in all). Each class needs at least two. Add images, remove the"
            f" {verb(len(single), 'folder', 'folders')} from all splits, or move the images to another class."
        )
    others.update(ignored)
    alike: dict[str, list[str]] = defaultdict(list)
    for name in names:
        alike[same_class(name)].append(f"{name!r} ({len(found[name]):,})")
    for same in alike.values():
        if len(same) > 1:
            notes.append(
                f"Class names differ only in case or spaces: {', '.join(same)}. They are trained as separate classes."
                " If they are one class, merge the folders."
            )
    parts = list(found.values())
    return names, Samples(Paths.join(parts), np.repeat(np.arange(len(names)), [len(part) for part in parts]))


def _boxes_hint(names: Iterable[str]) -> str:
    """A sentence for the layout in which YOLO has its boxes."""
    if {name.casefold() for name in names} != {"images", "labels"}:
        return ""
    return (
        "images/ with labels/ is an export for object detection: export the data for classification instead, with a"
        " folder per class. "
    )


def _scan_eval(
    root: Path,
    splits: Mapping[Split, Sequence[Path]],
    split: Split,
    names: list[str],
    below: Below,
    others: Counter[str],
) -> Samples | None:
    """Return the validation or test images with the labels of training; None if the split does not exist."""
    if split not in splits:
        return None
    where = some([str(place.absolute()) for place in splits[split]])
    ignored = Counter[str]()
    found = {name: _images_below(paths, below, ignored) for name, paths in _folders_of(splits[split]).items()}
    known = {name: label for label, name in enumerate(names)}
    unknown = {name: len(files) for name, files in found.items() if files and name not in known}
    if unknown:
        first = next(iter(unknown))
        near = next((f" It differs from {one!r} only in case or spaces." for one in names
                     if same_class(one) == same_class(first)), did_you_mean(first, names))  # fmt: skip
        rest: Chosen = {
            other: relative[0] if len(relative) == 1 else relative
            for other, of in splits.items()
            if other != split and (relative := [os.path.relpath(place, root) for place in of])
        }
        raise UserError(
            f"{where} has classes that the training split lacks: {_first_names(list(unknown))} "
            f"({counted(sum(unknown.values()), 'image')}).{near} All splits must have the same class folders. To"
            f" leave this split out: 'data.splits={show(rest)}'."
        )
    found = {name: files for name, files in found.items() if files}
    if not found:
        raise UserError(f"{where} has no images in class folders. {_EXTENSIONS}{_other_files(ignored)}")
    others.update(ignored)
    labels = np.asarray([known[name] for name in found])
    return Samples(Paths.join(list(found.values())), np.repeat(labels, [len(part) for part in found.values()]))


def _images_below(folders: Sequence[Path], below: Below, others: Counter[str]) -> Paths:
    """Return the sorted paths of all images at any depth; count the extensions of other visible files in `others`."""
    parts = []
    for folder in folders:
        start = len(below.files)
        files_below(folder, below)
        files, below.files[start:] = below.files[start:], []
        others.update(Path(name).suffix.lower() or "no extension" for name in files if not is_image(name))
        parts.append(Paths(name for name in files if is_image(name)))
    return Paths.join(parts)


def _left_out(others: Counter[str], layout: Layout, below: Below) -> dict[str, int]:
    """Return the number of unused files by reason."""
    left_out: dict[str, int] = {}
    for kind in [kind for kind in others if reading_hint(kind)]:
        left_out[f"{kind} files: {reading_hint(kind)}"] = others.pop(kind)
    if others:
        left_out[f"not images: {_kinds(others)}"] = others.total()
    if layout.loose:
        left_out["images outside of class folders"] = layout.loose
    unused = [folder for folder in layout.unused if folder.total and not folder.link]
    for folder in unused[:3]:
        left_out[f"images in {printable(folder.name)}/"] = folder.total
    if len(unused) > 3:
        left_out[f"images in {counted(len(unused) - 3, 'more folder')}"] = sum(one.total for one in unused[3:])
    for reason, files in (
        ("links to folders", below.links),
        ("neither files nor folders", below.special),
        ("links to files of the data set", below.again),
    ):
        if files:
            left_out[reason] = len(files)
    return left_out


def _kinds(others: Counter[str]) -> str:
    more = f" and {counted(len(others) - 5, 'more kind')}" if len(others) > 5 else ""
    return ", ".join(f"{kind} ×{count:,}" for kind, count in others.most_common(5)) + more


def _other_files(others: Counter[str]) -> str:
    if not others:
        return ""
    hints = dict.fromkeys(f" For {kind} files: {hint}." for kind in others if (hint := reading_hint(kind)))
    return f" Other files: {_kinds(others)}.{''.join(hints)}"


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more
