"""Survey masks before training: read their headers, and decode some, to reject ambiguous data."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import TYPE_CHECKING, Any

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.inspection import DECODED, HEADERS, in_threads, spread
from efficient_ft.data.mask_pixels import Header, read_header, read_pixels, stored_size
from efficient_ft.data.masks import UNKNOWN, Classes, MaskSamples, read_mask

if TYPE_CHECKING:
    from efficient_ft.config.schema import MaskConfig

#: Maximum number of pixels that a quick survey decodes: fewer masks are decoded if they are large.
_PIXELS = 30_000_000
#: Maximum number of masks decoded to find a second class.
_SEARCHED = 512


@dataclass(frozen=True)
class Counted:
    """The pixel counts of a decoded mask.

    Attributes:
        mode: Pillow's mode.
        values: distinct ids; empty for color masks.
        counts: number of pixels of each id.
        shares: int64 (256,), number of pixels by class index, including `IGNORED` and `UNKNOWN`.
        error: the reason why the mask cannot be read; empty if it can be read.
    """

    mode: str
    values: np.ndarray
    counts: np.ndarray
    shares: np.ndarray
    error: str = ""


@dataclass
class Survey:
    """Headers and counted pixels of the masks of a data set, by split.

    Attributes:
        headers: (path of the image, path of the mask, header of the mask, size and orientation of the image).
        counted: (path, pixels) of the decoded masks.
        totals: number of masks.
    """

    headers: dict[str, list[tuple[str, str, Header | None, tuple[tuple[int, int], int] | None]]] = field(
        default_factory=dict
    )
    counted: dict[str, list[tuple[str, Counted]]] = field(default_factory=dict)
    totals: dict[str, int] = field(default_factory=dict)

    def shares(self, *splits: str) -> np.ndarray:
        """Return the number of pixels by class index, int64 (256,), over the given splits, or over all splits."""
        found = [one.shares for split in splits or self.counted for _, one in self.counted.get(split, ())]
        return np.sum(found, axis=0) if found else np.zeros(256, dtype=np.int64)

    def values(self, split: str) -> dict[int, int]:
        """Return the number of pixels by id."""
        found: dict[int, int] = {}
        for _, one in self.counted[split]:
            for value, count in zip(one.values.tolist(), one.counts.tolist(), strict=True):
                found[value] = found.get(value, 0) + count
        return found


def survey(
    parts: Mapping[str, MaskSamples],
    classes: Classes,
    thorough: bool = False,
    progress: Callable[[Iterable[Any], int], Iterable[Any]] = lambda items, total: items,
) -> Survey:
    """Read headers and decode masks; a large data set is sampled evenly.

    Args:
        parts: images and masks by split.
        classes: classes of the data set.
        thorough: read all headers and masks.
        progress: wraps an iterable with a given total to show progress.
    """
    found = Survey(totals={split: len(part) for split, part in parts.items()})
    whole = sum(found.totals.values())
    for split, part in parts.items():
        size = len(part)
        count = size if thorough else max(HEADERS * size // max(whole, 1), 1)
        chosen = [(part.images[i], part.masks[i]) for i in spread(size, count)]
        found.headers[split] = list(in_threads(_headers, chosen))
        pixels = max((np.prod(header.size) for *_, header, _ in found.headers[split] if header), default=1)
        count = int(min(DECODED if split == "train" else DECODED // 4, max(_PIXELS // max(pixels, 1), 4)))
        decoded = [part.masks[i] for i in spread(size, size if thorough else count)]
        results = progress(in_threads(lambda path: counted_mask(path, classes), decoded), len(decoded))
        found.counted[split] = list(zip(decoded, results, strict=True))
    return found


def _headers(pair: tuple[str, str]) -> tuple[str, str, Header | None, tuple[tuple[int, int], int] | None]:
    image, mask = pair
    return image, mask, _header(mask, _stamp(mask)), _stored(image, _stamp(image))


def _stamp(path: str) -> int:
    try:
        return os.stat(path).st_mtime_ns
    except OSError:
        return 0


@lru_cache(maxsize=4 * HEADERS)
def _stored(path: str, _stamp: int) -> tuple[tuple[int, int], int] | None:
    return stored_size(path)


@lru_cache(maxsize=4 * HEADERS)
def _header(path: str, _stamp: int) -> Header | None:
    try:
        return read_header(path)
    except UserError:  # reported where the mask is read
        return None


def counted_mask(path: str, classes: Classes) -> Counted:
    """Decode a mask and count its pixels."""
    return _counted(path, _stamp(path), classes)


@lru_cache(maxsize=1024)
def _counted(path: str, _stamp: int, classes: Classes) -> Counted:
    none = np.zeros(0, dtype=np.int64)
    try:
        pixels = read_pixels(path)
        values, by_color = classes.values(pixels)
    except UserError as error:
        return Counted("", none, none, np.zeros(256, dtype=np.int64), str(error))
    except ValueError:
        return Counted(pixels.mode, none, none, np.zeros(256, dtype=np.int64), "colors")
    shares = np.bincount(classes.indices(values, by_color).ravel(), minlength=256)
    if by_color:
        return Counted(pixels.mode, none, none, shares)
    if values.size and values.min() >= 0 and values.max() < 1 << 16:
        counts = np.bincount(values.ravel())
        present = np.flatnonzero(counts)
        return Counted(pixels.mode, present, counts[present], shares)
    present, counts = np.unique(values, return_counts=True)
    return Counted(pixels.mode, present, counts, shares)


def mask_orientation(image: str, mask: str, exif: str) -> int:
    """Return the EXIF orientation to apply to a mask; 1 if the mask is already upright.

    Args:
        image: path of the image.
        mask: path of its mask.
        exif: the setting ``data.masks.exif``.

    Raises:
        UserError: the sizes do not show whether the mask belongs to the upright image or to its stored pixels.
    """
    stored = stored_size(image)
    if stored is None or stored[1] == 1 or exif == "upright":
        return 1
    if exif == "raw":
        return stored[1]
    reading = _orientation_by_size(stored, read_header(mask).size)
    if reading is None:
        raise UserError(
            f"{printable(image)} has the EXIF orientation {stored[1]}, but the sizes do not show whether its mask"
            f" belongs to the stored or the upright pixels. {_EXIF}"
        )
    return stored[1] if reading == "raw" else 1


_EXIF = (
    "Set data.masks.exif=upright if masks were drawn on the images as viewers show them, or data.masks.exif=raw if they"
    " were drawn on the stored pixels (cv2.IMREAD_IGNORE_ORIENTATION, PIL without exif_transpose)."
)


def _orientation_by_size(stored: tuple[tuple[int, int], int], mask: tuple[int, int]) -> str | None:
    """Return ``raw`` or ``upright`` for an image with an orientation; None if the sizes do not decide."""
    (width, height), orientation = stored
    if orientation < 5 or width == height:
        return None if mask == (width, height) else "upright"  # a different size is reported when the mask is read
    return "raw" if mask == (width, height) else "upright"


def orientations(found: Survey) -> dict[str, int]:
    """Count images with an EXIF orientation by the orientation of their masks: ``raw``, ``upright``, ``unclear``."""
    counts: dict[str, int] = {}
    for rows in found.headers.values():
        for _, _, header, stored in rows:
            if stored is not None and stored[1] != 1 and header is not None:
                key = _orientation_by_size(stored, header.size) or "unclear"
                counts[key] = counts.get(key, 0) + 1
    return counts


def refuse_unclear_masks(parts: Mapping[str, MaskSamples], classes: Classes, settings: MaskConfig, own: bool) -> None:
    """Reject ambiguous masks.

    Args:
        parts: images and masks by split.
        classes: classes of the data set.
        settings: mask settings.
        own: True for a user's own folder; the values of published data sets are not ambiguous.

    Raises:
        UserError: masks are ambiguous; the message lists the values found and the settings that choose a reading.
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
            # A small sample often lacks a class: examine more masks before rejecting the data.
            wider = [part.masks[i] for i in spread(len(part), _SEARCHED)]
            found.counted[split] = [
                (path, one)
                for path, one in zip(wider, in_threads(lambda p: counted_mask(p, classes), wider), strict=True)
            ]
            _refuse_values(found, classes, split, own)


def examined(found: Survey, *splits: str) -> str:
    """Return the number of decoded masks as text."""
    chosen = splits or tuple(found.counted)
    count, total = (sum(len(found.counted[s]) for s in chosen), sum(found.totals[s] for s in chosen))
    return (
        f"{'all ' * (total > 1)}{counted(total, 'mask')} decoded"
        if count == total
        else f"{count} of {total} masks decoded"
    )


def _refuse_palettes(found: Survey, classes: Classes) -> None:
    """Reject palettes that give one index several colors, if indices are ids."""
    if classes.palette == "index" or (classes.colors and classes.palette != "index"):
        return
    entries = [value for value in classes.ids if value < 256]
    first: tuple[str, np.ndarray] | None = None
    every = [row for rows in found.headers.values() for row in rows]
    total = sum(1 for *_, header, _ in every if header and header.palette is not None)
    for _, mask, header, _ in every:
        if header is None or header.palette is None:
            continue
        if first is None:
            first = mask, header.palette
            continue
        shared = [e for e in entries if e < min(len(first[1]), len(header.palette))]
        differs = (first[1][shared] != header.palette[shared]).any(-1)
        if differs.any():
            at = shared[int(np.argmax(differs))]
            one, two = (" ".join(map(str, palette[at].tolist())) for palette in (first[1], header.palette))
            raise UserError(
                f"The palettes of the masks differ: index {at} is the color {one} in {printable(first[0])}, and"
                f" {two} in {printable(mask)} ({total} palettes compared, {sum(found.totals.values())} masks). Set"
                " data.masks.palette=index if the indices are the class ids. To map the masks by color, add the colors"
                " to classes.txt ('NAME RED GREEN BLUE'), or set data.masks.colors={NAME: [RED, GREEN, BLUE], …}."
            )


def _refuse_gray_palettes(found: Survey, classes: Classes) -> None:
    """Reject gray palettes whose indices differ from their gray values, if both could be ids."""
    if classes.palette != "auto" or classes.colors:
        return
    palettes = {
        mask: header.palette
        for rows in found.headers.values()
        for _, mask, header, _ in rows
        if header is not None and header.palette is not None
    }
    for path, one in (row for rows in found.counted.values() for row in rows):
        palette = palettes.get(path)
        if palette is None or not len(one.values) or one.values[-1] >= len(palette):
            continue
        used = palette[one.values]
        grays = used[:, 0].astype(np.int64)
        differs = grays != one.values
        if (used == used[:, :1]).all() and differs.any() and set(grays.tolist()) <= set(classes.ids):
            at = int(np.argmax(differs))
            raise UserError(
                f"The gray palette of {printable(path)} is ambiguous: index {one.values[at]} is the gray value"
                f" {grays[at]}, and both are class ids. Set data.masks.palette=index if the indices are the ids, or"
                " save the masks without a palette."
            )


def _refuse_orientations(found: Survey) -> None:
    counts = orientations(found)
    if not counts.get("unclear"):
        return
    rows = [row for rows in found.headers.values() for row in rows]
    unclear = [
        (image, stored[1])
        for image, _, header, stored in rows
        if stored and header and stored[1] != 1 and _orientation_by_size(stored, header.size) is None
    ]
    shown = ", ".join(sorted({str(orientation) for _, orientation in unclear}))
    hints = [
        f" The masks of {counted(counts[kind], 'other image')} have the size of the {words}."
        for kind, words in (("raw", "stored pixels"), ("upright", "upright image"))
        if counts.get(kind)
    ]
    raise UserError(
        f"{len(unclear)} of {counted(len(rows), 'image')} {verb(len(unclear))} an EXIF orientation ({shown}), such as"
        f" {printable(unclear[0][0])},"
        " but the sizes do not show whether their masks belong to the stored or the upright pixels."
        f"{''.join(hints)} {_EXIF}"
    )


def _refuse_values(found: Survey, classes: Classes, split: str, own: bool) -> None:
    """Reject masks without labels, and ids that suggest a different reading."""
    shares = found.shares(split)
    unread = sum(1 for _, one in found.counted[split] if one.error or one.shares[UNKNOWN])
    if shares[IGNORED] and not shares[:UNKNOWN].any() and not unread:
        index = " set data.masks.palette=index if its indices are the class ids."
        values = " map its values to classes: data.masks.values={VALUE: NAME, …}."
        raise UserError(
            f"No pixel of the {split} masks has a label ({examined(found, split)}). Remove the {split} split, or"
            f"{index if classes.colors else values}"
        )
    if own:
        _refuse_ids(found, classes, split)
    rows = found.counted[split]
    broken = [path for path, one in rows if one.error or one.shares[UNKNOWN]]
    if len(broken) * 2 > len(rows):
        try:
            read_mask(broken[0], classes)
        except UserError as error:
            raise UserError(
                f"{len(broken)} of {counted(len(rows), f'{split} mask')} examined cannot be used. {error}"
            ) from error


def _refuse_ids(found: Survey, classes: Classes, split: str) -> None:
    """Reject masks with values without a class, and masks that lack classes because of their values."""
    rows = [one for _, one in found.counted[split] if not one.error and len(one.values)]
    if not rows:
        return
    unknown = sum(1 for one in rows if one.shares[UNKNOWN])
    outside = [value for value in found.values(split) if not 0 <= value < 1 << 16]
    if outside and unknown * 2 > len(rows):
        raise UserError(
            f"{unknown} of {counted(len(rows), f'{split} mask')} {verb(unknown)} values outside of 0 to 65535:"
            f" {_shown(found.values(split))}. Save them with one class id per pixel, and 255 where there is no label."
        )
    if unknown * 2 > len(rows):
        raise UserError(
            f"{unknown} of {counted(len(rows), f'{split} mask')} {verb(unknown)} values without a class:"
            f" {_shown(found.values(split))}. The"
            f" {len(classes.names)} classes have the ids {_few(classes.ids)}. Map each value to a class:"
            f" {_values(found.values(split), classes)}, or ignore a value: data.masks.ignored=[VALUE]."
        )
    _refuse_mixed(rows, classes, split)
    present = np.flatnonzero(found.shares(split)[:UNKNOWN])
    absent = [name for index, name in enumerate(classes.names) if index not in present]
    values = found.values(split)
    if classes.chosen or not absent or not len(present):
        return
    unlabeled = values.get(IGNORED, 0)
    binary = split == "train" and set(values) == {0, 1} and len(classes.names) > 2
    single = len(present) == 1 and split == "train"
    suspicious = unlabeled and len(present) <= (2 if split == "train" else 1)
    if not suspicious and not binary and not single:
        return
    seen = f"The {split} masks contain only the values {_shown(values)} ({examined(found, split)})"
    lacking = f"{_names(absent)} {verb(len(absent))} no pixels"
    keep = "data.masks.values=ids"
    if unlabeled:
        raise UserError(
            f"{seen}. Pixels of value 255 have no label, so {lacking}. If 255 is a class, map the values:"
            f" {_values(values, classes)}{_fewer(values, classes)}. If not, set {keep}."
        )
    name = classes.names[int(present[0])]
    if single:
        raise UserError(
            f"{seen}: every pixel is {name}, and {lacking}. Check the masks. To train on them unchanged, set {keep}."
        )
    two = ", ".join(map(_quoted, classes.names[:2]))
    raise UserError(
        f"{seen}, but the data set has {len(classes.names)} classes: {lacking}. If it has two classes, name them:"
        f" 'data.masks.classes=[{two}]'. If these masks are right, set {keep}."
    )


def _refuse_mixed(rows: Sequence[Counted], classes: Classes, split: str) -> None:
    """Refuse masks of two classes of which some are drawn with 0 and 1, and the others with 0 and 255."""
    held = [set(one.values.tolist()) for one in rows]
    ones, whites = sum(1 in values for values in held), held.count({0, IGNORED})
    if classes.chosen or classes.ids != (0, 1) or not ones or not whites or set().union(*held) != {0, 1, IGNORED}:
        return
    if any({1, IGNORED} <= values for values in held):
        return  # borders without a label
    names = [_quoted(name) for name in classes.names]
    raise UserError(
        f"Of {len(rows)} {split} masks examined, {ones} {verb(ones, 'holds', 'hold')} the value 1, and {whites}"
        f" {verb(whites, 'holds', 'hold')} 0 and 255; none holds both"
        f" 1 and 255. As 255 means no label, {classes.names[1]} has no pixel in the latter. If both are"
        f" {classes.names[1]}: 'data.masks.values={{0: {names[0]}, 1: {names[1]}, 255: {names[1]}}}'; if pixels of 255"
        " have no label: data.masks.values=ids."
    )


def _names(names: Sequence[str]) -> str:
    return ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")


def _few(values: Sequence[int]) -> str:
    return ", ".join(map(str, values[:6])) + (", …" if len(values) > 6 else "")


def _shown(values: Mapping[int, int]) -> str:
    """Return values with their shares of the pixels, as text."""
    total = max(sum(values.values()), 1)
    order = sorted(sorted(values, key=lambda value: -values[value])[:6])
    listed = [f"{value} ({format_percent(values[value] / total)} of the pixels)" for value in order]
    more = f" and {len(values) - len(order)} more" if len(values) > len(order) else ""
    return ", ".join(listed) + more


def _values(values: Mapping[int, int], classes: Classes) -> str:
    """Return the setting that maps the values found to classes in order."""
    order = sorted(values)
    if len(order) > max(len(classes.names), 2) or len(order) > 8:
        return "data.masks.values={VALUE: NAME, …}"
    names = [*classes.names, *["void"] * len(order)]
    pairs = ", ".join(f"{value}: {_quoted(name)}" for value, name in zip(order, names, strict=False))
    return f"'data.masks.values={{{pairs}}}'"


def _fewer(values: Mapping[int, int], classes: Classes) -> str:
    """Return the setting that leaves out the classes without values."""
    if len(values) >= len(classes.names) or len(values) < 2:
        return ""
    return f" with 'data.masks.classes=[{', '.join(map(_quoted, classes.names[: len(values)]))}]'"


def _quoted(name: str) -> str:
    if re.fullmatch(r"[A-Za-z][\w.-]*", name, re.ASCII):
        return name
    escaped = name.replace('"', '\\"')
    return f'"{escaped}"'
