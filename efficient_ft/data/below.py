"""The files below a folder of a data set."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.data.images import printable


@dataclass
class Below:
    """Files of a folder at any depth.

    Attributes:
        files: their paths, sorted.
        links: links to folders, which are not followed: they may lead back, or to the images of another class.
        special: pipes, sockets, devices and broken links: reading a pipe never ends.
    """

    files: list[str] = field(default_factory=list)
    links: list[str] = field(default_factory=list)
    special: list[str] = field(default_factory=list)

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
                    if entry.is_file():
                        found.files.append(entry.path)
                    elif entry.is_dir():
                        (found.links if entry.is_symlink() else waiting).append(entry.path)
                    else:
                        found.special.append(entry.path)
        except OSError as error:
            raise UserError(f"{printable(place)} cannot be read ({error.strerror}). Check its permissions.") from error
    found.files[start:] = sorted(found.files[start:])
    return found


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
