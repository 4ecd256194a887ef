"""Compact sequences of file paths, and the names of hidden files."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

#: Folders and files that operating systems and file servers create.
_SYSTEM = frozenset(
    ["__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle", "@Recycle",
     "Thumbs.db", "desktop.ini"]
)  # fmt: skip


def is_hidden(name: str) -> bool:
    """Return True for hidden files, Office lock files, and files of the operating system."""
    return name.startswith((".", "~$")) or name in _SYSTEM


class Paths:
    """An immutable sequence of file paths, stored in a few arrays.

    One million paths occupy about 30 MB, one fifth of the memory of a list. Worker processes share the arrays. A list
    would be copied, because reading a Python object changes its reference count.

    Args:
        paths: the paths, in order.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        folders: dict[str, int] = {}
        folder, names = [], []
        for path in paths:
            cut = path.rfind(os.sep) + 1
            folder.append(folders.setdefault(path[:cut], len(folders)))
            names.append(os.fsencode(path[cut:]))
        #: Folders, including the trailing separator, and the index of each path's folder.
        self._folders: Sequence[str] = list(folders)
        self._folder = np.asarray(folder, dtype=np.int32)
        #: Concatenated bytes of all file names, and the offset and length of each name.
        self._names = b"".join(names)
        self._length = np.fromiter(map(len, names), dtype=np.int32, count=len(names))
        start = np.cumsum(self._length, dtype=np.int64) - self._length
        self._start = start.astype(_offset_type(len(self._names)))

    def __len__(self) -> int:
        return len(self._length)

    def __getitem__(self, index: int) -> str:
        start = int(self._start[index])
        name = self._names[start : start + int(self._length[index])]
        return self._folders[self._folder[index]] + os.fsdecode(name)

    def __iter__(self) -> Iterator[str]:
        return map(self.__getitem__, range(len(self)))

    def take(self, indices: np.ndarray) -> Paths:
        """Return the paths at `indices`, in that order. The bytes of the names are shared."""
        taken = Paths()
        taken._folders, taken._names = self._folders, self._names
        taken._folder, taken._length = self._folder[indices], self._length[indices]
        taken._start = self._start[indices]
        return taken

    @staticmethod
    def join(parts: Sequence[Paths]) -> Paths:
        """Concatenate `parts`."""
        joined = Paths()
        if not parts:
            return joined
        joined._folders = [folder for part in parts for folder in part._folders]
        joined._names = b"".join(part._names for part in parts)
        joined._length = np.concatenate([part._length for part in parts])
        folders = np.cumsum([0, *(len(part._folders) for part in parts[:-1])])
        offsets = np.cumsum([0, *(len(part._names) for part in parts[:-1])])
        kind = _offset_type(len(joined._names))
        joined._folder = np.concatenate([p._folder + np.int32(at) for p, at in zip(parts, folders, strict=True)])
        joined._start = np.concatenate([(p._start + at).astype(kind) for p, at in zip(parts, offsets, strict=True)])
        return joined


def _offset_type(size: int) -> type[np.unsignedinteger]:
    return np.uint32 if size < 2**32 else np.uint64
