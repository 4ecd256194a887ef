"""The contents of a data set as short hashes, by which a resumed run knows the data that it began with.

Names, places and dates of files do not count: a copy of a data set has the same contents.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efficient_ft.core.text import printable
from efficient_ft.data.inspection import in_threads, spread
from efficient_ft.data.listing import label_bytes

#: Files of a split that are read: evenly spread, and the first one of each class. Further ones are not looked at.
FILES = 2048
#: Of a longer file the size and these many pieces are read, evenly spread.
_WHOLE, _PIECES, _PIECE = 1 << 20, 8, 1 << 15
#: Parts into which samples in memory (texts, pixels) are divided; each has one hash.
_BLOCKS = 256
#: Hexadecimal digits of a hash.
_DIGITS = 8
#: Changed entries that a message names.
_NAMED = 3


@dataclass(frozen=True)
class Contents:
    """The parts of a data set, or of the weights of a run, that are hashed.

    Attributes:
        counts: number of samples by part: a split, or what else the run reads.
        names: of the entries that are looked at, by part, for messages.
        hashes: of these entries, one after another, by part.
    """

    counts: Mapping[str, int]
    names: Mapping[str, Sequence[str]]
    hashes: Mapping[str, str]

    def record(self) -> dict[str, Any]:
        """Return the contents in plain containers, without names."""
        return {part: {"count": self.counts[part], "hashes": self.hashes[part]} for part in self.counts}

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """Return how the contents differ from those `record` returned earlier, one clause a part; [] if they do not."""
        found = []
        for part in dict.fromkeys([*before, *self.counts]):
            then, count = before.get(part, {"count": 0, "hashes": ""}), self.counts.get(part, 0)
            now = self.hashes.get(part, "")
            if then["count"] != count:
                found.append(f"{part}: {then['count']:,} then, {count:,} now")
            elif then["hashes"] != now:
                found.append(f"{part}: {self._changed(part, then['hashes'], now)}")
        return found

    def _changed(self, part: str, then: str, now: str) -> str:
        names = self.names[part]
        places = range(0, len(now), _DIGITS)
        differ = [names[at // _DIGITS] for at in places if then[at : at + _DIGITS] != now[at : at + _DIGITS]]
        more = f" and {len(differ) - _NAMED:,} more" if len(differ) > _NAMED else ""
        named = ", ".join(map(printable, differ[:_NAMED]))
        return f"{len(differ):,} of {len(names):,} changed" + (f" ({named}{more})" if named else "")


@dataclass(frozen=True)
class Looked:
    """The entries of a data set that decide its contents; files are read by `contents`.

    Attributes:
        counts, names: as of `Contents`.
        known: hashes of parts that are in memory.
        files: paths of the other ones.
    """

    counts: dict[str, int]
    names: dict[str, list[str]]
    known: dict[str, str]
    files: dict[str, list[str]]

    def contents(self) -> Contents:
        """Read the files, and return the contents."""
        read = {part: "".join(in_threads(_of_file, paths)) for part, paths in self.files.items()}
        return Contents(self.counts, self.names, {**self.known, **read})


def looked_at(listing: Any, root: str | os.PathLike[str] = "") -> Looked:
    """Choose the entries of a listing (`Listing`, `MaskListing` or `TextListing`) that decide its contents.

    Args:
        listing: the lists of the data set.
        root: its folder; names of files are relative to it.
    """
    looked = Looked({}, {}, {}, {})
    _add_classes(looked, getattr(listing, "classes", None) or listing.class_names)
    for split in ("train", "val", "test"):
        part = getattr(listing, split)
        if part is None:
            continue
        if hasattr(part, "masks"):
            chosen = spread(len(part), FILES)
            _add_files(looked, f"{split} images", part.images, chosen, root)
            _add_files(looked, f"{split} masks", part.masks, chosen, root)
        elif hasattr(part, "texts"):
            _add_blocks(looked, split, part.texts, part.labels)
        elif isinstance(part.images, np.ndarray):
            _add_blocks(looked, split, part.images, part.labels)
        else:
            first = np.unique(part.labels, return_index=True)[1][:FILES]
            _add_files(looked, split, part.images, np.union1d(spread(len(part), FILES), first), root, part.labels)
    return looked


def files_contents(part: str, paths: Sequence[Path]) -> Contents:
    """Return the contents of whole files, such as weights."""
    hashes = "".join(_of_file(str(path), whole=True) for path in paths)
    return Contents({part: len(paths)}, {part: [path.name for path in paths]}, {part: hashes})


def joined(parts: Mapping[str, Contents]) -> Contents:
    """Return several contents as one; the names of the parts of each begin with its key in `parts`."""
    every = {f"{prefix}{name}": (one, name) for prefix, one in parts.items() for name in one.counts}
    return Contents(
        {key: one.counts[name] for key, (one, name) in every.items()},
        {key: one.names[name] for key, (one, name) in every.items()},
        {key: one.hashes[name] for key, (one, name) in every.items()},
    )


def _add_classes(looked: Looked, classes: Any) -> None:
    """Add the names of classes, or those of `masks.Classes` with their pixel values."""
    names = list(getattr(classes, "names", classes))
    ids, colors = (getattr(classes, key, None) or [None] * len(names) for key in ("ids", "colors"))
    looked.counts["classes"], looked.names["classes"] = len(names), names
    each = zip(names, ids, colors, strict=True)
    looked.known["classes"] = "".join(_hash(repr(one).encode(errors="surrogateescape")) for one in each)


def _add_files(
    looked: Looked, part: str, paths: Any, chosen: np.ndarray, root: Any, labels: np.ndarray | None = None
) -> None:
    taken = [paths[int(i)] for i in chosen]
    looked.counts[part], looked.files[part] = len(paths), taken
    looked.names[part] = [os.path.relpath(path, root) if root else path for path in taken]
    if labels is not None:
        key = f"{part} labels"
        looked.counts[key], looked.names[key] = len(labels), [part]
        looked.known[key] = _hash(label_bytes(labels).tobytes())


def _add_blocks(looked: Looked, part: str, samples: Any, labels: np.ndarray) -> None:
    """Add samples that are in memory, pixels or texts, with their labels."""
    size = max(1, -(-len(samples) // _BLOCKS))
    starts = range(0, len(samples), size)
    looked.counts[part] = len(samples)
    looked.names[part] = [f"samples {start + 1}–{min(start + size, len(samples))}" for start in starts]

    def data(block: slice) -> bytes:
        found = samples[block]
        pixels = isinstance(found, np.ndarray)
        text = np.ascontiguousarray(found).tobytes() if pixels else repr(found).encode(errors="surrogateescape")
        return text + labels[block].astype("<i8").tobytes()

    looked.known[part] = "".join(_hash(data(slice(start, start + size))) for start in starts)


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def _of_file(path: str, whole: bool = False) -> str:
    """The hash of a file's bytes, or of pieces of a long one; of a file that cannot be read, that of nothing."""
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(b"%d " % size)
            if size <= _WHOLE or whole:
                while piece := file.read(_WHOLE):
                    found.update(piece)
            else:
                for number in range(_PIECES):
                    file.seek((size - _PIECE) * number // (_PIECES - 1))
                    found.update(file.read(_PIECE))
    except OSError:  # reported, or left out, where it is read
        pass
    return found.hexdigest()
