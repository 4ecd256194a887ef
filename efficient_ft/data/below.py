"""The files below a folder of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable
from efficient_ft.data.paths import is_hidden


@dataclass
class Below:
    """Files of a folder at any depth.

    Attributes:
        files: their paths, sorted.
        links: links to folders, which are not followed: they may lead back, or to the images of another class.
        special: pipes, sockets, devices and broken links: reading a pipe never ends.
        again: links to files of `listed`, which are not counted: a file would count twice, or for two classes.
        outside: links to files outside of `root`, which are counted if `follow_links`.
        root: the data set's folder, as a real path.
        listed: real paths of the folders whose files are listed.
        follow_links: follow links out of `root`; False: refuse them.
    """

    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    root: str = ""
    listed: frozenset[str] = frozenset()
    follow_links: bool = False
    _places: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    def counts(self, link: str) -> bool:
        """Note where a link to a file leads; return whether the file counts.

        Raises:
            UserError: it leads out of the data set, and such links are not followed.
        """
        if not self.root:
            return True
        target = os.path.join(os.path.dirname(link), os.readlink(link))
        if os.path.islink(target):
            target = os.path.realpath(target)
        folder = os.path.dirname(target)
        if folder not in self._places:
            real = os.path.realpath(folder)
            above = {real, *map(str, Path(real).parents)}
            self._places[folder] = (not above.isdisjoint(self.listed), self.root not in above)
        again, outside = self._places[folder]
        if again:
            self.again.append(link)
        elif outside:
            if not self.follow_links:
                raise _outside(link, self.root)
            self.outside.append(link)
        return not again

    def notes(self, folder: Path) -> list[str]:
        """Sentences about what is left out."""
        said = []
        if self.links:
            said.append(
                f"Links to folders inside {printable(folder)} are not followed: {printable(self.links[0])}"
                f"{_more(self.links)}. Put the folders themselves there."
            )
        if self.special:
            said.append(
                f"Neither files nor folders in {printable(folder)} are ignored: {printable(self.special[0])}"
                f"{_more(self.special)} (a pipe, a device or a broken link)."
            )
        if self.again:
            said.append(
                f"Links to files that are in the data set under their own names are not counted:"
                f" {printable(self.again[0])}{_more(self.again)}."
            )
        if self.outside:
            said.append(
                f"Links to files outside of {printable(self.root)} are followed: {printable(self.outside[0])}"
                f"{_more(self.outside)}."
            )
        return said


def files_below(folder: str | Path, found: Below | None = None) -> Below:
    """List the visible files below `folder`; links to files count, those to folders do not.

    Args:
        folder: may itself be a link.
        found: is added to; None: a new one.

    Raises:
        UserError: a folder cannot be read, or a link leads out of the data set.
    """
    found = Below() if found is None else found
    waiting = [os.fspath(folder)]
    start = len(found.files)
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if is_hidden(entry.name):
                        continue
                    try:
                        is_file = entry.is_file()
                    except OSError:  # a link to itself
                        found.special.append(entry.path)
                        continue
                    if is_file:
                        if not entry.is_symlink() or found.counts(entry.path):
                            found.files.append(entry.path)
                    elif entry.is_dir():
                        (found.links if entry.is_symlink() else waiting).append(entry.path)
                    else:
                        found.special.append(entry.path)
        except OSError as error:
            raise UserError(f"{printable(place)} cannot be read ({error.strerror}). Check its permissions.") from error
    found.files[start:] = sorted(found.files[start:])
    return found


def refuse_elsewhere(listed: Iterable[str], root: Path, follow_links: bool) -> None:
    """Refuse existing files that the lists of a data set name outside of its folder.

    Args:
        listed: their paths.
        root: the data set's folder; may itself be a link.
        follow_links: as `Below.follow_links`. A path that leaves the folder without a link is refused in any case.

    Raises:
        UserError: for the first such file.
    """
    top, written = os.path.realpath(root), os.path.normpath(root)
    links: dict[str, set[str]] = {}
    for path in listed:
        folder, name = os.path.split(path)
        if folder not in links:
            if not _within(os.path.normpath(folder), written):
                raise UserError(
                    f"The lists in {printable(root)} name {printable(path)}, a file outside of this folder. Remove such"
                    " lines, or put a complete copy of the data set there."
                )
            if not follow_links and not _within(os.path.realpath(folder), top):
                raise _outside(folder, root)
            with os.scandir(folder) as entries:
                links[folder] = {entry.name for entry in entries if entry.is_symlink()}
        if name in links[folder] and not follow_links and not _within(os.path.realpath(path), top):
            raise _outside(path, root)


def _within(path: str, folder: str) -> bool:
    return path == folder or path.startswith(folder.rstrip(os.sep) + os.sep)


def links_in(places: Iterable[Path], root: Path, follow_links: bool) -> list[str]:
    """Find the links in some files and folders of a data set; return sentences about those that leave it.

    Args:
        places: folders of classes and splits, and files that are read.
        root: the data set's folder.
        follow_links: as `Below.follow_links`.

    Raises:
        UserError: a link leads out of the data set and is not to be followed; or to a folder inside or above it, whose
            files would have two classes, or be in two splits.
    """
    said = []
    top = Path(os.path.realpath(root))
    for place in places:
        if not place.is_symlink():
            continue
        target = Path(os.path.realpath(place))
        if target == top or top in target.parents or target in top.parents:
            if target.is_dir():
                raise UserError(
                    f"{printable(place)} is a link to {printable(target)}, a folder of the same data set or above it:"
                    " its files would have two classes, or be in two splits. Remove the link."
                )
        elif follow_links:
            said.append(f"{printable(place)} is a link, which is followed: to {printable(target)}.")
        else:
            raise _outside(place, root)
    return said


def _outside(link: str | Path, root: str | Path) -> UserError:
    return UserError(
        f"{printable(link)} is a link to {printable(os.path.realpath(link))}, outside of {printable(root)}. Set"
        " data.follow_links=true to use what such links lead to, or remove the link."
    )


def _more(paths: list[str]) -> str:
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""
