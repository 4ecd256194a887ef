"""Scan the folders of a data set and count the images in each. No image is opened."""

from __future__ import annotations

import contextlib
import os
import unicodedata
from dataclasses import dataclass, field
from pathlib import Path

from efficient_ft.core.text import printable
from efficient_ft.data.counts import counted
from efficient_ft.data.images import is_image
from efficient_ft.data.paths import is_hidden

#: Maximum length of a folder's name in messages.
_LETTERS = 60


@dataclass
class Folder:
    """A folder of a data set."""

    path: Path  # path on disk
    name: str = ""  # path relative to the data set's folder, with slashes; empty for that folder
    images: int = 0  # number of files with an image extension directly in the folder
    total: int = 0  # number of files with an image extension at any depth
    folders: dict[str, Folder] = field(default_factory=dict)  # visible subfolders by name
    link: bool = False  # True for a link that is not followed; it counts as one image

    @property
    def filled(self) -> dict[str, Folder]:
        """The subfolders that contain images at any depth."""
        return {name: folder for name, folder in self.folders.items() if folder.total}

    def __str__(self) -> str:
        return f"{self.shown} ({counted(self.total, 'image')})"

    @property
    def shown(self) -> str:
        """The name for messages, which is shortened and ends with a slash."""
        name = printable(self.name)
        short = name if len(name) <= _LETTERS else f"{name[:_LETTERS]}…"
        return f"{short}/" if name else printable(self.path)

    def enter(self, entry: os.DirEntry[str]) -> Folder:
        """Add a subfolder."""
        inner = self.folders[entry.name] = Folder(Path(entry.path), f"{self.name}/{entry.name}".lstrip("/"))
        return inner


def same_class(name: str) -> str:
    """Normalize a class name. Names that differ only in case, spaces or Unicode form become equal."""
    return unicodedata.normalize("NFC", " ".join(name.split())).casefold()


def scan(root: Path, follow_links: bool) -> tuple[Folder, list[tuple[Path, str | None]]]:
    """Count the images of all folders below `root`. No image is opened.

    Links to folders are followed only above the classes, and only if they lead out of `root` and `follow_links` is
    True. Each other link above the classes is recorded as a folder with one image. `links_in` rejects such a link if it
    is used.

    Returns:
        The folder, and the folders above the classes that were not scanned, each with an error message (None for
        links).
    """
    top = Folder(root)
    real = Path(os.path.realpath(root))
    waiting, order, blocked = [(top, 0)], [], list[tuple[Path, str | None]]()
    while waiting:
        folder, depth = waiting.pop()
        order.append(folder)
        try:
            entries = list(os.scandir(folder.path))
        except OSError as error:
            if depth <= 2:
                blocked.append((folder.path, error.strerror or "an error"))
            continue
        links = []
        for entry in entries:
            if is_hidden(entry.name):
                continue
            if entry.is_dir(follow_symlinks=False):
                waiting.append((folder.enter(entry), depth + 1))
            elif entry.is_symlink() and os.path.isdir(entry.path):
                links.append(entry)
            elif is_image(entry.name):
                with contextlib.suppress(OSError):  # raised for a link to itself
                    folder.images += entry.is_file()
        if depth > 2 or (depth > 0 and folder.images):
            continue  # links in class folders are not followed
        for entry in links:
            inner = folder.enter(entry)
            target = Path(os.path.realpath(entry.path))
            inside = target == real or real in target.parents or target in real.parents
            if inside or not follow_links:
                inner.images, inner.link = 1, True
                blocked.append((inner.path, None))
                order.append(inner)
            else:
                waiting.append((inner, depth + 1))
    for folder in reversed(order):
        folder.folders = dict(sorted(folder.folders.items()))
        folder.total = folder.images + sum(inner.total for inner in folder.folders.values())
    return top, blocked
