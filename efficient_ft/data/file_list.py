"""List the files of a data set, and handle links."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable
from efficient_ft.data.counts import some


def unreadable(path: str | Path, error: OSError) -> UserError:
    """Return the error for a file or folder that cannot be read."""
    return UserError(f"The path {printable(path)} cannot be read ({error.strerror}). Check the permissions.")


def size_and_time(path: str) -> tuple[int, int] | None:
    """Return the size of a file in bytes and its modification time in nanoseconds, or None if it does not exist."""
    with contextlib.suppress(OSError):  # the error is reported when the file is read for training
        status = os.stat(path)
        return status.st_size, status.st_mtime_ns
    return None


def visible_entries(folder: str | Path) -> Iterator[os.DirEntry[str]]:
    """Yield the non-hidden entries of a folder. Raise `UserError` if the folder cannot be read."""
    try:
        with os.scandir(folder) as entries:
            yield from (entry for entry in entries if not is_hidden(entry.name))
    except OSError as error:
        raise unreadable(folder, error) from error


def is_folder(entry: os.DirEntry[str]) -> bool:
    """Return True if an entry is a folder or a link to a folder."""
    return os.path.isdir(entry.path) if entry.is_symlink() else entry.is_dir()


class FileList:
    """Utility class that lists the files below the folders of a data set and records ignored entries.

    Links to files in the `listed` folders are ignored, because these files would be counted twice or belong to two
    classes. Links to files outside of `root` are followed only if `follow_links` is True.

    Attributes:
        links: ignored links to folders, which may form a cycle or lead to another class.
        special: ignored pipes, sockets, devices and broken links.
        again: ignored links to files in the `listed` folders.
        outside: followed links to files outside of `root`.
    """

    def __init__(self, root: Path, listed: Iterable[Path], follow_links: bool) -> None:
        self._root, self._follow_links = os.path.realpath(root), follow_links
        self._listed = frozenset(map(os.path.realpath, listed))
        self._places: dict[str, tuple[bool, bool]] = {}
        self.links: list[str] = []
        self.special: list[str] = []
        self.again: list[str] = []
        self.outside: list[str] = []

    def below(self, folder: str | Path, strict: bool = False) -> list[str]:
        """Return the sorted paths of all non-hidden files below a folder. The folder may be a link.

        Raise `UserError` if a folder cannot be read, if a link leads out of the data set and links are not followed, or
        if `strict` is True and entries are ignored.
        """
        files: list[str] = []
        waiting = [os.fspath(folder)]
        while waiting:
            for entry in visible_entries(waiting.pop()):
                try:
                    is_file = entry.is_file()
                except OSError:  # raised for a link that points to itself
                    self.special.append(entry.path)
                    continue
                if is_file:
                    if not entry.is_symlink() or self._counts(entry.path):
                        files.append(entry.path)
                elif entry.is_dir():
                    (self.links if entry.is_symlink() else waiting).append(entry.path)
                else:
                    self.special.append(entry.path)
        if strict and (self.links or self.special or self.again):
            raise UserError(self.notes(Path(folder))[0])
        return sorted(files)

    def _counts(self, link: str) -> bool:
        """Return True if the target of a link is counted as a file of the data set."""
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        if os.path.islink(target):
            target = os.path.realpath(target)
        folder = os.path.dirname(target)
        if folder not in self._places:
            real = os.path.realpath(folder)
            above = {real, *map(str, Path(real).parents)}
            self._places[folder] = (not above.isdisjoint(self._listed), self._root not in above)
        again, outside = self._places[folder]
        if again:
            self.again.append(link)
        elif outside:
            if not self._follow_links:
                raise _outside(link, self._root)
            self.outside.append(link)
        return not again

    def notes(self, folder: Path) -> list[str]:
        """Return one sentence for each kind of ignored entry, and one sentence for followed links."""
        inside = printable(folder)
        notes = (
            (self.links, f"Links to folders in {inside} are not followed", ". Replace the links with the folders"),
            (self.special, f"Pipes, sockets, devices and broken links in {inside} are ignored", ""),
            (self.again, "Links to files that are already part of the data set are not counted", ""),
            (self.outside, f"Links to files outside of {printable(self._root)} are followed", ""),
        )
        return [f"{text}: {some(paths, 1)}{advice}." for paths, text, advice in notes if paths]


def refuse_elsewhere(listed: Iterable[str], root: Path, follow_links: bool) -> None:
    """Raise `UserError` if listed files are outside of the data set's folder.

    Links that lead out of `root` are accepted if `follow_links` is True. Other paths outside of `root` are rejected.
    Relative paths, absolute paths and paths through links to `root` are compared with each other.
    """
    top, written = os.path.realpath(root), os.path.abspath(root)
    links: dict[str, set[str]] = {}
    for path in listed:
        folder, name = os.path.split(path)
        if folder not in links:
            real = os.path.realpath(folder)
            if not _within(os.path.abspath(folder), written) and not _within(real, top):
                raise UserError(
                    f"The file lists in {printable(root)} contain the path {printable(path)}, which is outside of this"
                    " folder. Remove the path from the lists, or set data.root to a folder that contains all files."
                )
            if not follow_links and not _within(real, top):
                raise _outside(folder, root)
            with os.scandir(folder) as entries:
                links[folder] = {entry.name for entry in entries if entry.is_symlink()}
        if name in links[folder] and not follow_links and not _within(os.path.realpath(path), top):
            raise _outside(path, root)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def links_in(places: Iterable[Path], root: Path, follow_links: bool) -> list[str]:
    """Return one sentence for each path in `places` that is a link to a target outside of the data set.

    Raise `UserError` if a link leads out of the data set and `follow_links` is False, or if a link leads to a folder
    inside or above `root`.
    """
    notes = []
    top = Path(os.path.realpath(root))
    for place in places:
        if not place.is_symlink():
            continue
        target = Path(os.path.realpath(place))
        if target == top or top in target.parents or target in top.parents:
            if target.is_dir():
                raise UserError(
                    f"The path {printable(place)} is a link to {printable(target)}, which is inside or above the data"
                    " set. The linked files would belong to two classes or splits. Remove the link."
                )
        elif follow_links:
            notes.append(f"The link from {printable(place)} to {printable(target)} is followed.")
        else:
            raise _outside(place, root)
    return notes


def _outside(link: str | Path, root: str | Path) -> UserError:
    return UserError(
        f"The path {printable(link)} is a link to {printable(os.path.realpath(link))}, which is outside of"
        f" {printable(root)}. Set data.follow_links=true to follow such links, or remove the link."
    )


#: Folders and files that operating systems and file servers create.
_SYSTEM = frozenset(
    ["__MACOSX", "$RECYCLE.BIN", "System Volume Information", "lost+found", "@eaDir", "#recycle", "@Recycle",
     "Thumbs.db", "desktop.ini"]
)  # fmt: skip


def is_hidden(name: str) -> bool:
    """Return True for the names of hidden files, Office lock files, and files of the operating system."""
    return name.startswith((".", "~$")) or name in _SYSTEM


class Paths:
    """An immutable sequence of file paths, stored in a few arrays.

    One million paths occupy about 30 MB, which is one fifth of the memory of a list. The arrays are shared by all
    worker processes, whereas a list would be copied, because reading a Python object changes its reference count.
    """

    def __init__(self, paths: Iterable[str] = ()) -> None:
        folders: dict[str, int] = {}
        folder, names = [], []
        for path in paths:
            cut = path.rfind(os.sep) + 1
            folder.append(folders.setdefault(path[:cut], len(folders)))
            names.append(os.fsencode(path[cut:]))
        #: Folders with a trailing separator, and the folder index of each path.
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
        """Return the paths at `indices`, in that order. The bytes of the names are shared, not copied."""
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
