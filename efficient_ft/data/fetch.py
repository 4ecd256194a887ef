"""Download, verify and unpack the files of published data sets."""

from __future__ import annotations

import http.client
import os
import shutil
import tarfile
import tempfile
import zipfile
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from torchvision.datasets.utils import check_integrity
from tqdm import tqdm

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.network import open_url, reason_of

STALL_SECONDS = 30.0  # a download fails if no data is received for this number of seconds

State = Literal["ready", "packed", "partial", "absent", "broken"]


@dataclass(frozen=True)
class Archive:
    """A file of a published data set. The file may be an archive that must be unpacked."""

    path: str  # path of the file, relative to the root folder
    unpacks: str | None = None  # unpacked folder, relative to the root, or None if the file is not an archive
    url: str | None = None  # URL of the file, or None if it cannot be downloaded
    md5: str | None = None  # checksum of the file, or None if the publisher provides no checksum
    size: int | None = None  # size in bytes; a smaller file is considered an interrupted download
    contents: tuple[str, ...] = ()  # paths that must exist, relative to the unpacked folder

    def state(self, root: Path) -> State:
        """Return the state of the files below `root`.

        Returns:
            ``ready`` if the files can be read; ``packed`` if the archive must be unpacked; ``partial`` if the file is
            too small or has a different checksum; ``absent`` if the file does not exist; ``broken`` if the unpacked
            folder is incomplete.
        """
        if self.unpacks is not None and _has_entries(root / self.unpacks):
            return "broken" if self.lacks(root) else "ready"
        file = root / self.path
        if not file.is_file():
            return "absent"
        if file.stat().st_size < (self.size or 1):
            return "partial"
        if self.unpacks is not None:
            return "packed"
        return "ready" if check_integrity(file, self.md5) else "partial"

    def lacks(self, root: Path) -> list[str]:
        """Return the paths in `contents` that are missing from the unpacked folder."""
        return [name for name in self.contents if not (root / str(self.unpacks) / name).exists()]

    def describe(self, root: Path) -> str:
        """Return one line with the expected location of the file or folder. The line reports damaged files."""
        line = str((root / self.path).absolute())
        if self.size is not None:
            line += f" ({format_bytes(self.size)})"
        if self.unpacks is not None:
            line += f", or the unpacked folder {(root / self.unpacks).absolute()}{os.sep}"
            if self.contents:
                line += f" with {', '.join(self.contents)}"
        state = self.state(root)
        if state == "broken":
            line += f" [the folder exists, but does not contain {', '.join(self.lacks(root))}]"
        if state == "partial":
            line += f" [the existing file ({format_bytes((root / self.path).stat().st_size)}) is incomplete or damaged]"
        return line


def fetch(archives: Sequence[Archive], root: Path) -> None:
    """Download, verify and unpack all archives that are not ``ready``.

    Raises:
        UserError: If a download fails or is interrupted, a checksum differs, or the disk is full or not writable.
    """
    for archive in archives:
        state = archive.state(root)
        if state == "ready":
            continue
        try:
            if state != "packed":
                _download(archive, root)
            if archive.unpacks is not None:
                _unpack(archive, root)
        except (OSError, http.client.HTTPException) as error:
            raise UserError(f"{(root / archive.path).absolute()}: {reason_of(error)}.") from error


def _download(archive: Archive, root: Path) -> None:
    assert archive.url is not None, "an archive without a URL cannot be downloaded"
    target = root / archive.path
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if archive.size is not None and free < 2 * archive.size:
        raise UserError(
            f"The folder {target.parent.absolute()} has {format_bytes(free)} of free space, but unpacking "
            f"{target.name} requires about {format_bytes(2 * archive.size)}. Choose a different folder with "
            "data.root=DIR."
        )
    with tempfile.TemporaryDirectory(prefix=f".{target.name}.", suffix=".part", dir=target.parent) as scratch:
        part = Path(scratch) / target.name
        with open_url(archive.url, STALL_SECONDS) as response, open(part, "wb") as file:
            length = response.headers.get("Content-Length")
            expected = int(length) if length is not None and length.isdigit() else archive.size
            with tqdm(total=expected, unit="B", unit_scale=True, desc=target.name) as bar:
                while chunk := response.read(1 << 18):
                    file.write(chunk)
                    bar.update(len(chunk))
        got = part.stat().st_size
        # The size is compared, because http.client treats a closed connection as the end of the file.
        if expected is not None and got < expected:
            raise UserError(
                f"The download of {archive.url} stopped after {format_bytes(got)} of {format_bytes(expected)}. "
                "Run the same command again."
            )
        if not check_integrity(part, archive.md5):
            raise UserError(
                f"The download of {archive.url} was deleted, because the MD5 checksum is not {archive.md5}. "
                f"Run the command again, or copy the original file to {target.absolute()}."
            )
        os.replace(part, target)


def _unpack(archive: Archive, root: Path) -> None:
    assert archive.unpacks is not None
    packed, target = root / archive.path, root / archive.unpacks
    if not check_integrity(packed, archive.md5):
        raise UserError(
            f"The file {packed.absolute()} is damaged or modified: the MD5 checksum is not {archive.md5}. "
            "Delete the file and run the command again, or replace it with the original file."
        )
    # Unpack into a temporary folder and rename it, so that interrupted unpacking leaves no incomplete data set.
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as scratch:
        try:
            # The filter, which is supported only for .tar files, rejects links and paths that lead out of the folder.
            shutil.unpack_archive(packed, scratch, filter=None if packed.suffix == ".zip" else "data")
        except (EOFError, tarfile.TarError, zipfile.BadZipFile, shutil.ReadError, zlib.error) as error:
            raise UserError(
                f"The archive {packed.absolute()} cannot be unpacked ({error}). The archive is incomplete or damaged. "
                "Replace the archive."
            ) from error
        made = Path(scratch) / target.name
        if not made.is_dir():
            found = ", ".join(sorted(p.name for p in Path(scratch).iterdir())[:5]) or "nothing"
            raise UserError(
                f"The archive {packed.absolute()} contains {found} instead of the folder {target.name}/. "
                "Replace the archive with the original file."
            )
        if target.is_dir() and not _has_entries(target):
            target.rmdir()
        try:
            os.replace(made, target)
        except OSError:
            if archive.state(root) != "ready":  # another process may have unpacked the archive
                raise


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
