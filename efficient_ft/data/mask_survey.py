"""Read headers and decode a sample of the masks before training, to reject ambiguous data."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache

import numpy as np

from efficient_ft.config.schema import MaskConfig
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.counts import and_more, counted, some, verb
from efficient_ft.data.file_list import size_and_time
from efficient_ft.data.inspection import DECODED, HEADERS, in_threads, progress, spread
from efficient_ft.data.masks import UNKNOWN, Classes, Header, MaskSamples, raw_size, read_header, read_mask, read_pixels
from efficient_ft.data.splits import quoted

_PIXELS = 30_000_000  # maximum number of pixels that a quick survey decodes, which limits the number of large masks
_SEARCHED = 512  # maximum number of masks that are decoded before a split is rejected
Stored = tuple[tuple[int, int], int]  # size (width, height) of the stored pixels of an image, and its EXIF orientation


@dataclass(frozen=True)
class Counted:
    """The pixel counts of a decoded mask."""

    values: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # distinct ids; empty for colors
    counts: np.ndarray = field(default_factory=lambda: np.zeros(0, dtype=np.int64))  # number of pixels of each id
    shares: np.ndarray = field(default_factory=lambda: np.zeros(256, dtype=np.int64))  # number of pixels of each class
    error: str = ""  # reason why the mask cannot be read; empty if the mask can be read


@dataclass(frozen=True)
class Pair:
    """The headers of an image and its mask. A header is None if its file cannot be read."""

    image: str
    mask: str
    header: Header | None
    stored: Stored | None

    @property
    def orientation(self) -> str | None:
        """The orientation of the mask: ``raw``, ``upright`` or ``unclear``.

        The orientation is None if the image has no EXIF orientation or if a header cannot be read.
        """
        if self.stored is None or self.stored[1] == 1 or self.header is None:
            return None
        return _orientation_by_size(self.stored, self.header.size) or "unclear"


@dataclass
class Survey:
    """The headers of the images and masks in each split, and the pixel counts of the masks."""

    headers: dict[str, list[Pair]] = field(default_factory=dict)  # headers of images and masks
    counted: dict[str, list[tuple[str, Counted]]] = field(default_factory=dict)  # paths and pixel counts of masks
    totals: dict[str, int] = field(default_factory=dict)  # number of masks in each split

    @property
    def pairs(self) -> list[Pair]:
        """The headers of all splits."""
        return [pair for pairs in self.headers.values() for pair in pairs]

    @property
    def masks(self) -> list[tuple[str, Counted]]:
        """The decoded masks of all splits."""
        return [row for rows in self.counted.values() for row in rows]

    def shares(self, *splits: str) -> np.ndarray:
        """Return the number of pixels of each class index in the given splits, int64 (256,).

        By default, the pixels of all splits are counted.
        """
        found = [one.shares for split in splits or self.counted for _, one in self.counted.get(split, ())]
        return np.sum(found, axis=0) if found else np.zeros(256, dtype=np.int64)

    def values(self, split: str) -> dict[int, int]:
        """Return the number of pixels of each id in a split."""
        found = Counter[int]()
        for _, one in self.counted[split]:
            found.update(dict(zip(one.values.tolist(), one.counts.tolist(), strict=True)))
        return found

    def orientations(self) -> dict[str, int]:
        """Return the number of images for each value of `Pair.orientation` except None."""
        return dict(Counter(kind for pair in self.pairs if (kind := pair.orientation) is not None))


def survey(parts: Mapping[str, MaskSamples], classes: Classes, thorough: bool = False) -> Survey:
    """Read headers and decode masks.

    By default, an evenly spread sample of each split is examined. If `thorough` is True, all masks are examined.
    """
    found = Survey(totals={split: len(part) for split, part in parts.items()})
    total = sum(found.totals.values())
    for split, part in parts.items():
        size = len(part)
        chosen = spread(size, size if thorough else max(HEADERS * size // max(total, 1), 1))
        paths = [(part.images[i], part.masks[i]) for i in chosen]
        found.headers[split] = list(in_threads(lambda pair: _pair(*pair, *map(size_and_time, pair)), paths))
        pixels = max((np.prod(pair.header.size) for pair in found.headers[split] if pair.header), default=1)
        count = int(min(DECODED if split == "train" else DECODED // 4, max(_PIXELS // max(pixels, 1), 4)))
        decoded = [part.masks[i] for i in spread(size, size if thorough else count)]
        results = in_threads(lambda path: counted_mask(path, classes), decoded)
        shown = progress(results, len(decoded), "masks") if thorough else results
        found.counted[split] = list(zip(decoded, shown, strict=True))
    return found


@lru_cache(maxsize=4 * HEADERS)
def _pair(image: str, mask: str, *_versions: tuple[int, int] | None) -> Pair:
    header = None
    with contextlib.suppress(UserError):  # the error is reported when the mask is read
        header = read_header(mask)
    return Pair(image, mask, header, raw_size(image))


def counted_mask(path: str, classes: Classes) -> Counted:
    """Decode a mask and count its pixels."""
    return _counted(path, size_and_time(path), classes)


@lru_cache(maxsize=1024)
def _counted(path: str, _version: tuple[int, int] | None, classes: Classes) -> Counted:
    try:
        pixels = read_pixels(path)
        values, by_color = classes.values(pixels)
    except UserError as error:
        return Counted(error=str(error))
    except ValueError:
        return Counted(error="colors")
    shares = np.bincount(classes.indices(values, by_color).ravel(), minlength=256)
    if by_color:
        return Counted(shares=shares)
    if values.size and values.min() >= 0 and values.max() < 1 << 16:
        counts = np.bincount(values.ravel())
        present = np.flatnonzero(counts)
        return Counted(present, counts[present], shares)
    present, counts = np.unique(values, return_counts=True)
    return Counted(present, counts, shares)


def mask_orientation(image: str, mask: str, exif: str) -> int:
    """Return the EXIF orientation that must be applied to a mask, or 1 if the mask is already upright.

    `exif` is the setting ``data.masks.exif``. Raise `UserError` if the sizes do not determine whether the mask matches
    the upright image or the stored pixels.
    """
    stored = raw_size(image)
    if stored is None or stored[1] == 1 or exif == "upright":
        return 1
    if exif == "raw":
        return stored[1]
    reading = _orientation_by_size(stored, read_header(mask).size)
    if reading is None:
        raise UserError(
            f"The image {printable(image)} has the EXIF orientation {stored[1]}, but the sizes do not show whether the"
            f" mask of the image belongs to the stored or to the upright pixels. {_EXIF}"
        )
    return stored[1] if reading == "raw" else 1


_EXIF = (
    "Set data.masks.exif=upright if the masks were drawn on upright images, as in an image viewer. Set"
    " data.masks.exif=raw if the masks were drawn on the stored pixels (for example, with"
    " cv2.IMREAD_IGNORE_ORIENTATION, or with PIL without exif_transpose)."
)


def _orientation_by_size(stored: Stored, mask: tuple[int, int]) -> str | None:
    """Return ``raw`` or ``upright`` for the mask of an image with an EXIF orientation.

    Return None if the sizes do not determine the orientation of the mask.
    """
    (width, height), orientation = stored
    if orientation < 5 or width == height:
        return None if mask == (width, height) else "upright"  # `read_mask` reports the size mismatch
    return "raw" if mask == (width, height) else "upright"


def refuse_unclear_masks(parts: Mapping[str, MaskSamples], classes: Classes, settings: MaskConfig, own: bool) -> None:
    """Raise `UserError` if masks are ambiguous or unusable.

    If `own` is True (for the folder of a user), the ids in the masks are also compared with the ids of the classes.
    """
    found = survey(parts, classes)
    _refuse_palettes(found, classes)
    _refuse_gray_palettes(found, classes)
    if settings.exif == "auto":
        _refuse_orientations(found)
    for split, part in parts.items():
        try:
            _refuse_values(found, classes, split, own)
        except UserError:
            # A small sample often lacks a class. Therefore, more masks are examined before the data is rejected.
            wider = [part.masks[i] for i in spread(len(part), _SEARCHED)]
            results = in_threads(lambda path: counted_mask(path, classes), wider)
            found.counted[split] = list(zip(wider, results, strict=True))
            _refuse_values(found, classes, split, own)


def examined(found: Survey, *splits: str) -> str:
    """Return the number of decoded masks in the given splits as text. By default, all splits are counted."""
    chosen = splits or tuple(found.counted)
    count, total = sum(len(found.counted[s]) for s in chosen), sum(found.totals[s] for s in chosen)
    if count < total:
        return f"{count} of {total} masks were decoded"
    return f"{'all ' * (total > 1)}{counted(total, 'mask')} {verb(total, 'was', 'were')} decoded"


def _refuse_palettes(found: Survey, classes: Classes) -> None:
    """Raise `UserError` if palette indices are used as class ids, but palettes assign different colors to one index."""
    if classes.palette == "index" or classes.colors:
        return
    entries = [value for value in classes.ids if value < 256]
    palettes = [(pair.mask, pair.header.palette) for pair in found.pairs if pair.header]
    every = [(mask, palette) for mask, palette in palettes if palette is not None]
    for mask, palette in every[1:]:
        first = every[0][1]
        shared = [e for e in entries if e < min(len(first), len(palette))]
        differs = (first[shared] != palette[shared]).any(-1)
        if differs.any():
            at = shared[int(np.argmax(differs))]
            one, two = (" ".join(map(str, colors[at].tolist())) for colors in (first, palette))
            raise UserError(
                f"The palettes of the masks differ ({len(every)} palettes of {sum(found.totals.values())} masks were"
                f" compared). Index {at} is the color {one} in {printable(every[0][0])}, but the color {two} in"
                f" {printable(mask)}. Set data.masks.palette=index if the indices are the class ids. To map the masks"
                " by color, add the colors to classes.txt ('NAME RED GREEN BLUE'), or set"
                " data.masks.colors={NAME: [RED, GREEN, BLUE], …}."
            )


def _refuse_gray_palettes(found: Survey, classes: Classes) -> None:
    """Raise `UserError` if the indices of a gray palette differ from its gray values, and both could be class ids."""
    if classes.palette != "auto" or classes.colors:
        return
    palettes = {pair.mask: pair.header.palette for pair in found.pairs if pair.header is not None}
    for path, one in found.masks:
        palette = palettes.get(path)
        if palette is None or not len(one.values) or one.values[-1] >= len(palette):
            continue
        used = palette[one.values]
        grays = used[:, 0].astype(np.int64)
        differs = grays != one.values
        if (used == used[:, :1]).all() and differs.any() and set(grays.tolist()) <= set(classes.ids):
            at = int(np.argmax(differs))
            raise UserError(
                f"The gray palette of {printable(path)} is ambiguous. Index {one.values[at]} has the gray value"
                f" {grays[at]}, and both numbers are class ids. Set data.masks.palette=index if the indices are the"
                " class ids, or save the masks without a palette."
            )


def _refuse_orientations(found: Survey) -> None:
    counts = found.orientations()
    unclear = [(pair.image, pair.stored[1]) for pair in found.pairs if pair.stored and pair.orientation == "unclear"]
    if not unclear:
        return
    shown = ", ".join(sorted({str(orientation) for _, orientation in unclear}))
    hints = [
        f" The masks of {counted(counts[kind], 'other image')} have the size of the {words}."
        for kind, words in (("raw", "stored pixels"), ("upright", "upright image"))
        if counts.get(kind)
    ]
    raise UserError(
        f"{len(unclear)} of {counted(len(found.pairs), 'image')} {verb(len(unclear))} an EXIF orientation ({shown}),"
        f" for example {printable(unclear[0][0])}. The sizes do not show whether the masks of these images belong to"
        f" the stored or to the upright pixels.{''.join(hints)} {_EXIF}"
    )


def _refuse_values(found: Survey, classes: Classes, split: str, own: bool) -> None:
    shares, rows = found.shares(split), found.counted[split]
    broken = [path for path, one in rows if one.error or one.shares[UNKNOWN]]
    if shares[IGNORED] and not shares[:UNKNOWN].any() and not broken:
        index = " set data.masks.palette=index if the palette indices are the class ids."
        values = " map the mask values to classes with data.masks.values={VALUE: NAME, …}."
        raise UserError(
            f"No pixel of the {split} masks has a label ({examined(found, split)}). Remove the {split} split, or"
            f"{index if classes.colors else values}"
        )
    if own:
        _refuse_ids(found, classes, split)
    if len(broken) * 2 > len(rows):
        try:
            read_mask(broken[0], classes)
        except UserError as error:
            masks = counted(len(rows), f"{split} mask")
            raise UserError(f"{len(broken)} of {masks} that were examined cannot be used. {error}") from error


def _refuse_ids(found: Survey, classes: Classes, split: str) -> None:
    rows = [one for _, one in found.counted[split] if not one.error and len(one.values)]
    if not rows:
        return
    values = found.values(split)
    unknown = sum(1 for one in rows if one.shares[UNKNOWN])
    outside = [value for value in values if not 0 <= value < 1 << 16]
    if unknown * 2 > len(rows):
        has = f"{unknown} of {counted(len(rows), f'{split} mask')} {verb(unknown)} values"
        if outside:
            raise UserError(
                f"{has} outside of the range 0 to 65535: {_shown(values)}. Save one class id per pixel, or 255 for a"
                " pixel without a label."
            )
        raise UserError(
            f"{has} that belong to no class: {_shown(values)}. The {len(classes.names)} classes have the ids"
            f" {some(list(map(str, classes.ids)))}. Map each value to a class with {_values(values, classes)}, or"
            " ignore a value with data.masks.ignored=[VALUE]."
        )
    _refuse_mixed(rows, classes, split)
    present = np.flatnonzero(found.shares(split)[:UNKNOWN])
    absent = [name for index, name in enumerate(classes.names) if index not in present]
    if classes.chosen or not absent or not len(present):
        return
    unlabeled = values.get(IGNORED, 0)
    binary = split == "train" and set(values) == {0, 1} and len(classes.names) > 2
    single = len(present) == 1 and split == "train"
    suspicious = unlabeled and len(present) <= (2 if split == "train" else 1)
    if not suspicious and not binary and not single:
        return
    seen = f"The {split} masks contain only the values {_shown(values)} ({examined(found, split)})"
    lacking = f"{some(absent, 5)} {verb(len(absent))} no pixels"
    keep = "data.masks.values=ids"
    if unlabeled:
        fewer = ""
        if 2 <= len(values) < len(classes.names):
            fewer = f" and 'data.masks.classes=[{', '.join(map(quoted, classes.names[: len(values)]))}]'"
        raise UserError(
            f"{seen}. Pixels with the value 255 have no label, so {lacking}. If 255 is a class, map the values to"
            f" classes with {_values(values, classes)}{fewer}. Otherwise, set {keep}."
        )
    name = classes.names[int(present[0])]
    if single:
        raise UserError(
            f"{seen}. Every pixel belongs to the class {name}, and {lacking}. Check the masks. If the masks are"
            f" correct, set {keep}."
        )
    two = ", ".join(map(quoted, classes.names[:2]))
    raise UserError(
        f"{seen}, but the data set has {len(classes.names)} classes, and {lacking}. If the data set has only two"
        f" classes, set 'data.masks.classes=[{two}]'. If the masks are correct, set {keep}."
    )


def _refuse_mixed(rows: Sequence[Counted], classes: Classes, split: str) -> None:
    """Raise `UserError` if some masks of two classes contain 0 and 1, and others contain 0 and 255."""
    values = [set(one.values.tolist()) for one in rows]
    ones, whites = sum(1 in one for one in values), values.count({0, IGNORED})
    if classes.chosen or classes.ids != (0, 1) or not ones or not whites or set().union(*values) != {0, 1, IGNORED}:
        return
    if any({1, IGNORED} <= one for one in values):
        return  # 255 marks unlabeled borders
    first, second = map(quoted, classes.names)
    raise UserError(
        f"Of {len(rows)} examined {split} masks, {ones} {verb(ones, 'contains', 'contain')} the value 1, and {whites}"
        f" {verb(whites, 'contains', 'contain')} only the values 0 and 255. No mask contains both 1 and 255. Pixels"
        f" with the value 255 have no label, so masks with 0 and 255 contain no pixels of {classes.names[1]}. If 1 and"
        f" 255 both denote {classes.names[1]}, set 'data.masks.values={{0: {first}, 1: {second}, 255: {second}}}'."
        " Otherwise, set data.masks.values=ids."
    )


def _shown(values: Mapping[int, int]) -> str:
    total = max(sum(values.values()), 1)
    order = sorted(sorted(values, key=lambda value: -values[value])[:6])
    listed = [f"{value} ({format_percent(values[value] / total)} of the pixels)" for value in order]
    return ", ".join(listed) + and_more(len(values) - len(order))


def _values(values: Mapping[int, int], classes: Classes) -> str:
    order = sorted(values)
    if len(order) > max(len(classes.names), 2) or len(order) > 8:
        return "data.masks.values={VALUE: NAME, …}"
    names = [*classes.names, *["void"] * len(order)]
    pairs = ", ".join(f"{value}: {quoted(name)}" for value, name in zip(order, names, strict=False))
    return f"'data.masks.values={{{pairs}}}'"
