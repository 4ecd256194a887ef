"""A user's own images in class folders."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

import numpy as np

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.text import printable
from efficient_ft.data.below import Below, files_below, links_in
from efficient_ft.data.images import EXTENSIONS, class_name, is_image
from efficient_ft.data.listing import Listing, Samples, hold_out_test
from efficient_ft.data.paths import Paths

_VAL_NAMES = ("val", "valid", "validation")
_EXTENSIONS = f"Supported extensions: {' '.join(EXTENSIONS)}."


def missing_folder(root: Path) -> str | None:
    """None if `root` is a folder, else a message with the expected layout."""
    if root.is_dir():
        return None
    state = "is a file" if root.exists() else "does not exist"
    return (
        f"data.root must be a folder of images, got {root} ({root.absolute()} {state}). Expected layout: "
        "DIR/train/CLASS/*.jpg with DIR/val/ or DIR/test/ of the same form, or DIR/CLASS/*.jpg (a fifth is then held "
        "out for testing). Or use data=digits, which needs no files."
    )


def folder_classes(root: Path) -> int | None:
    """Count the class folders to train on, without opening an image; None if there are none."""
    if not root.is_dir():
        return None
    folders = _subfolders(root)
    train = _subfolders(folders["train"]) if "train" in folders else {}
    return len(train or folders) or None


def read_folder(root: Path, follow_links: bool = False) -> Listing:
    """List the images below `root`.

    Two layouts are read: class folders in `train/` and in `val/` (or `valid/`, `validation/`) and/or `test/`; or class
    folders only. If there is neither `val/` nor `test/`, a fifth of every class is held out for testing, the same
    images for every seed. A class folder may nest its images at any depth. Hidden files are ignored; other files
    without an image extension are counted in the notes.

    Args:
        root: the folder; may be a link.
        follow_links: use what links out of `root` lead to, and say so in the notes.

    Raises:
        UserError: no such folder, no class or a single class, a class without images, a class that `train/` lacks, or
            a link out of `root` that is not to be followed.
    """
    problem = missing_folder(root)
    if problem is not None:
        raise UserError(problem)
    folders = _subfolders(root)
    splits = [folders[name] for name in ("train", "test", *_VAL_NAMES) if name in folders]
    inner = [one for split in splits for one in _subfolders(split).values()]
    train = folders.get("train")
    in_splits = train is not None and bool(_subfolders(train))
    classes = inner if in_splits else list(folders.values())
    notes = links_in([*splits, *classes] if in_splits else classes, root, follow_links)
    for place in (root, *splits):
        notes += _lost_links(place)
    listed = frozenset(os.path.realpath(one) for one in classes)

    def below() -> Below:
        return Below(root=os.path.realpath(root), listed=listed, follow_links=follow_links)

    if train is None or not in_splits:
        if train is not None and folders.keys() <= {"train", "test", *_VAL_NAMES}:
            raise UserError(f"{train.absolute()} has no class folders. Expected layout: train/CLASS/*.jpg.")
        split = [name for name in (*_VAL_NAMES, "test") if name in folders]
        if split and train is None and all(_subfolders(folders[name]) for name in split):
            raise UserError(
                f"{root.absolute()} has {split[0]}/ but no train/ with class folders. Add the training images."
            )
        names, samples = _scan_train(root, below(), notes)
        return _with_test_held_out(names, samples, notes)

    validation = [name for name in _VAL_NAMES if name in folders]
    if len(validation) > 1:
        raise UserError(f"{root.absolute()} has {' and '.join(f'{n}/' for n in validation)}. Keep one of them.")
    names, samples = _scan_train(train, below(), notes)
    others = sorted(folders.keys() - {"train", "test", *_VAL_NAMES})
    if others:
        notes.append(f"Not used: {', '.join(printable(name) for name in others)} in {printable(root)}.")
    val = _scan_eval(folders[validation[0]], names, below(), notes) if validation else None
    test = _scan_eval(folders["test"], names, below(), notes) if "test" in folders else None
    if val is None and test is None:
        notes.append(f"{printable(root)} has train/ only.")
        return _with_test_held_out(names, samples, notes)
    if test is None:
        notes.append(
            f"There is no test/ folder: the reported accuracy is that on {validation[0]}/, which also selects the "
            "best epoch."
        )
    return Listing(names, samples, val, test, notes=notes)


def _with_test_held_out(names: list[str], samples: Samples, notes: list[str]) -> Listing:
    train, test = hold_out_test(samples)
    if not len(test):
        raise UserError("Every class has a single image: none can be held out for testing. Add images.")
    notes.append(f"{len(test)} of {len(samples)} images are held out for testing, the same for every seed.")
    return Listing(names, train, test=test, notes=notes)


def _subfolders(folder: Path) -> dict[str, Path]:
    """Visible subfolders by name."""
    try:
        return {
            entry.name: Path(entry.path)
            for entry in os.scandir(folder)
            if (os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir())
            and not entry.name.startswith(".")
            and entry.name != "__MACOSX"
        }
    except OSError as error:
        raise UserError(f"{printable(folder)} cannot be read ({error.strerror}). Check its permissions.") from error


def _lost_links(folder: Path) -> list[str]:
    """A sentence about links in a folder of classes that lead nowhere."""
    lost = sorted(one.path for one in os.scandir(folder) if one.is_symlink() and not os.path.exists(one.path))
    more = f", and {len(lost) - 1} more" if len(lost) > 1 else ""
    return [f"Ignored: {printable(lost[0])}, a link to what does not exist{more}."] if lost else []


def _scan_train(folder: Path, left_out: Below, notes: list[str]) -> tuple[list[str], Samples]:
    """Sorted class names and all images of a folder of class folders."""
    classes: dict[str, Path] = {}
    for name, path in sorted(_subfolders(folder).items()):
        if class_name(name) in classes:
            raise UserError(f"{folder.absolute()} has two folders for the class {class_name(name)!r}. Merge them.")
        classes[class_name(name)] = path
    found: dict[str, Paths] = {}
    ignored = Counter[str]()
    for name, path in classes.items():
        found[name], other = _images_below(path, left_out)
        ignored.update(other)
    if not any(found.values()):
        loose = sum(1 for path in folder.iterdir() if path.is_file() and is_image(path))
        hint = f" {loose} images are outside of class folders." if loose else ""
        raise UserError(
            f"{folder.absolute()} has no class folders with images.{hint} Expected layout: CLASS/*.jpg, one folder "
            f"per class. {_EXTENSIONS}{_other_files(ignored)}"
        )
    empty = [name for name, files in found.items() if not files]
    if empty:
        raise UserError(
            f"{folder.absolute()} has class folders without images: {_first_names(empty)}. Add images or remove the "
            f"folders. {_EXTENSIONS}{_other_files(ignored)}"
        )
    names = sorted(found)
    if len(names) == 1:
        raise UserError(f"{folder.absolute()} has a single class, {names[0]!r}. Classification needs at least two.")
    _note_ignored(folder, ignored, notes)
    notes += left_out.notes(folder)
    parts = [found[name] for name in names]
    return names, Samples(Paths.join(parts), np.repeat(np.arange(len(names)), [len(part) for part in parts]))


def _scan_eval(folder: Path, names: list[str], left_out: Below, notes: list[str]) -> Samples:
    """The images of `val/` or `test/`, labeled by the classes of training."""
    paths: list[Paths] = []
    labels: list[int] = []
    known = {name: label for label, name in enumerate(names)}
    absent = set(names)
    ignored = Counter[str]()
    unknown = []
    for name, path in sorted(_subfolders(folder).items(), key=lambda item: class_name(item[0])):
        files, other = _images_below(path, left_out)
        ignored.update(other)
        if class_name(name) not in known:
            unknown.append(class_name(name))
        elif files:
            absent.discard(class_name(name))
            paths.append(files)
            labels.append(known[class_name(name)])
    if unknown:
        raise UserError(
            f"{folder.absolute()} has classes that train/ lacks: {_first_names(unknown)}."
            f"{did_you_mean(unknown[0], names)} The class folders must have the same names."
        )
    if not paths:
        raise UserError(f"{folder.absolute()} has no images in class folders. {_EXTENSIONS}{_other_files(ignored)}")
    if absent:
        notes.append(f"{printable(folder)} has no images of {len(absent)} classes: {_first_names(sorted(absent))}.")
    _note_ignored(folder, ignored, notes)
    notes += left_out.notes(folder)
    return Samples(Paths.join(paths), np.repeat(np.asarray(labels), [len(part) for part in paths]))


def _images_below(folder: Path, left_out: Below) -> tuple[Paths, Counter[str]]:
    """Sorted paths of all images at any depth, and the extensions of the other visible files."""
    start = len(left_out.files)
    files_below(folder, left_out)
    files, left_out.files[start:] = left_out.files[start:], []
    other = Counter(Path(name).suffix.lower() or "without extension" for name in files if not is_image(name))
    return Paths(name for name in files if is_image(name)), other


def _note_ignored(folder: Path, ignored: Counter[str], notes: list[str]) -> None:
    if ignored:
        notes.append(
            f"{ignored.total()} files in {printable(folder)} are not images and are ignored.{_other_files(ignored)}"
        )


def _other_files(ignored: Counter[str]) -> str:
    if not ignored:
        return ""
    return f" Other files: {', '.join(f'{kind} ×{count}' for kind, count in ignored.most_common(5))}."


def _first_names(names: Sequence[str]) -> str:
    more = f" and {len(names) - 5} more" if len(names) > 5 else ""
    return ", ".join(repr(name) for name in names[:5]) + more
