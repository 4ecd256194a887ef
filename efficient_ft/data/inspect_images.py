"""Inspect image data sets: sizes, modes, values and frames. A thorough inspection also finds duplicates."""

from __future__ import annotations

import contextlib
import hashlib
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from PIL import Image

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted, most_frequent, some, verb
from efficient_ft.data.images import Decoding, has_16_bits, opened, to_rgb
from efficient_ft.data.inspection import DECODED, HEADERS, Inspection, decoding_threads, in_threads, progress, spread
from efficient_ft.data.listing import Samples

#: Maximum number of pixels to decode in a quick inspection, and number of images that are always decoded.
_PIXELS, _FIRST = 16_000_000, 4
_ENLARGED = 4.0  # enlargement factor above which a warning is issued
_DEPTHS = (255, 1023, 4095, 16383)  # suggested upper limits of ``data.value_range`` for dark images
#: Maximum numbers of duplicate groups and paths per group in the record, and maximum number of images that are compared
#: to find near-duplicates.
_GROUPS, _PATHS, _COMPARED = 100, 5, 50_000
_GRAY = ("1", "L", "LA", "La", "F")
_FORMATS = {"jpg": "JPEG", "jpeg": "JPEG", "jfif": "JPEG", "tif": "TIFF", "pgm": "PPM", "jp2": "JPEG2000",
            "j2k": "JPEG2000", "j2c": "JPEG2000", "jpf": "JPEG2000", "jpx": "JPEG2000", "heic": "HEIF",
            "hif": "HEIF"}  # fmt: skip
#: Pattern of the names of masks that are stored in the same folder as their images.
_MASK = re.compile(r"(.+)[ _-](?:mask|masks|seg|segmentation|gt|label|labels|annotation)(?:[ _-]?\d+)?", re.IGNORECASE)
_SIDE = 9  # side of a thumbnail in pixels
#: Limits of the root mean square difference between the thumbnails of near-duplicates: a number of gray levels, and a
#: fraction of the smaller contrast of both thumbnails. In tests on photographs of 128 and 224 pixels, at least 92 %
#: of the modified copies are detected. The copies are saved as JPEG with a quality of 30 to 60, or resized by a factor
#: of 0.5 or 1.5. Distinct photographs are not matched, but JPEG copies of tiny images are not detected.
_LEVELS, _RELATIVE = 4.0, 0.08
#: Minimum contrast (standard deviation of the thumbnail) of compared images, and maximum ratio between their aspect
#: ratios.
_CONTRAST, _ASPECT = 6.0, 1.05
_BLOCK = 512  # number of thumbnails compared at a time


@dataclass
class _Seen:
    """An image and its properties. The fields after `decoded` are set only for decoded images."""

    split: str
    index: int
    label: int
    path: str
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
    classes: bool = True,
    near_labels: bool = True,
) -> Inspection:
    """Inspect the images of a data set, given its splits.

    By default, an evenly spaced subset of the images is inspected. If `thorough` is True, every image is decoded to
    find all unreadable files and duplicates. The sizes of the images are always compared with `input`. The numbers of
    images per class are only reported if `classes` is True. Near-duplicates with different labels are only reported if
    `near_labels` is True.
    """
    decoding, found = decoding or Decoding(), Inspection()
    total = sum(len(part) for part in parts.values())
    every = _images(parts, np.arange(total) if thorough else spread(total, HEADERS))

    def look(image: _Seen, decode: bool) -> None:
        pixels = parts[image.split].images
        if isinstance(pixels, np.ndarray):
            _see_pixels(image, pixels[image.index], thorough)
        else:
            _see_file(image, decoding, decode, thorough)

    if thorough:
        list(in_threads(lambda image: look(image, True), progress(every, len(every), "reading images")))
    else:
        list(in_threads(lambda image: look(image, False), every))
        chosen = _to_decode(every)
        threads = decoding_threads(image.size[0] * image.size[1] for image in chosen)
        list(in_threads(lambda image: look(image, True), chosen, threads))
    found.problems = {image.path: image.error for image in every if image.error is not None}
    if found.problems and not thorough:
        why = next(iter(found.problems.values()))
        found.warnings.append(
            f"{len(found.problems):,} of {counted(len(every), 'inspected file')} cannot be read. Example: {why}"
            " Set data.on_corrupt=skip to skip such files."
        )
    _report_masks(found, every)
    readable = [image for image in every if image.error is None]
    if readable:
        _report_sizes(found, readable, total, input)
        _report_values(found, [image for image in readable if image.decoded], decoding)
        _report_files(found, readable)
    if classes:
        _report_classes(found, parts, class_names)
    if thorough:
        _report_duplicates(found, readable, class_names)
        _report_near_duplicates(found, readable, class_names, near_labels)
    return found


def _images(parts: Mapping[str, Samples], chosen: np.ndarray) -> list[_Seen]:
    images, start = [], 0
    for split, part in parts.items():
        for index in (chosen[(chosen >= start) & (chosen < start + len(part))] - start).tolist():
            path = f"image {index} of {split}" if isinstance(part.images, np.ndarray) else part.images[index]
            images.append(_Seen(split, index, int(part.labels[index]), path))
        start += len(part)
    return images


def _to_decode(images: Sequence[_Seen]) -> list[_Seen]:
    """Select `_FIRST` evenly spaced images to decode, and further images up to `_PIXELS` pixels in total."""
    readable = [image for image in images if image.error is None and not image.decoded]
    chosen: list[_Seen] = []
    pixels = 0
    for k in spread(len(readable), DECODED).tolist() if readable else []:
        width, height = readable[k].size
        if len(chosen) < _FIRST or pixels + width * height <= _PIXELS:
            chosen.append(readable[k])
            pixels += width * height
    return chosen


def _see_file(found: _Seen, decoding: Decoding, decode: bool, thorough: bool) -> None:
    try:
        with opened(found.path, decoding) as image:
            found.size, found.mode = image.size, image.mode
            found.format = "JPEG" if image.format == "MPO" else image.format or ""
            found.deep = has_16_bits(image)
            if decode:
                _decode(image, found, decoding, thorough)
        if found.format != "JPEG":
            with opened(found.path, decoding) as image, contextlib.suppress(Exception):
                found.frames = bool(getattr(image, "is_animated", False))
    except UserError as error:
        found.error = str(error)


def _decode(image: Image.Image, found: _Seen, decoding: Decoding, thorough: bool) -> None:
    rgb = to_rgb(image, decoding)
    # The stored values are read only from images with more than 8 bits.
    raw = np.asarray(image) if image.mode.startswith("I") or image.mode == "F" else None
    extrema: Any = rgb.getextrema()
    found.decoded, found.values = True, (min(low for low, _ in extrema), max(high for _, high in extrema))
    found.constant = all(low == high for low, high in extrema)
    if raw is not None and raw.size:
        found.stored = float(raw.min()), float(raw.max())
        if decoding.value_range is not None:
            low, high = decoding.value_range
            found.clipped = float(((raw < low) | (raw > high)).mean())
    if thorough:
        found.digest, found.thumbnail = _digest(np.asarray(rgb)), _thumbnail(rgb)


def _see_pixels(found: _Seen, pixels: np.ndarray, thorough: bool) -> None:
    gray = pixels.ndim == 2 or bool((pixels == pixels[..., :1]).all())
    found.size, found.mode, found.decoded = (pixels.shape[1], pixels.shape[0]), "L" if gray else "RGB", True
    found.values, found.constant = (float(pixels.min()), float(pixels.max())), bool((pixels == pixels[:1, :1]).all())
    if thorough:
        found.digest, found.thumbnail = _digest(pixels), _thumbnail(Image.fromarray(pixels).convert("RGB"))


def _digest(pixels: np.ndarray) -> bytes:
    hasher = hashlib.blake2b(repr(pixels.shape).encode(), digest_size=16)
    hasher.update(np.ascontiguousarray(pixels).data)
    return hasher.digest()


def _report_sizes(found: Inspection, images: Sequence[_Seen], total: int, input: InputSpec) -> None:
    sizes = sorted((image.size for image in images), key=lambda size: (size[0] * size[1], size))
    low, middle, high = sizes[0], sizes[len(sizes) // 2], sizes[-1]
    modes = Counter(image.mode for image in images)
    decoded = [image for image in images if image.decoded]
    found.facts["sizes"] = {"min": list(low), "median": list(middle), "max": list(high)}
    found.facts["modes"] = dict(modes.most_common())
    found.facts |= {"examined": len(images), "decoded": len(decoded), "samples": total}
    shown = f"{_by(low)} to {_by(high)} (median {_by(middle)})" if low != high else _by(low)
    kinds = ", ".join(modes) if len(modes) == 1 else most_frequent(modes, 4, "mode")
    line = f"images: {shown}, {kinds}"
    if decoded:
        values = min(image.values[0] for image in decoded), max(image.values[1] for image in decoded)
        found.facts["values"] = list(values)
        line += f"; values {values[0]:g}–{values[1]:g}"
    found.lines.append(line)
    if len(decoded) + len(found.problems) < total:
        sizes_of = f"; the sizes are those of {len(images):,} images" if len(images) > len(decoded) else ""
        found.lines.append(f"sample: {len(decoded):,} of {counted(total, 'image')} were decoded{sizes_of}")
    gray = sum(count for mode, count in modes.items() if mode in _GRAY or mode.startswith("I"))
    if 0.01 <= gray / len(images) <= 0.99:
        number = f"{gray:,} of {counted(len(images), 'image')} {verb(gray, 'is', 'are')}"
        found.warnings.append(f"Gray and color images are mixed: {number} gray.")
    height, width = input.image_size
    factor = min(height / middle[1], width / middle[0])
    if factor > _ENLARGED:
        found.warnings.append(
            f"Images are enlarged by a factor of {factor:.3g}, from a median size of {_by(middle)} to the input size"
            f" {_by((width, height))}. A smaller model.image_size reduces the cost."
        )


def _by(size: tuple[int, int]) -> str:
    return f"{size[0]}×{size[1]}"


def _report_values(found: Inspection, decoded: Sequence[_Seen], decoding: Decoding) -> None:
    """Report images that use only a small part of the value range, clipped values, and images with a single color."""
    if not decoded:
        return
    number = counted(len(decoded), "decoded image")
    advice = ""
    stored = [image.stored for image in decoded if image.stored is not None]
    if stored:
        low, high = min(low for low, _ in stored), max(high for _, high in stored)
        found.facts["stored_values"] = [low, high]
        dark = [high for _, high in stored if high <= _DEPTHS[-1]]
        setting = f"'data.value_range=[0,{next((d for d in _DEPTHS if max(dark, default=0) <= d), _DEPTHS[-1])}]'"
        if decoding.value_range is None and low >= 0 and len(dark) * 2 > len(stored):
            mixed = len(dark) < len(stored)
            others = " If the other images are from a different source, rescale them." if mixed else ""
            advice = "" if mixed else f" Set {setting}."
            found.warnings.append(
                f"{len(dark):,} of {len(stored):,} decoded gray images with more than 8 bits {verb(len(dark))} values"
                f" of at most {max(dark):g}, so these images are dark.{others} Set {setting}."
            )
        clipped = float(np.mean([image.clipped for image in decoded if image.stored is not None]))
        if clipped > 0.01:
            assert decoding.value_range is not None
            shown = ", ".join(f"{value:g}" for value in decoding.value_range)
            found.warnings.append(
                f"{format_percent(clipped)} of the gray values, which range from {low:g} to {high:g}, are outside of"
                f" data.value_range=[{shown}]."
            )
    elif decoding.value_range is not None:
        found.warnings.append("data.value_range has no effect: no gray image with more than 8 bits was found.")
    brightest = max(image.values[1] for image in decoded)
    if brightest < 64 and not advice:
        color = sum(image.deep for image in decoded if image.stored is None)
        why = f" In {color:,} of these images, 16-bit colors are read with 8 bits. Rescale the files." if color else ""
        found.warnings.append(f"The images are dark: the maximum value of {number} is {brightest:g} (of 255).{why}")
    constant = [image for image in decoded if image.constant]
    became = [printable(one.path) for one in constant if one.stored is not None and one.stored[0] < one.stored[1]]
    single = [printable(one.path) for one in constant if one.stored is None or one.stored[0] == one.stored[1]]
    if became:
        found.warnings.append(
            f"After scaling to 8 bits, a single color remains in {len(became):,} of {number}: {some(became, 1)}."
            f"{advice or ' Set data.value_range to the range of the stored values.'}"
        )
    found.facts["single_color"] = len(constant)
    if single:
        has = verb(len(single))
        found.warnings.append(f"{len(single):,} of {number} {has} a single color: {some(single, 1)}.")


def _report_masks(found: Inspection, images: Sequence[_Seen]) -> None:
    """Report images that are named like the mask of another image in the same folder."""
    masks = []
    for image in images:
        stem, extension = os.path.splitext(image.path)
        named = _MASK.fullmatch(stem)
        if named and any(os.path.isfile(named[1] + one) for one in dict.fromkeys([extension, ".jpg", ".png", ".tif"])):
            masks.append(image.path)
    found.facts["masks_among_images"] = len(masks)
    if masks:
        found.warnings.append(
            f"{len(masks):,} of {counted(len(images), 'image')} {verb(len(masks), 'is', 'are')} named like the mask of"
            f" another image, for example {printable(masks[0])}. These files are used as images of their class. If the"
            " files are masks, move them to a different folder."
        )


def _report_files(found: Inspection, images: Sequence[_Seen]) -> None:
    formats = Counter(image.format for image in images if image.format)
    if not formats:
        return
    found.facts["formats"] = dict(formats.most_common())
    differs = []
    for image in images:
        extension = os.path.splitext(image.path)[1][1:].lower()
        if image.format and _FORMATS.get(extension, extension.upper()) not in ("", image.format):
            differs.append(f"{printable(image.path)} is {image.format}")
    found.facts["extension_differs"] = len(differs)
    if differs:
        number = f"{counted(len(differs), 'file')} {verb(len(differs))}"
        found.lines.append(f"{number} the extension of a different format: {some(differs, 1)}")
    several = [image.path for image in images if image.frames]
    found.facts["several_frames"] = len(several)
    if several:
        number = f"{counted(len(several), 'file')} {verb(len(several))}"
        found.warnings.append(f"{number} several frames or pages, of which only the first is used: {some(several, 1)}.")


def _report_classes(found: Inspection, parts: Mapping[str, Samples], class_names: Sequence[str]) -> None:
    for split, part in parts.items():
        counts = np.bincount(part.labels, minlength=len(class_names))
        if split == "train" and counts.min() > 0:
            found.facts["imbalance"] = round(float(counts.max() / counts.min()), 2)
        few, images = (1, "a single training image") if split == "train" else (0, f"no {split} image")
        names = [repr(class_names[label]) for label in np.flatnonzero(counts == few).tolist()]
        if names:
            classes = f"{counted(len(names), 'class')} {verb(len(names))}"
            found.warnings.append(f"{classes} {images}: {some(names, 5)}.")


def _report_duplicates(found: Inspection, images: Sequence[_Seen], class_names: Sequence[str]) -> None:
    groups: dict[bytes, list[_Seen]] = defaultdict(list)
    for image in images:
        groups[image.digest].append(image)
    several = [group for group in groups.values() if len(group) > 1]
    labels = [group for group in several if len({image.label for image in group}) > 1]
    across = [group for group in several if len({image.split for image in group}) > 1]
    found.facts["duplicates"] = {
        "groups": len(several),
        "across_splits": len(across),
        "across_classes": len(labels),
        "examples": [[printable(image.path) for image in group[:_PATHS]] for group in several[:_GROUPS]],
    }
    if several:
        extra = sum(len(group) - 1 for group in several)
        found.lines.append(f"duplicates: {extra:,} of {counted(len(images), 'image')}, compared by pixels")
    for same, words in (across, "in several splits"), (labels, "with several labels"):
        if same:
            number = f"{counted(len(same), 'image')} {verb(len(same), 'occurs', 'occur')}"
            examples = " = ".join(_place(image, class_names) for image in same[0][:3])
            found.warnings.append(f"{number} {words}, for example {examples}.")


def _place(image: _Seen, class_names: Sequence[str]) -> str:
    return f"{printable(image.path)} ({image.split}, {class_names[image.label]})"


def _report_near_duplicates(
    found: Inspection, images: Sequence[_Seen], class_names: Sequence[str], labels: bool
) -> None:
    decoded = [image for image in images if image.thumbnail is not None]
    chosen = [decoded[i] for i in spread(len(decoded), _COMPARED)]
    if len(chosen) < len(decoded):
        found.lines.append(f"near-duplicates: {len(chosen):,} of {len(decoded):,} images were compared")
    near: dict[str, set[int]] = {"": set(), "in different splits": set(), "with different labels": set()}
    examples: dict[str, list[tuple[_Seen, _Seen]]] = defaultdict(list)
    thumbnails = [image.thumbnail for image in chosen if image.thumbnail is not None]
    for i, j in _near_pairs(thumbnails, [image.size for image in chosen]):
        first, second = chosen[i], chosen[j]
        if first.digest == second.digest:
            continue
        for words, differs in (
            ("", True),
            ("in different splits", first.split != second.split),
            ("with different labels", labels and first.label != second.label),
        ):
            if differs:
                near[words] |= {i, j}
                if len(examples[words]) < _GROUPS:
                    examples[words].append((first, second))
    found.facts["near_duplicates"] = {
        "images": len(near[""]),
        "across_splits": len(near["in different splits"]),
        "across_classes": len(near["with different labels"]),
        "compared": len(chosen),
        "examples": [[printable(image.path) for image in pair] for pair in examples[""]],
    }
    for words in ("in different splits", "with different labels"):
        if near[words]:
            number = counted(len(near[words]), "image")
            shown = " ≈ ".join(_place(image, class_names) for image in examples[words][0])
            found.warnings.append(
                f"{number} {words} may be near-duplicates (re-encoded, resized or retouched copies), for example"
                f" {shown}."
            )


def _thumbnail(image: Image.Image) -> np.ndarray:
    """Return the pixels of a small thumbnail of an RGB image: uint8 (243,)."""
    return np.asarray(image.resize((_SIDE, _SIDE), Image.Resampling.BILINEAR, reducing_gap=2.0)).ravel()


def _near_pairs(thumbnails: Sequence[np.ndarray], sizes: Sequence[tuple[int, int]]) -> Iterator[tuple[int, int]]:
    """Yield pairs of indices of almost equal images, given the thumbnails and sizes (width, height) of all images.

    Images with low contrast are ignored.
    """
    pixels = np.asarray(thumbnails, dtype=np.float32).reshape(len(thumbnails), -1 if thumbnails else 1)
    contrast = pixels.std(axis=1)
    order = np.flatnonzero(contrast >= _CONTRAST)
    means = pixels.mean(axis=1)
    order = order[np.argsort(means[order], kind="stable")]
    pixels, means, contrast = pixels[order], means[order], contrast[order]
    aspect = np.log([width / height for width, height in (sizes[int(i)] for i in order)])
    squares = np.square(pixels).sum(axis=1)
    for start in range(0, len(order), _BLOCK):
        end = min(start + _BLOCK, len(order))
        # The root mean square difference is at least the difference of means, so only images before `last` can match.
        last = int(np.searchsorted(means, means[end - 1] + _LEVELS, side="right"))
        distance = squares[start:end, None] + squares[None, start:last] - 2 * pixels[start:end] @ pixels[start:last].T
        distance = np.sqrt(np.maximum(distance, 0) / pixels.shape[1])
        least = np.minimum(contrast[start:end, None], contrast[None, start:last])
        near = (distance <= _LEVELS) & (distance <= _RELATIVE * least)
        rows, columns = np.nonzero(near)
        for row, column in zip(rows.tolist(), columns.tolist(), strict=True):
            if row < column and abs(aspect[start + row] - aspect[start + column]) <= np.log(_ASPECT):
                yield int(order[start + row]), int(order[start + column])
