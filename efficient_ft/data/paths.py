"""Paths of many files, kept in a few arrays."""

from __future__ import annotations

import os
from collections.abc import Iterable, Iterator, Sequence

import numpy as np

#: Folders and files of operating systems and servers, which are no part of a data set.
_SYSTEM = frozenset(
    ["__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle", "@Recycle",
     "Thumbs.db", "desktop.ini"]
)  # fmt: skip


def is_hidden(name: str) -> bool:
    """Return whether a file or folder is hidden, a lock file of Office, or one of an operating system."""
    return name.startswith((".", "~$")) or name in _SYSTEM


class Paths:
    """An immutable sequence of paths of files, which are given and returned as text.

    A million take about 30 MB, a fifth of what a list of them takes. The processes that load images share the arrays,
    where each would copy the list: reading a Python object writes its count of references.

    Args:
        paths: in their order.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        folders: dict[str, int] = {}
        folder, names = [], []
        for path in paths:
            cut = path.rfind(os.sep) + 1
            folder.append(folders.setdefault(path[:cut], len(folders)))
            names.append(os.fsencode(path[cut:]))
        #: Folders with their last separator, and for each path which of them it is in.
        self._folders: Sequence[str] = list(folders)
        self._folder = np.asarray(folder, dtype=np.int32)
        #: All names in the folders as bytes, one after another, and where each begins and how long it is.
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
        """Return the paths at `indices`, in that order; the bytes of the names are shared."""
        taken = Paths()
        taken._folders, taken._names = self._folders, self._names
        taken._folder, taken._length, taken._start = (
            array[indices] for array in (self._folder, self._length, self._start)
        )
        return taken

    @staticmethod
    def join(parts: Sequence[Paths]) -> Paths:
        """Concatenate `parts`."""
        whole = Paths()
        if not parts:
            return whole
        before = np.cumsum([0, *(len(part._folders) for part in parts)])
        begin = np.cumsum([0, *(len(part._names) for part in parts)])
        whole._folders = [folder for part in parts for folder in part._folders]
        whole._names = b"".join(part._names for part in parts)
        whole._length = np.concatenate([part._length for part in parts])
        whole._folder = np.concatenate(
            [part._folder + np.int32(shift) for part, shift in zip(parts, before, strict=False)]
        )
        offset = _offset_type(len(whole._names))
        whole._start = np.concatenate(
            [(part._start + shift).astype(offset) for part, shift in zip(parts, begin, strict=False)]
        )
        return whole


def _offset_type(size: int) -> type[np.unsignedinteger]:
    """The smaller type that holds an offset within `size` bytes."""
    return np.uint32 if size < 2**32 else np.uint64
