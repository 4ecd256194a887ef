"""The files below a folder of a data set."""

from __future__ import annotations

import os
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import printable


@dataclass
class Below:
    """Files of a folder at any depth.

    Attributes:
        files: their paths, sorted.
        links: links to folders, which are not followed: they may lead back, or to the images of another class.
        special: pipes, sockets, devices and broken links: reading a pipe never ends.
        again: links to files of `listed`, which are not counted: a file would count twice, or for two classes.
        outside: links to files outside of `root`, which are counted.
        root: the data set's folder, as a real path.
        listed: real paths of the folders whose files are listed.
    """

    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)
    again: list[str] = field(default_factory=list)
    outside: list[str] = field(default_factory=list)
    root: str = ""
    listed: frozenset[str] = frozenset()
    _places: dict[str, tuple[bool, bool]] = field(default_factory=dict)

    def counts(self, link: str) -> bool:
        """Note where a link to a file leads; return whether the file counts."""
        if not self.root:
            return True
        folder = os.path.dirname(os.path.join(os.path.dirname(link), os.readlink(link)))
        if folder not in self._places:
            real = os.path.realpath(folder)
            above = {real, *map(str, Path(real).parents)}
            self._places[folder] = (not above.isdisjoint(self.listed), self.root not in above)
        again, outside = self._places[folder]
        if again:
            self.again.append(link)
        elif outside:
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
        UserError: a folder cannot be read.
    """
    found = Below() if found is None else found
    waiting = [os.fspath(folder)]
    start = len(found.files)
    while waiting:
        place = waiting.pop()
        try:
            with os.scandir(place) as entries:
                for entry in entries:
                    if entry.name.startswith(".") or entry.name == "__MACOSX":
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


def class_links(folders: Iterable[Path], root: Path) -> list[str]:
    """Return sentences about folders of classes and splits that are links to places outside of the data set.

    Raises:
        UserError: one is a link to a folder above or inside the data set, see `refuse_link_inside`.
    """
    said = []
    for folder in folders:
        refuse_link_inside(folder, root)
        if folder.is_symlink():
            said.append(f"{printable(folder)} is a link: its files are those of {printable(os.path.realpath(folder))}.")
    return said


def refuse_link_inside(folder: Path, root: Path) -> None:
    """Refuse a folder of a class or a split that is a link to a folder above or inside the data set.

    Its images would have two classes, or be in two splits.

    Raises:
        UserError: `folder` is such a link.
    """
    if not folder.is_symlink():
        return
    target, top = Path(os.path.realpath(folder)), Path(os.path.realpath(root))
    if target == top or top in target.parents or target in top.parents:
        raise UserError(
            f"{printable(folder)} is a link to {printable(target)}, a folder of the same data set or above it: its"
            " images would have two classes. Remove the link."
        )


def _more(paths: list[str]) -> str:
    return f" and {len(paths) - 1} more" if len(paths) > 1 else ""
