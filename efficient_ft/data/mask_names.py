"""Parse the folder names of images and masks, and match their file names."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from efficient_ft.data.splits import name_words, split_of

Kind = Literal["images", "masks"]
_Key = Callable[[str], str | None]  # function from a name to the key that equal names of images and masks share
_IMAGES = frozenset(
    ["images", "image", "imgs", "img", "jpegimages", "jpgs", "jpegs", "photos", "photo", "pictures", "pics", "frames",
     "inputs", "input", "originals", "original", "rgb", "sat"]
)  # fmt: skip
_MASKS = frozenset(
    ["masks", "mask", "labels", "label", "lbl", "annotations", "annotation", "annots", "annot", "anno", "annos", "gt",
     "gts", "groundtruth", "truth", "targets", "target", "trimaps", "trimap", "mattes", "matte", "labelids"]
)  # fmt: skip
#: Words that denote masks, unless the name also contains a word that denotes images, such as ``segmentation_images``.
_WEAK = frozenset(["seg", "segs", "segmentation", "segmentations", "semantic", "segmaps"])
_JOINED = re.compile(
    r"(train|training|val|valid|validation|test|testing|dev|eval)"
    rf"({'|'.join(sorted(_IMAGES | _MASKS, key=len, reverse=True))})"
)


@dataclass(frozen=True)
class FolderName:
    """The kind of files that a folder name denotes, or None, and the remaining words of the name.

    The remaining words may denote a split.
    """

    kind: Kind | None
    rest: str


def read_name(name: str) -> FolderName:
    """Parse a name such as ``train_labels``, ``annotations_png`` or ``SegmentationClass``, ignoring case."""
    words: list[str] = []
    for word in name_words(name):
        joined = _JOINED.fullmatch(word)
        words += joined.groups() if joined and split_of(word) is None else [word]
    strong, images = _MASKS.intersection(words), _IMAGES.intersection(words)
    weak = _WEAK.intersection(words) if not images else frozenset[str]()
    kind: Kind | None = "masks" if strong or weak else "images" if images else None
    return FolderName(kind, " ".join(word for word in words if word not in strong | images | weak))


@dataclass(frozen=True)
class Matches:
    """Images and masks with matching names."""

    pairs: list[tuple[str, str]]  # sorted pairs of image and mask names
    images: list[str]  # names of images without a mask
    masks: list[str]  # names of masks without an image
    rule: str = ""  # description of how the names correspond; empty if the names are equal
    image_affix: tuple[str, str] = ("", "")  # (prefix, suffix) that only image names have
    several: tuple[str, str] | None = None  # two masks of one image, or None if no image has several masks
    suffixes: tuple[str, ...] = ()  # suffixes of the masks of one image; the first one most likely denotes class ids


def match_names(images: Sequence[str], masks: Sequence[str]) -> Matches:
    """Match images and masks with equal names, or with names that differ by a constant prefix or suffix.

    Images and masks may have different prefixes or suffixes. Names are relative paths without extensions.
    """
    best = _matched(images, masks, _plain, _plain, "")
    if best.images or best.masks:
        candidates = [best]
        for prefix, suffix in _affixes(images, masks):
            core = partial(_cut, prefix=prefix, suffix=suffix)
            candidates.append(_matched(images, masks, _plain, core, f"{prefix}NAME{suffix}"))
        readings: tuple[tuple[Callable[[str], str], str], ...] = (
            (lambda name: _plain(name).casefold(), "ignoring case"),
            (_content, "ignoring words such as 'image' and 'mask'"),
        )
        for reading, rule in readings:
            if all(len(set(map(reading, names))) == len(names) for names in (images, masks)):
                candidates.append(_matched(images, masks, reading, reading, rule))
        own, others = _distinct(_common(images, masks), _common(masks, images))
        for image, mask in ((own, others), (("", own[1]), ("", others[1])), ((own[0], ""), (others[0], ""))):
            own_core, core = (partial(_cut, prefix=prefix, suffix=suffix) for prefix, suffix in (image, mask))
            rule = f"{'NAME'.join(mask)} (images: {'NAME'.join(image)})"
            candidates.append(replace(_matched(images, masks, own_core, core, rule), image_affix=image))
        best = max(candidates, key=lambda one: len(one.pairs))
        if best.masks and (best.rule or best.images):
            several, suffixes = _several(images, best, "") or _several(images, best, own[1]) or (None, ())
            best = replace(best, several=several, suffixes=suffixes)
    return best


def _common(names: Sequence[str], others: Sequence[str]) -> tuple[str, str]:
    """Return the common prefix and suffix of all names, up to the nearest word or number boundaries.

    If `names` and `others` contain one name each, return an empty prefix and the suffix by which the two names differ.
    The suffix is empty if it contains no letter.
    """
    stems = [_plain(name).rpartition("/")[2] for name in names]
    if len(stems) == len(others) == 1:
        at = _last_border(_start([stems[0], _plain(others[0]).rpartition("/")[2]]))
        suffix = stems[0][at:] if at else ""
        return "", suffix if re.search(r"[^\W\d_]", suffix) else ""
    if len(stems) < 2:
        return "", ""
    prefix = _start(stems).rstrip("0123456789")
    if prefix[-1:].isalpha() and not all(stem[len(prefix) :][:1].isdigit() for stem in stems):
        prefix = re.sub(r"[^\W_]+$", "", prefix)
    suffix = _start([stem[len(prefix) :][::-1] for stem in stems])[::-1]
    border = re.search(r"[\W_]", suffix)
    return prefix, suffix[border.start() :] if border else ""


def _distinct(own: tuple[str, str], others: tuple[str, str]) -> tuple[tuple[str, str], tuple[str, str]]:
    at = _last_border(_start([own[1], others[1]]))
    prefixes = ("", "") if own[0] == others[0] else (own[0], others[0])
    return (prefixes[0], own[1][at:]), (prefixes[1], others[1][at:])


def _last_border(text: str) -> int:
    """Return the index of the last character that is neither a letter nor a digit, or 0 if there is none."""
    return max((at.start() for at in re.finditer(r"[\W_]", text)), default=0)


def _start(texts: Sequence[str]) -> str:
    low, high = min(texts), max(texts)
    return low[: next((i for i, (a, b) in enumerate(zip(low, high, strict=False)) if a != b), len(low))]


def _matched(images: Sequence[str], masks: Sequence[str], image_key: _Key, mask_key: _Key, rule: str) -> Matches:
    by_key = {key: name for name in masks if (key := mask_key(name)) is not None}
    pairs = [(name, by_key[key]) for name in sorted(images) if (key := image_key(name)) in by_key]
    with_mask, used = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    without_mask = sorted(name for name in images if name not in with_mask)
    return Matches(pairs, without_mask, sorted(name for name in masks if name not in used), rule if pairs else "")


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _content(name: str) -> str:
    folder, _, stem = _plain(name).rpartition("/")
    return f"{folder}/{read_name(stem).rest}".casefold()


def _affixes(images: Sequence[str], masks: Sequence[str]) -> list[tuple[str, str]]:
    """Return at most four (prefix, suffix) pairs that extend image names to mask names, in order of frequency."""
    found = Counter[tuple[str, str]]()
    by_folder: dict[str, list[str]] = {}
    for mask in masks:
        by_folder.setdefault(mask.rpartition("/")[0], []).append(_plain(mask).rpartition("/")[2])
    for image in sorted(images)[:: max(len(images) // 16, 1)]:
        folder, _, stem = _plain(image).rpartition("/")
        for mask in by_folder.get(folder, ()):
            at = mask.find(stem)
            before, after = mask[:at], mask[at + len(stem) :]
            if at >= 0 and mask != stem and not _is_another_number(before, stem, after):
                found[before, after] += 1
    return [affix for affix, _ in found.most_common(4)]


def _is_another_number(before: str, stem: str, after: str) -> bool:
    """Return True if the digits next to a name change its number: 11 differs from 1, but 001 does not."""
    digits = before[len(before.rstrip("0123456789")) :]
    return (stem[:1].isdigit() and digits.strip("0") != "") or (stem[-1:].isdigit() and after[:1].isdigit())


def _several(images: Sequence[str], found: Matches, end: str) -> tuple[tuple[str, str], tuple[str, ...]] | None:
    """Return two masks of one image, and the suffixes that occur in the masks of most images.

    Return None if no image has two masks.
    """
    chosen = sorted(images)[:: max(len(images) // 64, 1)]
    first: tuple[str, str] | None = None
    counts, matched = Counter[str](), dict(found.pairs)
    for image in chosen:
        folder, _, stem = (_cut(image, "", end) or "").rpartition("/")
        own = []
        for mask in [*found.masks, *([matched[image]] if image in matched else [])] if stem else []:
            place, _, other = _plain(mask).rpartition("/")
            before, at, after = other.partition(stem)
            if place == folder and at and not before[-1:].isalnum() and not after[:1].isalnum():
                own.append((mask, "" if before else after))
        if len(own) > 1:
            own.sort()
            first = first or (own[0][0], own[1][0])
            counts.update({suffix for _, suffix in own if suffix})
    if first is None:
        return None
    frequent = [suffix for suffix, count in counts.items() if count * 2 > len(chosen)]
    if frequent and end:
        frequent = [_distinct(("", end), ("", suffix))[1][1] for suffix in frequent]
    order = sorted(frequent, key=lambda one: ("label" not in one.lower(), "train" in one.lower(), one))
    return first, tuple(order) if len(order) > 1 else ()


def _cut(name: str, prefix: str, suffix: str) -> str | None:
    """Remove a prefix and a suffix from a name, or return None if the prefix or the suffix is missing."""
    folder, slash, stem = _plain(name).rpartition("/")
    if not stem.startswith(prefix) or not stem.endswith(suffix) or len(stem) <= len(prefix) + len(suffix):
        return None
    return f"{folder}{slash}{stem[len(prefix) : len(stem) - len(suffix)]}"
