"""Input files of ``efficient-ft predict``: image files and folders of image files."""

from __future__ import annotations

import os
import sys
import unicodedata
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.terminal import show
from efficient_ft.core.text import plain_line
from efficient_ft.data.counts import counted, verb
from efficient_ft.data.images import is_image, reading_hint


@dataclass(frozen=True)
class Item:
    """An image file or a line of text.

    Attributes:
        value: the path, or the text.
        shown: the text that is shown in the terminal.
        label: the class that has the same name as a parent folder of the image, or None if there is no such class.
    """

    value: Path | str
    shown: str
    label: str | None = None


def image_files(paths: Sequence[Path], names: Sequence[str]) -> Iterator[Item]:
    """Yield the files in `paths`, and all image files below the folders in `paths`.

    Images in formats that cannot be read are reported on standard error, and are not yielded.

    The label of an image is the class in `names` that has the same name as one of the parent folders of the image.

    Raises:
        UserError: If a path does not exist, or if a folder contains no images.
    """
    for path in paths:
        if path.is_dir():
            files = sorted(p for p in path.rglob("*") if p.is_file())
            found = [p for p in files if is_image(p)]
            others = Counter(p.suffix.lower() for p in files if not is_image(p))
            unread = [(kind, number, hint) for kind, number in others.items() if (hint := reading_hint(kind))]
            if not found:
                hints = "".join(f" For {kind} files: {hint}." for kind, _, hint in unread)
                raise UserError(f"{path}: the folder contains no images.{hints}")
            for kind, number, hint in unread:
                show(f"{path}: {counted(number, f'{kind} file')} {verb(number)} no prediction: {hint}.", sys.stderr)
            for file in found:
                below = file.relative_to(path)
                shown = short_path(path) / below if not short_path(path).is_absolute() else Path(path.name) / below
                yield Item(file, plain_line(str(shown)), _label((*below.parent.parts[::-1], path.name), tuple(names)))
        elif path.is_file():
            yield Item(path, plain_line(str(short_path(path))), _label((path.parent.name,), tuple(names)))
        else:
            why = "the path is not a file or folder" if path.exists() else "there is no such file or folder"
            raise UserError(f"{path}: {why}. Pass image files or folders of images.")


@cache
def _label(folders: tuple[str, ...], names: tuple[str, ...]) -> str | None:
    """Return the class that has the same name as a folder, or None if no folder matches a class.

    The first matching folder is used. If no class has exactly the name of a folder, case is ignored, provided that only
    one class then matches.
    """
    for folder in map(_key, folders):
        same = [name for name in names if _key(name) == folder]
        alike = [name for name in names if _key(name).casefold() == folder.casefold()]
        if same or len(alike) == 1:
            return (same or alike)[0]
    return None


@cache
def _key(name: str) -> str:
    """Normalize a name, because some file systems store accents separately from their letters."""
    return unicodedata.normalize("NFC", name)


def short_path(path: Path) -> Path:
    """Return `path` relative to the current folder if it is inside this folder. Otherwise, return `path` unchanged."""
    here = Path(os.getcwd())
    return path.relative_to(here) if path.is_absolute() and path.is_relative_to(here) else path
