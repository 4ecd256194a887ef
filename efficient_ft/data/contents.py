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

FILES = 2048  # maximum number of evenly spaced files to hash per split; the first file of each class is also hashed
#: Files of at most `_COMPLETE` bytes are hashed completely. For larger files, only `_PIECES` pieces of `_PIECE` bytes
#: each are hashed.
_COMPLETE, _PIECES, _PIECE = 1 << 20, 8, 1 << 15
_BLOCKS = 256  # maximum number of blocks into which samples in memory are divided; one hash is computed per block
_DIGITS = 8  # number of hexadecimal digits of a hash


@dataclass(frozen=True)
class Part:
    """A part of the hashed data, such as a split or the weights of a network."""

    count: int  # number of samples
    names: Sequence[str]  # names of the entries, shown in messages
    hashes: str = ""  # concatenated hashes of the entries; empty until `files` have been read
    files: Sequence[str] = ()  # paths of the entries that must be read and hashed


@dataclass(frozen=True)
class Contents:
    """Hashes of the parts of a data set, or of weight files."""

    parts: Mapping[str, Part]

    def read(self) -> Contents:
        """Read the files that have not been hashed, and return `Contents` with all hashes."""
        hashes = {name: part.hashes + "".join(in_threads(_of_file, part.files)) for name, part in self.parts.items()}
        return Contents({name: Part(part.count, part.names, hashes[name]) for name, part in self.parts.items()})

    def record(self) -> dict[str, Any]:
        """Return the number of samples and the hashes of each part as a dictionary."""
        return {name: {"count": part.count, "hashes": part.hashes} for name, part in self.parts.items()}

    def changes(self, before: Mapping[str, Any]) -> list[str]:
        """Return a description of each part that has changed since `before`, which is an earlier result of `record`."""
        found = []
        for name in dict.fromkeys([*before, *self.parts]):
            old, part = before.get(name, {"count": 0, "hashes": ""}), self.parts.get(name, Part(0, ()))
            if old["count"] != part.count:
                found.append(f"{name}: the number of entries changed from {old['count']:,} to {part.count:,}")
            elif old["hashes"] != part.hashes:
                blocks = [slice(start, start + _DIGITS) for start in range(0, len(part.hashes), _DIGITS)]
                pairs = zip(part.names, blocks, strict=True)
                differ = [entry for entry, block in pairs if old["hashes"][block] != part.hashes[block]]
                examples = f" ({some(differ, 3)})" if differ else ""
                found.append(f"{name}: {len(differ):,} of {len(part.names):,} entries changed{examples}")
        return found


def looked_at(listing: Any, root: str | os.PathLike[str] = "") -> Contents:
    """Select the entries of a listing to hash, and hash the entries that are in memory.

    Files are read only when `Contents.read` is called. File names in messages are relative to `root`.
    """
    names, classes = listing.class_names, getattr(listing, "classes", None)
    ids, colors = (getattr(classes, key, None) or [None] * len(names) for key in ("ids", "colors"))
    each = zip(names, ids, colors, strict=True)
    hashes = "".join(_hash(repr(one).encode(errors="surrogateescape")) for one in each)
    parts = {"classes": Part(len(names), names, hashes)}
    for split, part in splits_of(listing).items():
        if hasattr(part, "masks"):
            for kind in ("images", "masks"):
                parts[f"{split} {kind}"] = _files(getattr(part, kind), spread(len(part), FILES), root)
        elif hasattr(part, "texts"):
            parts[split] = _blocks(part.texts, part.labels)
        elif isinstance(part.images, np.ndarray):
            parts[split] = _blocks(part.images, part.labels)
        else:
            one = part.labels.ndim == 1  # otherwise, an image has several labels or numbers
            first = np.unique(part.labels, return_index=True)[1][:FILES] if one else np.zeros(0, dtype=np.int64)
            parts[split] = _files(part.images, np.union1d(spread(len(part), FILES), first), root)
            parts[f"{split} labels"] = Part(len(part.labels), [split], _hash(label_bytes(part.labels).tobytes()))
    return Contents(parts)


def files_contents(part: str, paths: Sequence[Path]) -> Contents:
    """Hash entire files, such as weight files. The result has a single part named `part`."""
    hashes = "".join(_of_file(str(path), complete=True) for path in paths)
    return Contents({part: Part(len(paths), [path.name for path in paths], hashes)})


def joined(parts: Mapping[str, Contents]) -> Contents:
    """Combine the values of `parts` into one `Contents`. The keys of `parts` are used as prefixes of the part names."""
    return Contents({f"{prefix}{name}": part for prefix, one in parts.items() for name, part in one.parts.items()})


def _files(paths: Any, chosen: np.ndarray, root: Any) -> Part:
    taken = [paths[int(i)] for i in chosen]
    return Part(len(paths), [os.path.relpath(path, root) if root else path for path in taken], files=taken)


def _blocks(samples: Any, labels: np.ndarray) -> Part:
    size = max(1, -(-len(samples) // _BLOCKS))
    starts = range(0, len(samples), size)

    def data(block: slice) -> bytes:
        found = samples[block]
        pixels = isinstance(found, np.ndarray)
        text = np.ascontiguousarray(found).tobytes() if pixels else repr(found).encode(errors="surrogateescape")
        return text + labels[block].astype("<i8").tobytes()

    names = [f"samples {start + 1}–{min(start + size, len(samples))}" for start in starts]
    return Part(len(samples), names, "".join(_hash(data(slice(start, start + size))) for start in starts))


def _hash(data: bytes) -> str:
    return hashlib.blake2b(data, digest_size=_DIGITS // 2).hexdigest()


def _of_file(path: str, complete: bool = False) -> str:
    found = hashlib.blake2b(digest_size=_DIGITS // 2)
    try:
        with open(path, "rb", buffering=0) as file:
            size = os.fstat(file.fileno()).st_size
            found.update(b"%d " % size)
            if size <= _COMPLETE or complete:
                hashlib.file_digest(file, lambda: found)
            else:
                for number in range(_PIECES):
                    file.seek((size - _PIECE) * number // (_PIECES - 1))
                    found.update(file.read(_PIECE))
    except OSError:  # the error is reported when the file is read for training
        pass
    return found.hexdigest()
