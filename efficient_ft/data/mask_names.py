"""Read and match the names of folders and files of images and masks."""

from __future__ import annotations

import re
import unicodedata
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from efficient_ft.data.splits import split_of

Kind = Literal["images", "masks"]
_IMAGES = frozenset(
    ["images", "image", "imgs", "img", "jpegimages", "jpgs", "jpegs", "photos", "photo", "pictures", "pics", "frames",
     "inputs", "input", "originals", "original", "rgb", "sat"]
)  # fmt: skip
_MASKS = frozenset(
    ["masks", "mask", "labels", "label", "lbl", "annotations", "annotation", "annots", "annot", "anno", "annos", "gt",
     "gts", "groundtruth", "truth", "targets", "target", "trimaps", "trimap", "mattes", "matte", "labelids"]
)  # fmt: skip
#: Words that denote masks unless the name also denotes images: ``segmentation_images``.
_WEAK = frozenset(["seg", "segs", "segmentation", "segmentations", "semantic", "segmaps"])
_JOINED = re.compile(
    r"(train|training|val|valid|validation|test|testing|dev|eval)"
    rf"({'|'.join(sorted(_IMAGES | _MASKS, key=len, reverse=True))})"
)


@dataclass(frozen=True)
class FolderName:
    """The meaning of a folder's name.

    Attributes:
        kind: kind of its files; None if the name denotes none.
        rest: the other words, which may denote a split.
    """

    kind: Kind | None
    rest: str


def read_name(name: str) -> FolderName:
    """Read a name such as ``train_labels``, ``annotations_png`` or ``SegmentationClass``, ignoring case."""
    spaced = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", unicodedata.normalize("NFC", name))
    words: list[str] = []
    for word in re.findall(r"[^\W\d_]+|\d+", spaced.casefold()):
        joined = _JOINED.fullmatch(word)
        words += joined.groups() if joined and split_of(word) is None else [word]
    strong, images = _MASKS.intersection(words), _IMAGES.intersection(words)
    weak = _WEAK.intersection(words) if not images else frozenset[str]()
    kind: Kind | None = "masks" if strong or weak else "images" if images else None
    return FolderName(kind, " ".join(word for word in words if word not in strong | images | weak))


@dataclass(frozen=True)
class Matches:
    """Images and masks with matching names.

    Attributes:
        pairs: names of (image, mask), sorted.
        images: names of images without a mask.
        masks: names of masks without an image.
        rule: description of how the names correspond; empty if they are equal.
        several: two masks of one image; None if there is no such image.
    """

    pairs: list[tuple[str, str]]
    images: list[str]
    masks: list[str]
    rule: str = ""
    several: tuple[str, str] | None = None


def match_names(images: Sequence[str], masks: Sequence[str]) -> Matches:
    """Match images and masks by paths without extension: equal names, or names with a constant prefix or suffix.

    Args:
        images: paths relative to the folder of images.
        masks: paths relative to the folder of masks.
    """
    best = _matched(images, masks, {_plain(name): name for name in masks}, _plain, "")
    if best.images or best.masks:
        for prefix, suffix in _affixes(images, masks):
            keys = {_cut(name, prefix, suffix): name for name in map(str, masks)}
            keys.pop(None, None)
            found = _matched(images, masks, keys, _plain, f"{prefix}NAME{suffix}")  # type: ignore[arg-type]
            best = found if len(found.pairs) > len(best.pairs) else best
        best = replace(best, several=_several(best)) if best.rule else best
        for reading, rule in ((_folded, "ignoring case"), (_content, "ignoring words such as 'image' and 'mask'")):
            names = Counter(map(reading, masks))
            if max(names.values(), default=2) > 1 or len(set(map(reading, images))) < len(images):
                continue
            found = _matched(images, masks, {reading(name): name for name in masks}, reading, rule)
            best = found if len(found.pairs) > len(best.pairs) else best
    return best


def _matched(images: Sequence[str], masks: Sequence[str], by_key: Mapping[str, str], key: object, rule: str) -> Matches:
    pairs = [(name, by_key[key(name)]) for name in sorted(images) if key(name) in by_key]  # type: ignore[operator]
    with_mask, used = {pair[0] for pair in pairs}, {pair[1] for pair in pairs}
    return Matches(
        pairs,
        sorted(name for name in images if name not in with_mask),
        sorted(name for name in masks if name not in used),
        rule if pairs else "",
    )


def _plain(name: str) -> str:
    return unicodedata.normalize("NFC", name)


def _folded(name: str) -> str:
    return _plain(name).casefold()


def _content(name: str) -> str:
    """Return a name without the words that denote images or masks."""
    folder, _, stem = _plain(name).rpartition("/")
    return f"{folder}/{read_name(stem).rest}".casefold()


def _affixes(images: Sequence[str], masks: Sequence[str]) -> list[tuple[str, str]]:
    """Return (prefix, suffix) pairs that masks may have around the names of images, the most frequent first."""
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
    """Whether digits around a name make another number of its own: 1 and 11, but not 1 and 001."""
    digits = before[len(before.rstrip("0123456789")) :]
    return (stem[:1].isdigit() and digits.strip("0") != "") or (stem[-1:].isdigit() and after[:1].isdigit())


def _several(found: Matches) -> tuple[str, str] | None:
    """Return a mask matched by an affix, and a mask of the same image with a different affix; None if there is none."""
    left = [(mask, *_plain(mask).rpartition("/")) for mask in found.masks]
    for image, mask in found.pairs[:64]:
        folder, _, stem = _plain(image).rpartition("/")
        for name, place, _, other in left:
            before, at, after = other.partition(stem)
            if place == folder and at and not before[-1:].isalnum() and not after[:1].isalnum():
                return mask, name
    return None


def _cut(name: str, prefix: str, suffix: str) -> str | None:
    """Return the name of a mask's image; None unless the mask has both affixes."""
    folder, slash, stem = _plain(name).rpartition("/")
    if not stem.startswith(prefix) or not stem.endswith(suffix) or len(stem) <= len(prefix) + len(suffix):
        return None
    return f"{folder}{slash}{stem[len(prefix) : len(stem) - len(suffix)]}"
