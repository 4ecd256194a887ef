"""Inspect images with masks: sizes, kinds of masks, pixels per class, and unusable samples."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping, Sequence

import numpy as np

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import plain_line, printable
from efficient_ft.data.counts import counted, some, verb
from efficient_ft.data.images import Decoding, read_image
from efficient_ft.data.inspection import Inspection, find_failures, in_threads
from efficient_ft.data.mask_survey import Survey, examined, mask_orientation, survey
from efficient_ft.data.masks import UNKNOWN, Classes, MaskSamples, read_mask, read_pixels

_Parts = Mapping[str, MaskSamples]
_MOSTLY_UNLABELED = 0.9  # fraction of unlabeled pixels above which a warning is issued
_FEW = 3  # minimum number of decoded masks for a warning about equal masks or masks with a single class
_GAP = 0.15  # minimum difference between every foreground fraction and 0.5 for a warning about inverted masks
_LINE = 60  # maximum number of characters in the list of class fractions
_MODES = {
    "1": "1-bit ids (black is 0, white is 1)",
    "L": "8-bit ids",
    "P": "indices of a palette",
    "LA": "8-bit ids",
    "I": "32-bit ids",
}


def inspect_masks(
    parts: Mapping[str, MaskSamples],
    classes: Classes,
    settings: MaskConfig,
    decoding: Decoding | None = None,
    *,
    thorough: bool = False,
) -> Inspection:
    """Inspect the images and masks of a data set, given its splits.

    By default, headers are read and some masks are decoded. If `thorough` is True, every file is decoded, and images
    that occur in several splits are reported.
    """
    found = survey(parts, classes, thorough)
    result = Inspection()
    _facts(result, found, classes)
    _lines(result, found, classes)
    _warnings(result, found, classes, settings)
    _odd(result, found, classes)
    if thorough:
        _problems(result, parts, classes, settings, decoding)
        _duplicates(result, parts)
    else:
        _problems_of_headers(result, found, settings)
    return result


def _facts(result: Inspection, found: Survey, classes: Classes) -> None:
    headers = [pair.header for pair in found.pairs if pair.header]
    sizes = Counter(header.size for header in headers)
    modes = Counter(header.mode for header in headers)
    shares = found.shares()
    known = max(int(shares.sum()), 1)
    train = found.shares("train")
    labeled = max(int(train[:UNKNOWN].sum()), 1)
    result.facts |= {
        "mask_sizes": {f"{w}×{h}": count for (w, h), count in sizes.most_common(5)},
        "mask_size_count": len(sizes),
        "mask_modes": dict(modes.most_common()),
        "unlabeled_share": round(int(shares[IGNORED]) / known, 6),
        "train_pixels": {name: round(int(train[i]) / labeled, 6) for i, name in enumerate(classes.names)},
        "headers_read": len(found.pairs),
        "masks_decoded": len(found.masks),
        "masks": sum(found.totals.values()),
    }
    turned = found.orientations()
    if turned:
        result.facts["exif_orientations"] = turned


def _lines(result: Inspection, found: Survey, classes: Classes) -> None:
    facts = result.facts
    sizes = list(facts["mask_sizes"])
    size = f"{facts['mask_size_count']} sizes, mostly {sizes[0]}" if len(sizes) > 1 else (sizes or ["no size"])[0]
    kinds = list(dict.fromkeys(_kind(mode, classes) for mode in facts["mask_modes"]))
    result.lines.append(
        f"masks: {size}, {' and '.join(kinds)}; {format_percent(facts['unlabeled_share'])} of the pixels have no label"
        f" ({examined(found)})"
    )
    order = sorted(facts["train_pixels"].items(), key=lambda item: -item[1])
    present = [f"{plain_line(name)} {format_percent(share)}" for name, share in order if share > 0]
    count = sum(1 for end in range(1, len(present) + 1) if len(", ".join(present[:end])) <= _LINE)
    rest = f", … ({len(present)} classes)" if len(present) > max(count, 1) else ""
    absent = [plain_line(name) for name, share in facts["train_pixels"].items() if not share]
    result.lines.append(f"training pixels: {', '.join(present[: max(count, 1)])}{rest}")
    if absent:
        result.lines.append(f"classes without training pixels: {some(absent)}")
    turned = facts.get("exif_orientations")
    if turned:
        words = {
            "raw": "masks that match the stored pixels and are rotated with the image",
            "upright": "masks that match the upright image",
            "unclear": "masks of unknown orientation",
        }
        listed = ", ".join(f"{count} with {words[kind]}" for kind, count in sorted(turned.items()))
        result.lines.append(f"images with an EXIF orientation: {listed}")


def _kind(mode: str, classes: Classes) -> str:
    if classes.colors and (mode in ("RGB", "RGBA") or (mode == "P" and classes.palette != "index") or classes.gray):
        return "colors of classes"
    if mode in ("RGB", "RGBA"):
        return "8-bit ids in three equal channels"
    return _MODES.get(mode, "16-bit ids" if mode.startswith("I;16") else f"mode {mode}")


def _warnings(result: Inspection, found: Survey, classes: Classes, settings: MaskConfig) -> None:
    decoded, total = len(found.counted.get("train", [])), found.totals.get("train", 0)
    absent = [plain_line(name) for name, share in result.facts["train_pixels"].items() if not share]
    if absent:
        advice = ""
        if result.facts["unlabeled_share"] and not classes.chosen:
            advice = " If 255 is a class id, map this id with data.masks.values."
        result.warnings.append(
            f"No training pixels were found for {some(absent)}"
            f" ({'in' if decoded == total else f'in {decoded} of'} {counted(total, 'mask')}).{advice}"
        )
    for split in found.counted:
        shares = found.shares(split)
        unlabeled = int(shares[IGNORED]) / max(int(shares.sum()), 1)
        if unlabeled > _MOSTLY_UNLABELED:
            result.warnings.append(
                f"{format_percent(unlabeled)} of the pixels in the {split} masks have no label"
                f" ({', '.join(map(str, sorted(classes.ignored)[:5]))}). Check data.masks.values and"
                " data.masks.ignored."
            )
        empty = sum(1 for _, one in found.counted[split] if 0 < one.shares[IGNORED] == one.shares.sum())
        if empty and split != "train":
            masks = f"{counted(empty, f'{split} mask')} {verb(empty)}"
            result.warnings.append(f"{masks} no labeled pixels. Such masks do not affect the scores.")
    different = _sizes_that_differ(found, settings)
    if different:
        image, mask, _ = different[0]
        result.warnings.append(
            f"{len(different)} of {counted(len(found.pairs), 'mask')} "
            f"{verb(len(different), 'differs in size from its image', 'differ in size from their images')}, for"
            f" example {printable(mask)} ({printable(image)}). Such pairs are rejected. Set data.on_corrupt=skip to"
            " skip these pairs."
        )


def _odd(result: Inspection, found: Survey, classes: Classes) -> None:
    rows = [row for row in found.masks if not row[1].error]
    shares = np.asarray([one.shares for _, one in rows]).reshape(len(rows), -1)[:, :UNKNOWN]
    present = (shares > 0).sum(axis=1)
    if len(rows) >= _FEW and (present <= 1).all():
        result.warnings.append(
            f"Each of the {len(rows)} decoded masks contains a single class. If each image has one class, use"
            " data=folder with one folder per class."
        )
    elif len(rows) >= _FEW and (shares == shares[0]).all():
        ids = [read_pixels(path).ids for path, _ in rows[:_FEW]]
        if all(np.array_equal(ids[0], one) for one in ids):
            result.warnings.append(
                f"The {len(rows)} decoded masks are equal, for example {printable(rows[0][0])}. Check the mask of each"
                " image."
            )
    if len(classes.names) == 2:
        _inverted(result, [path for path, _ in rows], shares[:, :2], classes)


def _inverted(result: Inspection, paths: Sequence[str], pixels: np.ndarray, classes: Classes) -> None:
    """Add a warning if the two classes may be swapped in some masks.

    `pixels` contains the number of pixels of both classes in each of N masks: int64 (N, 2). A warning is added only if
    no foreground fraction is close to one half, and if the median foreground fraction of the masks whose foreground
    covers at most half of the pixels is similar to the median background fraction of the other masks.
    """
    mixed = np.flatnonzero(pixels.all(axis=1))  # masks with a single class are ignored
    share = pixels[mixed, 1] / np.maximum(pixels[mixed].sum(axis=1), 1)
    high = share > 0.5
    groups = high.sum(), (~high).sum()
    if min(groups) < max(2, 0.05 * len(share)) or len(share) < 8 or (abs(share - 0.5) < _GAP).any():
        return
    low_median, high_median = float(np.median(share[~high])), 1 - float(np.median(share[high]))
    if max(low_median, high_median) > 2 * min(low_median, high_median):
        return
    fewer = np.flatnonzero(high if groups[0] <= groups[1] else ~high)
    few, rest = share[fewer], np.delete(share, fewer)
    result.warnings.append(
        f"{len(fewer)} of {len(share)} masks with both classes may be inverted: {plain_line(classes.names[1])} covers"
        f" {format_percent(few.min())} to {format_percent(few.max())} of the pixels of these masks, but"
        f" {format_percent(rest.min())} to {format_percent(rest.max())} of the pixels of the other masks. Example:"
        f" {printable(paths[mixed[fewer[0]]])}."
    )


def _sizes_that_differ(found: Survey, settings: MaskConfig) -> list[tuple[str, str, str]]:
    """Return the image path, the mask path and a text with both sizes for each pair with different upright sizes."""
    different = []
    for pair in found.pairs:
        if pair.header is None or pair.stored is None:
            continue
        (width, height), orientation = pair.stored
        fitting = {(width, height)}
        if orientation >= 5 and settings.exif != "raw":
            fitting = {(height, width)} if settings.exif == "upright" else {(width, height), (height, width)}
        if pair.header.size not in fitting:
            sizes = f"the mask is {pair.header.size[0]}×{pair.header.size[1]}, but the image is {width}×{height}"
            different.append((pair.image, pair.mask, sizes))
    return different


def _problems_of_headers(result: Inspection, found: Survey, settings: MaskConfig) -> None:
    for split, rows in found.counted.items():
        for path, one in rows:
            if one.error and one.error != "colors":
                result.problems[path] = one.error
            elif one.error or one.shares[UNKNOWN]:
                result.problems[path] = "colors without a class" if one.error else "values without a class"
            elif split == "train" and one.shares.sum() == one.shares[IGNORED]:
                result.problems[path] = "no pixel has a label"
    for _, mask, sizes in _sizes_that_differ(found, settings):
        result.problems.setdefault(mask, f"{sizes}; the mask and the image must have the same size")


def _problems(
    result: Inspection, parts: _Parts, classes: Classes, settings: MaskConfig, decoding: Decoding | None
) -> None:
    """Read every image and its mask as in training, and record failures."""
    unreadable: set[str] = set()

    def read(job: tuple[str, str, bool]) -> None:
        image, mask, labeled = job
        try:
            size = read_image(image, decoding=decoding).size
        except UserError:
            unreadable.add(mask)
            raise
        read_mask(mask, classes, size, mask_orientation(image, mask, settings.exif), labeled)

    jobs = [
        (image, mask, split == "train")
        for split, part in parts.items()
        for image, mask in zip(part.images, part.masks, strict=True)
    ]
    for (image, mask, _), message in find_failures(read, jobs, "masks").items():
        result.problems[image if mask in unreadable else mask] = message


def _duplicates(result: Inspection, parts: _Parts) -> None:
    jobs = [(split, path) for split, part in parts.items() for path in part.images]
    splits: dict[bytes, dict[str, str]] = {}
    for (split, path), digest in zip(jobs, in_threads(_content, [path for _, path in jobs]), strict=True):
        if digest is not None:
            splits.setdefault(digest, {}).setdefault(split, path)
    shared = [found for found in splits.values() if len(found) > 1]
    result.facts["images_in_several_splits"] = len(shared)
    if shared:
        (first, one), (second, two) = list(shared[0].items())[:2]
        result.warnings.append(
            f"{counted(len(shared), 'image')} {verb(len(shared), 'is', 'are')} in several splits, for example"
            f" {printable(one)} ({first}) and {printable(two)} ({second}). Scores on these images are"
            " too high. Remove the duplicates."
        )


def _content(path: str) -> bytes | None:
    try:
        with open(path, "rb") as file:
            return hashlib.file_digest(file, lambda: hashlib.blake2b(digest_size=16)).digest()
    except OSError:
        return None
