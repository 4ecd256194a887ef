"""Inspect image data sets: sizes, modes, values and frames; a thorough inspection also finds duplicates."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image
from tqdm import tqdm

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.images import Decoding, gray_values, has_16_bits, opened, to_rgb
from efficient_ft.data.inspection import DECODED, HEADERS, Inspection, decoding_threads, in_threads, spread
from efficient_ft.data.listing import Samples
from efficient_ft.data.near_duplicates import near_pairs, thumbnail
from efficient_ft.data.splits import some

#: Maximum number of pixels that a quick inspection decodes, and number of images that it decodes in any case.
PIXELS, _FIRST = 16_000_000, 4
#: Factor of enlargement above which a warning is issued.
_ENLARGED = 4.0
#: Suggested upper ends of the range, if all stored values are in its lowest quarter.
_DEPTHS = (255, 1023, 4095, 16383)
#: Maximum number of recorded groups of duplicates, and of paths in each; of images compared for near-duplicates.
_GROUPS, _PATHS, _COMPARED = 100, 5, 50_000
_GRAY = ("1", "L", "LA", "La", "F")
_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "jfif": "JPEG", "tif": "TIFF", "pgm": "PPM", "jp2": "JPEG2000",
            "j2k": "JPEG2000", "j2c": "JPEG2000", "jpf": "JPEG2000", "jpx": "JPEG2000", "heic": "HEIF",
            "hif": "HEIF"}  # fmt: skip


#: Names of masks in the folder of their images.
_MASK = re.compile(r"(.+)[ _-](?:mask|masks|seg|segmentation|gt|label|labels|annotation)(?:[ _-]?\d+)?", re.IGNORECASE)


@dataclass
class _Place:
    """A sample in a data set."""

    split: str
    index: int
    label: int
    path: str


@dataclass
class _Seen:
    """The properties of one image. The fields after `error` describe its pixels, if it was decoded."""

    size: tuple[int, int] = (0, 0)
    mode: str = ""
    format: str = ""
    deep: bool = False
    frames: bool = False
    error: str | None = None
    decoded: bool = False
    values: tuple[float, float] = (0, 0)
    constant: bool = False
    stored: tuple[float, float] | None = None
    clipped: float = 0.0
    digest: bytes = b""
    thumbnail: np.ndarray | None = None


def inspect_images(
    parts: Mapping[str, Samples],
    class_names: Sequence[str],
    input: InputSpec,
    decoding: Decoding | None = None,
    *,
    thorough: bool = False,
) -> Inspection:
    """Inspect the images of a data set.

    Args:
        parts: the samples by split.
        class_names: class names by label.
        input: the network's input; small images are compared with its size.
        decoding: options for decoding files; None for the default.
        thorough: decode every image, and search for unreadable files and duplicates; otherwise inspect an evenly
            spread sample.
    """
    decoding, found = decoding or Decoding(), Inspection()
    total = sum(len(part) for part in parts.values())
    places = _places(parts, np.arange(total) if thorough else spread(total, HEADERS))

    def look(place: _Place, decode: bool) -> _Seen:
        part = parts[place.split]
        if isinstance(part.images, np.ndarray):
            return _seen_pixels(part.images[place.index], thorough)
        return _seen_file(place.path, decoding, decode, thorough)

    if thorough:
        progress = tqdm(places, desc="reading images", leave=False, disable=None)
        seen = list(in_threads(lambda place: look(place, True), progress))
    else:
        seen = list(in_threads(lambda place: look(place, False), places))
        chosen = _to_decode(seen)
        largest = max((width * height for width, height in (seen[i].size for i in chosen)), default=0)
        threads = decoding_threads(largest, PIXELS)
        for i, one in zip(chosen, in_threads(lambda i: look(places[i], True), chosen, threads), strict=True):
            seen[i] = one
    found.problems = {place.path: one.error for place, one in zip(places, seen, strict=True) if one.error is not None}
    if found.problems and not thorough:
        why = next(iter(found.problems.values()))
        found.warnings.append(
            f"Cannot read {len(found.problems):,} of {counted(len(places), 'inspected file')}. Example: {why}"
            " Set data.on_corrupt=skip to skip such files."
        )
    _report_masks(found, places)
    pairs = [(place, one) for place, one in zip(places, seen, strict=True) if one.error is None]
    if pairs:
        _report_sizes(found, pairs, total, input)
        _report_values(found, pairs, decoding)
        _report_files(found, pairs)
    _report_classes(found, parts, class_names)
    if thorough:
        _report_duplicates(found, pairs, class_names)
        _report_near_duplicates(found, pairs, class_names)
    return found


def _places(parts: Mapping[str, Samples], chosen: np.ndarray) -> list[_Place]:
    """Return the samples at the given indices into the concatenated splits."""
    ends = np.cumsum([len(part) for part in parts.values()])
    names = list(parts)
    places = []
    for i in chosen.tolist():
        k = int(np.searchsorted(ends, i, side="right"))
        index = i - (int(ends[k - 1]) if k else 0)
        part = parts[names[k]]
        path = f"image {index} of {names[k]}" if isinstance(part.images, np.ndarray) else part.images[index]
        places.append(_Place(names[k], index, int(part.labels[index]), path))
    return places


def _to_decode(seen: Sequence[_Seen]) -> list[int]:
    """Return the indices of the images to decode: evenly spread, with a limited number of pixels."""
    readable = [i for i, one in enumerate(seen) if one.error is None and not one.decoded]
    chosen: list[int] = []
    pixels = 0
    for k in spread(len(readable), DECODED).tolist() if readable else []:
        width, height = seen[readable[k]].size
        if len(chosen) < _FIRST or pixels + width * height <= PIXELS:
            chosen.append(readable[k])
            pixels += width * height
    return chosen


def _seen_file(path: str, decoding: Decoding, decode: bool, thorough: bool) -> _Seen:
    found = _Seen()
    try:
        with opened(path, decoding) as image:
            found.size, found.mode = image.size, image.mode
            found.format = "JPEG" if image.format == "MPO" else image.format or ""
            found.deep = has_16_bits(image)
            if decode:
                _decode(image, found, decoding, thorough)
        if found.format != "JPEG":
            with opened(path, decoding) as image, contextlib.suppress(Exception):
                found.frames = bool(getattr(image, "is_animated", False))
    except UserError as error:
        found.error = str(error)
    return found


def _decode(image: Image.Image, found: _Seen, decoding: Decoding, thorough: bool) -> None:
    rgb = to_rgb(image, decoding)
    raw = gray_values(image)
    extrema: Any = rgb.getextrema()
    found.decoded, found.values = True, (min(low for low, _ in extrema), max(high for _, high in extrema))
    found.constant = all(low == high for low, high in extrema)
    if raw is not None and raw.size:
        found.stored = float(raw.min()), float(raw.max())
        if decoding.value_range is not None:
            low, high = decoding.value_range
            found.clipped = float(((raw < low) | (raw > high)).mean())
    if thorough:
        found.digest, found.thumbnail = _digest(np.asarray(rgb)), thumbnail(rgb)


def _seen_pixels(pixels: np.ndarray, thorough: bool) -> _Seen:
    low, high = float(pixels.min()), float(pixels.max())
    constant = bool((pixels == pixels[:1, :1]).all())
    gray = pixels.ndim == 2 or bool((pixels == pixels[..., :1]).all())
    found = _Seen((pixels.shape[1], pixels.shape[0]), "L" if gray else "RGB", decoded=True, constant=constant)
    found.values = low, high
    if thorough:
        found.digest, found.thumbnail = _digest(pixels), thumbnail(Image.fromarray(pixels).convert("RGB"))
    return found


def _digest(pixels: np.ndarray) -> bytes:
    found = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    found.update(np.ascontiguousarray(pixels).data)
    return found.digest()


_Pairs = Sequence[tuple[_Place, _Seen]]


def _where(pairs: _Pairs, test: Callable[[_Seen], bool]) -> list[str]:
    """Return the paths of the images that pass a test."""
    return [printable(place.path) for place, one in pairs if test(one)]


def _example(paths: Sequence[str]) -> str:
    return paths[0] if len(paths) == 1 else f"{paths[0]} and {len(paths) - 1:,} more"


def _report_sizes(found: Inspection, pairs: _Pairs, total: int, input: InputSpec) -> None:
    """Report sizes, modes, values, and the number of inspected images."""
    sizes = sorted((one.size for _, one in pairs), key=lambda size: (size[0] * size[1], size))
    low, middle, high = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    modes = Counter(one.mode for _, one in pairs)
    decoded = [one for _, one in pairs if one.decoded]
    found.facts["sizes"] = {"min": list(low), "median": list(middle), "max": list(high)}
    found.facts["modes"] = dict(modes.most_common())
    found.facts |= {"examined": len(pairs), "decoded": len(decoded), "samples": total}
    shown = f"{_by(low)} to {_by(high)} (median {_by(middle)})" if low != high else _by(low)
    kinds = ", ".join(modes) if len(modes) == 1 else ", ".join(f"{m} ×{n:,}" for m, n in modes.most_common(4))
    line = f"images: {shown}, {kinds}"
    if decoded:
        values = min(one.values[0] for one in decoded), max(one.values[1] for one in decoded)
        found.facts["values"] = list(values)
        line += f"; values {values[0]:g}–{values[1]:g}"
    found.lines.append(line)
    if len(decoded) + len(found.problems) < total:
        headers = f", {len(pairs):,} headers read" if len(pairs) > len(decoded) else ""
        found.lines.append(f"sampled: {len(decoded):,} of {counted(total, 'image')} decoded{headers}")
    gray = sum(count for mode, count in modes.items() if mode in _GRAY or mode.startswith("I"))
    if 0.01 <= gray / len(pairs) <= 0.99:
        found.warnings.append(
            f"Gray and color images are mixed: {gray:,} of {counted(len(pairs), 'image')} {verb(gray, 'is', 'are')}"
            " gray."
        )
    height, width = input.image_size
    factor = min(height / middle[1], width / middle[0])
    if factor > _ENLARGED:
        found.warnings.append(
            f"Images are enlarged ×{factor:.3g}, from a median of {_by(middle)} to the input size"
            f" {_by((width, height))}. A smaller model.image_size reduces the cost."
        )


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"


def _report_values(found: Inspection, pairs: _Pairs, decoding: Decoding) -> None:
    """Report pixel values: a small part of the range, clipped values, and images of a single color."""
    decoded = [(place, one) for place, one in pairs if one.decoded]
    if not decoded:
        return
    deep = [one for _, one in decoded if one.stored is not None]
    brightest = max(one.values[1] for _, one in decoded)
    advice = ""
    if deep:
        low = min(one.stored[0] for one in deep if one.stored)
        high = max(one.stored[1] for one in deep if one.stored)
        found.facts["stored_values"] = [low, high]
        if decoding.value_range is None and low >= 0 and high <= _DEPTHS[-1]:
            most = next(depth for depth in _DEPTHS if high <= depth)
            advice = f" Set 'data.value_range=[0,{most}]'."
            found.warnings.append(
                f"Gray images with more than 8 bits ({len(deep):,} decoded) have a maximum value of {high:g}, so they"
                f" become dark.{advice}"
            )
        dark = [one.stored[1] for one in deep if one.stored and one.stored[1] <= _DEPTHS[-1]]
        if decoding.value_range is None and low >= 0 and not advice and len(dark) * 2 > len(deep):
            most = next(depth for depth in _DEPTHS if max(dark) <= depth)
            found.warnings.append(
                f"Of {len(deep):,} decoded gray images of more than 8 bits, {len(dark):,} {verb(len(dark))} values up"
                f" to {max(dark):g} only, so they are dark. If the others are of another source, rescale them, and set"
                f" 'data.value_range=[0,{most}]'."
            )
        clipped = float(np.mean([one.clipped for one in deep]))
        if clipped > 0.01:
            assert decoding.value_range is not None
            shown = ", ".join(f"{value:g}" for value in decoding.value_range)
            found.warnings.append(
                f"{format_percent(clipped)} of the gray values ({low:g} to {high:g}) are outside of"
                f" data.value_range=[{shown}]."
            )
    elif decoding.value_range is not None:
        found.warnings.append("data.value_range has no effect: no gray image with more than 8 bits was found.")
    if brightest < 64 and not advice:
        color = sum(one.deep for _, one in decoded if one.stored is None)
        why = f" {color:,} of them store 16-bit colors, which are read with 8 bits: rescale the files." if color else ""
        found.warnings.append(
            f"The images are dark: the maximum value of {counted(len(decoded), 'decoded image')} is {brightest:g} of"
            " 255." + why
        )
    became = _where(decoded, lambda one: one.constant and one.stored is not None and one.stored[0] < one.stored[1])
    if became:
        found.warnings.append(
            f"Scaling to 8 bits leaves a single color in {len(became):,} of {counted(len(decoded), 'decoded image')}:"
            f" {_example(became)}.{advice or ' Set data.value_range to their range.'}"
        )
    single = _where(decoded, lambda one: one.constant and (one.stored is None or one.stored[0] == one.stored[1]))
    found.facts["single_color"] = len(single) + len(became)
    if single:
        found.warnings.append(
            f"A single color fills {len(single):,} of {counted(len(decoded), 'decoded image')}: {_example(single)}."
        )


def _report_masks(found: Inspection, places: Sequence[_Place]) -> None:
    """Images named like the mask of another one in their folder, which train as images of their class."""
    masks = []
    for path in (place.path for place in places if place.path):
        stem, extension = os.path.splitext(path)
        named = _MASK.fullmatch(stem)
        if named and any(os.path.isfile(named[1] + one) for one in dict.fromkeys([extension, ".jpg", ".png", ".tif"])):
            masks.append(path)
    found.facts["masks_among_images"] = len(masks)
    if masks:
        found.warnings.append(
            f"Of {counted(len(places), 'image')}, {len(masks):,} {verb(len(masks), 'is', 'are')} named like the mask"
            " of another image, such as"
            f" {printable(masks[0])}. They are used as images of their class; if they are masks, move them away."
        )


def _report_files(found: Inspection, pairs: _Pairs) -> None:
    """Report formats, extensions that do not match them, and files with several frames."""
    formats = Counter(one.format for _, one in pairs if one.format)
    if not formats:
        return
    found.facts["formats"] = dict(formats.most_common())
    differs = [
        f"{printable(place.path)} is {one.format}"
        for place, one in pairs
        if one.format and _format_of(place.path) not in ("", one.format)
    ]
    found.facts["extension_differs"] = len(differs)
    if differs:
        found.lines.append(
            f"{counted(len(differs), 'file')} {verb(len(differs))} an extension of another format: {_example(differs)}"
        )
    several = _where(pairs, lambda one: one.frames)
    found.facts["several_frames"] = len(several)
    if several:
        found.warnings.append(
            f"{counted(len(several), 'file')} {verb(len(several))} several frames or pages; only the first is used:"
            f" {_example(several)}."
        )


def _format_of(path: str) -> str:
    extension = os.path.splitext(path)[1][1:].lower()
    return _FORMATS.get(extension, extension.upper())


def _report_classes(found: Inspection, parts: Mapping[str, Samples], class_names: Sequence[str]) -> None:
    """Report classes with too few images."""
    counts = {split: np.bincount(part.labels, minlength=len(class_names)) for split, part in parts.items()}
    if "train" in counts:
        train = counts["train"]
        if train.min() > 0:
            found.facts["imbalance"] = round(float(train.max() / train.min()), 2)
        few = [class_names[label] for label in np.flatnonzero(train == 1).tolist()]
        if few:
            found.warnings.append(f"{_classes(few)} a single training image: {_names(few)}.")
    for split in ("val", "test"):
        if split in counts:
            without = [class_names[label] for label in np.flatnonzero(counts[split] == 0).tolist()]
            if without:
                found.warnings.append(f"{_classes(without)} no {split} image: {_names(without)}.")


def _classes(names: Sequence[str]) -> str:
    return "One class has" if len(names) == 1 else f"{len(names):,} classes have"


def _names(names: Sequence[str]) -> str:
    return some([repr(name) for name in names], 5)


def _report_duplicates(found: Inspection, pairs: _Pairs, class_names: Sequence[str]) -> None:
    """Report images with equal pixels, in particular across splits and across classes."""
    groups: dict[bytes, list[_Place]] = defaultdict(list)
    for place, one in pairs:
        groups[one.digest].append(place)
    several = [group for group in groups.values() if len(group) > 1]
    labels = [group for group in several if len({place.label for place in group}) > 1]
    across = [group for group in several if len({place.split for place in group}) > 1]
    found.facts["duplicates"] = {
        "groups": len(several),
        "across_splits": len(across),
        "across_classes": len(labels),
        "examples": [[printable(place.path) for place in group[:_PATHS]] for group in several[:_GROUPS]],
    }
    if several:
        extra = sum(len(group) - 1 for group in several)
        found.lines.append(f"duplicates: {extra:,} of {counted(len(pairs), 'image')}, compared by pixels")
    for same, words in (across, "in several splits"), (labels, "with several labels"):
        if same:
            places = [f"{printable(place.path)} ({place.split}, {class_names[place.label]})" for place in same[0][:3]]
            found.warnings.append(
                f"{counted(len(same), 'image')} {verb(len(same), 'occurs', 'occur')} {words}, such as"
                f" {' = '.join(places)}."
            )


def _report_near_duplicates(found: Inspection, pairs: _Pairs, class_names: Sequence[str]) -> None:
    """Report almost equal images, in particular in different splits and with different labels."""
    decoded = [(place, one, one.thumbnail) for place, one in pairs if one.thumbnail is not None]
    chosen = [decoded[i] for i in spread(len(decoded), _COMPARED)]
    if len(chosen) < len(decoded):
        found.lines.append(f"near-duplicates: {len(chosen):,} of {len(decoded):,} images compared")
    images: dict[str, set[int]] = {"": set(), "in different splits": set(), "with different labels": set()}
    examples: dict[str, list[tuple[_Place, _Place]]] = defaultdict(list)
    for i, j in near_pairs([small for *_, small in chosen], [one.size for _, one, _ in chosen]):
        (first, one, _), (second, other, _) = chosen[i], chosen[j]
        if one.digest == other.digest:
            continue
        for words, differs in (
            ("", True),
            ("in different splits", first.split != second.split),
            ("with different labels", first.label != second.label),
        ):
            if differs:
                images[words] |= {i, j}
                if len(examples[words]) < _GROUPS:
                    examples[words].append((first, second))
    found.facts["near_duplicates"] = {
        "images": len(images[""]),
        "across_splits": len(images["in different splits"]),
        "across_classes": len(images["with different labels"]),
        "compared": len(chosen),
        "examples": [[printable(place.path) for place in pair] for pair in examples[""]],
    }
    for words in ("in different splits", "with different labels"):
        if images[words]:
            places = [f"{printable(p.path)} ({p.split}, {class_names[p.label]})" for p in examples[words][0]]
            found.warnings.append(
                f"{counted(len(images[words]), 'image')} {words} may be near-duplicates (re-encoded, resized or"
                f" retouched copies), such as {' ≈ '.join(places)}."
            )
