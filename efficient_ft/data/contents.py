"""Hash the contents of a data set, so that a resumed run detects changed data.

Hashes do not depend on file names, locations or dates, so a copy of a data set has the same hashes.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efficient_ft.data.counts import some
from efficient_ft.data.inspection import in_threads, spread
from efficient_ft.data.listing import label_bytes, splits_of

#: Number of evenly spread files of a split that are hashed, in addition to the first file of each class.
FILES = 2048
#: Maximum size in bytes of a completely hashed file, and number and size of the hashed pieces of larger files.
_COMPLETE, _PIECES, _PIECE = 1 << 20, 8, 1 << 15
#: Maximum number of blocks into which samples in memory are divided. Each block has one hash.
_BLOCKS = 256
#: Number of hexadecimal digits of a hash.
_DIGITS = 8


@dataclass(frozen=True)
class Contents:
    """Hashes of the parts of a data set, or of weights."""

    counts: Mapping[str, int]  # number of samples by part, such as a split
    names: Mapping[str, Sequence[str]]  # names of the hashed entries by part, for messages
    hashes: Mapping[str, str]  # concatenated hashes of these entries by part

    def record(self) -> dict[str, Any]:
        """Return the counts and hashes as plain containers."""
        return {part: {"count": self.counts[part], "hashes": self.hashes[part]} for part in self.counts}

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """Describe the parts that differ from an earlier result of `record`."""
        found = []
        for part in dict.fromkeys([*before, *self.counts]):
            then, count = before.get(part, {"count": 0, "hashes": ""}), self.counts.get(part, 0)
            now = self.hashes.get(part, "")
            if then["count"] != count:
                found.append(f"{part}: {then['count']:,} then, {count:,} now")
            elif then["hashes"] != now:
                old, names = then["hashes"], self.names[part]
                starts = range(0, len(now), _DIGITS)
                differ = [names[i // _DIGITS] for i in starts if old[i : i + _DIGITS] != now[i : i + _DIGITS]]
                examples = f" ({some(differ, 3)})" if differ else ""
                found.append(f"{part}: {len(differ):,} of {len(names):,} changed{examples}")
        return found


@dataclass(frozen=True)
class Looked:
    """The entries of a data set that are hashed."""

    counts: dict[str, int]  # see `Contents`
    names: dict[str, list[str]]  # see `Contents`
    known: dict[str, str]  # hashes of parts in memory
    files: dict[str, list[str]]  # paths of files by part, which `contents` reads

    def contents(self) -> Contents:
        """Read the files, and return all hashes."""
        read = {part: "".join(in_threads(_of_file, paths)) for part, paths in self.files.items()}
        return Contents(self.counts, self.names, {**self.known, **read})


def looked_at(listing: Any, root: str | os.PathLike[str] = "") -> Looked:
    """Select the entries of a listing that are hashed. Their names are file paths relative to `root`."""
    classes = getattr(listing, "classes", None) or listing.class_names
    names = list(getattr(classes, "names", classes))
    ids, colors = (getattr(classes, key, None) or [None] * len(names) for key in ("ids", "colors"))
    each = zip(names, ids, colors, strict=True)
    hashes = "".join(_hash(repr(one).encode(errors="surrogateescape")) for one in each)
    looked = Looked({"classes": len(names)}, {"classes": names}, {"classes": hashes}, {})
    for split, part in splits_of(listing).items():
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
    """Return the hashes of entire files, such as weights."""
    hashes = "".join(_of_file(str(path), complete=True) for path in paths)
    return Contents({part: len(paths)}, {part: [path.name for path in paths]}, {part: hashes})


def joined(parts: Mapping[str, Contents]) -> Contents:
    """Combine several `Contents`, and prefix the names of their parts with the keys of `parts`."""
    every = {f"{prefix}{name}": (one, name) for prefix, one in parts.items() for name in one.counts}
    return Contents(
        {key: one.counts[name] for key, (one, name) in every.items()},
        {key: one.names[name] for key, (one, name) in every.items()},
        {key: one.hashes[name] for key, (one, name) in every.items()},
    )


def _add_files(looked: Looked, part: str, paths: Any, chosen: Any, root: Any, labels: Any = None) -> None:
    taken = [paths[int(i)] for i in chosen]
    looked.counts[part], looked.files[part] = len(paths), taken
    looked.names[part] = [os.path.relpath(path, root) if root else path for path in taken]
    if labels is not None:
        key = f"{part} labels"
        looked.counts[key], looked.names[key] = len(labels), [part]
        looked.known[key] = _hash(label_bytes(labels).tobytes())


def _add_blocks(looked: Looked, part: str, samples: Any, labels: np.ndarray) -> None:
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


def _of_file(path: str, complete: bool = False) -> str:
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(b"%d " % size)
            if size <= _COMPLETE or complete:
                while piece := file.read(_COMPLETE):
                    found.update(piece)
            else:
                for number in range(_PIECES):
                    file.seek((size - _PIECE) * number // (_PIECES - 1))
                    found.update(file.read(_PIECE))
    except OSError:  # the error is reported when the file is read for training
        pass
    return found.hexdigest()
