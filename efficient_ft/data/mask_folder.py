"""Read images and their masks from folders."""

from __future__ import annotations

import contextlib
import os
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import printable
from efficient_ft.data.class_list import FILES, folder_classes
from efficient_ft.data.counts import counted, most_frequent, some, verb
from efficient_ft.data.file_list import FileList, links_in
from efficient_ft.data.images import EXTENSIONS
from efficient_ft.data.inspection import spread
from efficient_ft.data.mask_layout import LAYOUT, Area, Places, Tree, mask_tree, named_places, recognized_places, shown
from efficient_ft.data.mask_names import Matches, match_names
from efficient_ft.data.masks import MASK_EXTENSIONS, MaskListing, MaskSamples, hold_out, read_pixels
from efficient_ft.data.splits import Chosen, Split

_DECODED = 16  # number of masks whose values are reported if there is no class list


def missing_mask_folder(root: Path) -> str | None:
    """Return the error message if `root` is not a folder, or None otherwise."""
    return None if root.is_dir() else f"data.root={printable(root)}: the folder does not exist. {LAYOUT}"


def read_mask_folder(
    root: Path, settings: MaskConfig, chosen: Chosen | None = None, follow_links: bool = False
) -> MaskListing:
    """List the images and masks below `root`.

    Images, masks and splits are recognized by folder names: ``SPLIT/images`` with ``SPLIT/masks``, ``images/SPLIT``
    with ``masks/SPLIT``, ``SPLIT`` with ``SPLIT_masks``, or ``images`` with ``masks``. If there is neither a validation
    nor a test split, one fifth of the images is held out for testing. The held-out images are the same for every seed.
    A mask must have the same name as its image, except for the extension and a constant prefix or suffix.

    Args:
        root: folder of the data set, or a link to this folder.
        settings: mask settings (``data.masks``).
        chosen: folders of each split, as in ``data.splits``, or None to recognize the splits by name.
        follow_links: if True, follow links that point outside of `root`, and list these links in the notes.

    Raises:
        UserError: If the folder does not exist, there are no classes, the layout is ambiguous, an image has no mask, or
            a link points outside of `root` and `follow_links` is False.
    """
    if (problem := missing_mask_folder(root)) is not None:
        raise UserError(problem)
    tree = mask_tree(root, settings)
    places = named_places(root, tree, chosen) if chosen is not None else recognized_places(root, tree, settings)
    classes, notes = folder_classes(root, settings, lambda: _values_found(places))
    folders = {area.path for pairs in places.values() for pair in pairs for area in pair if area is not None}
    above = {one for area in folders for one in (area, *area.parents) if root in one.parents}
    notes += links_in([*sorted(above), *(root / name for name in FILES)], root, follow_links)
    files = FileList(root, folders, follow_links)
    found = _Pairs(root, {area.path for area in tree.areas}, files, settings.suffix)
    parts: dict[Split, MaskSamples] = {}
    origins: dict[str, str] = {}
    for split, pairs in places.items():
        samples = found.samples(split, pairs)
        if len(samples):
            parts[split], origins[split] = samples, ", ".join(shown(pair[0].path, root) for pair in pairs)
    found.leave_out(tree, {area.path for area in tree.areas} - folders)
    notes += files.notes(root) + found.notes
    train, val, test = parts["train"], parts.get("val"), parts.get("test")
    if val is None and test is None:
        total = len(train)
        if total < 2:
            raise UserError(
                f"The folder {printable(root.absolute())} contains only one image with a mask, so no image can be held"
                " out for testing. Add more images with masks."
            )
        train, test = hold_out(train, 0.2, seed=0)
        origins["test"] = f"held out of {origins['train']}"
        notes.append(
            f"{len(test)} of {total} images {verb(len(test), 'is', 'are')} held out for testing. The held-out images"
            " are the same for every seed."
        )
    return MaskListing(classes, train, val, test, notes=notes, origins=origins, left_out=dict(found.left_out))


def _values_found(places: Places) -> str:
    """Return a sentence that lists the values in some training masks, or an empty string if no mask can be read."""
    masks = [mask.path for _, mask in places.get("train", ()) if mask is not None]
    paths = sorted(str(one) for folder in masks for one in folder.rglob("*") if one.suffix.lower() in MASK_EXTENSIONS)
    images: Counter[int] = Counter()
    read = 0
    for i in spread(len(paths), _DECODED) if paths else ():
        with contextlib.suppress(UserError):
            pixels = read_pixels(paths[i])
            if pixels.ids.min(initial=0) < 0:
                return " The masks contain colors. Set the color of each class in classes.txt or data.masks.colors."
            images.update(np.unique(pixels.ids).tolist())
            read += 1
    if not read:
        return ""
    listed = some([f"{value} (in {count})" for value, count in sorted(images.items())], 12)
    return f" The following values were found in {read} of {counted(len(paths), 'training mask')}: {listed}."


class _Pairs:
    """Collector of the images and masks in folders, which also counts unused files.

    A file belongs to the innermost folder in `areas` that contains the file.
    """

    def __init__(self, root: Path, areas: set[Path], files: FileList, suffix: str | None) -> None:
        self._root, self._areas, self._file_list, self._suffix = root, areas, files, suffix
        self.notes: list[str] = []
        self.left_out: Counter[str] = Counter()
        self._unused: dict[Path, dict[str, str]] = {}

    def samples(self, split: Split, pairs: Sequence[tuple[Area, Area | None]]) -> MaskSamples:
        found = MaskSamples([], [])
        for images, masks in pairs:
            if masks is None:
                name, number = shown(images.path, self._root), counted(images.count, "image")
                if split == "train":
                    place = f"The folder {printable(images.path.absolute())}"
                    raise UserError(f"{place} contains {number}, but no matching folder of masks exists. {LAYOUT}")
                self.left_out[f"images without masks ({name})"] += images.count
                unused = verb(images.count, "This image is", "These images are")
                self.notes.append(f"The folder {name} contains {number} without masks. {unused} not used.")
                continue
            part = self._matched(images.path, masks.path)
            found.images.extend(part.images)
            found.masks.extend(part.masks)
        return found

    def _matched(self, images: Path, masks: Path) -> MaskSamples:
        image_files, _ = self._files(images, EXTENSIONS)
        mask_files, others = self._files(masks, MASK_EXTENSIONS)
        if not image_files:
            raise UserError(f"{printable(images.absolute())} has no images.")
        if self._suffix is not None:
            named = {name: path for name, path in mask_files.items() if name.endswith(self._suffix)}
            if not named:
                known = f"a suffix of the mask names in {printable(masks)}, without the extension"
                raise SettingError("data.masks.suffix", self._suffix, known, f"Found: {some(sorted(mask_files), 3)}.")
            self.left_out["masks with another suffix"] += len(mask_files) - len(named)
            mask_files = named
        found = match_names(list(image_files), list(mask_files))
        if found.several:
            raise _several(masks, found, mask_files, len(image_files))
        if found.images:
            raise _lacking(found, image_files, masks, mask_files, others)
        for extension, count in others.items():
            self.left_out[f"not masks ({extension} in {shown(masks, self._root)})"] += count
        if found.rule:
            form = f"named {found.rule}" if "NAME" in found.rule else f"matched to images {found.rule}"
            self.notes.append(f"The masks in {shown(masks, self._root)} are {form}.")
        rest = self._unused.setdefault(masks, dict(mask_files))
        for _, mask in found.pairs:
            rest.pop(mask, None)
        return MaskSamples([image_files[a] for a, _ in found.pairs], [mask_files[b] for _, b in found.pairs])

    def leave_out(self, tree: Tree, unused: set[Path]) -> None:
        for folder, rest in self._unused.items():
            if rest:
                self.left_out["masks without an image"] += len(rest)
                self.notes.append(
                    f"{counted(len(rest), 'mask')} in {shown(folder, self._root)} "
                    f"{verb(len(rest), 'has no image and is', 'have no image and are')} not used:"
                    f" {some(sorted(os.path.basename(path) for path in rest.values()), 3)}."
                )
        counts = {shown(area.path, self._root): area.count for area in tree.areas if area.path in unused}
        counts |= {f"{printable(name)}/": count for name, count in tree.plain.items() if name != "."}
        if counts:
            self.left_out["files in other folders"] += sum(counts.values())
            listed = [f"{name} ({counted(count, 'file')})" for name, count in counts.items()]
            self.notes.append(f"Not used: {some(listed)}.")

    def _files(self, folder: Path, extensions: Sequence[str]) -> tuple[dict[str, str], Counter[str]]:
        """Return the paths of files with the given extensions, and the number of other files for each extension.

        The keys of the paths are relative to the folder and have no extension.
        """
        other = Counter[str]()
        found: dict[str, str] = {}
        inner = tuple(os.fspath(area) + os.sep for area in self._areas if folder in area.parents)
        for path in self._file_list.below(folder, strict=True):
            if path.startswith(inner):
                continue
            stem, extension = os.path.splitext(path)
            if extension.lower() not in extensions:
                other[extension.lower() or "no extension"] += 1
                continue
            key = os.path.relpath(stem, folder).replace(os.sep, "/")
            if key in found:
                text = f"The folder {printable(folder)} contains two files for {printable(key)}. Keep one of the files."
                raise UserError(text)
            found[key] = path
        return found, other


def _several(masks: Path, found: Matches, mask_files: Mapping[str, str], images: int) -> UserError:
    assert found.several is not None
    one, two = (printable(os.path.basename(mask_files[name])) for name in found.several)
    advice = "Keep one mask per image, with the ids of all classes."
    if found.suffixes:
        likely, *others = found.suffixes
        advice = (
            f"Choose one mask by its suffix: data.masks.suffix={likely} (other suffixes: {some(others)}). The"
            " masks must contain class ids instead of object ids."
        )
        if any("gtFine" in suffix for suffix in found.suffixes):
            advice += " You can also use data=cityscapes, which reads the published folders."
    return UserError(
        f"The folder {printable(masks.absolute())} contains several masks for one image: {one} and {two}."
        f" There are {counted(len(mask_files), 'mask')} for {counted(images, 'image')}. {advice}"
    )


def _lacking(
    found: Matches, image_files: Mapping[str, str], masks: Path, mask_files: Mapping[str, str], others: Counter[str]
) -> UserError:
    first, total = found.images[0], len(image_files)
    before, after = found.image_affix
    stem = Path(first).name
    core = stem[len(before) : len(stem) - len(after)]
    expected = found.rule.split()[0].replace("NAME", core) if "NAME" in found.rule else stem
    place = (masks.absolute() / first).parent / f"{expected}.png"
    more = f" {len(found.images)} of {total} images have no mask." if len(found.images) > 1 else ""
    text = f"The image {printable(image_files[first])} has no mask. The file {printable(place)} does not exist.{more}"
    lossy = {kind: count for kind, count in others.items() if kind in (".jpg", ".jpeg", ".jfif", ".webp")}
    if lossy:
        kind, count = max(lossy.items(), key=lambda item: item[1])
        return UserError(
            f"{text} The folder {printable(masks)} contains {counted(count, f'{kind} file')}. JPEG and WebP change"
            " pixel values and cannot store masks. Export the masks from their source as PNG files."
        )
    if mask_files and not found.pairs:
        text += (
            f" No mask has the same name as an image. Names of {counted(total, 'image')}:"
            f" {some(sorted(image_files), 3)}. Names of {counted(len(mask_files), 'mask')}:"
            f" {some(sorted(mask_files), 3)}. Give each mask the name of its image. Each image must have"
            " one mask with the ids of all classes."
        )
    elif found.masks:
        has = verb(len(found.masks))
        text += f" {counted(len(found.masks), 'mask')} {has} no image: {some(found.masks, 3)}."
    elif others:
        listed, allowed = most_frequent(others, 3, "kind"), ", ".join(MASK_EXTENSIONS)
        text += f" The folder {printable(masks)} contains other files ({listed}). Masks must be {allowed} files."
    return UserError(f"{text} Add the mask, or remove the image.")
