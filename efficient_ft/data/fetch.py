"""Files that have to come from somewhere: what is there, what can be fetched, and how it is unpacked.

Presence is looked up before anything is fetched, and the host is asked with a short timeout before a
download starts, so that a machine without a network gets one clear message within seconds.
"""

from __future__ import annotations

import http.client
import os
import shutil
import tarfile
import tempfile
import threading
import urllib.error
import urllib.parse
import urllib.request
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from torchvision.datasets.utils import check_integrity, extract_archive
from tqdm import tqdm

from efficient_ft.core.errors import UserError

PROBE_SECONDS = 6.0  # the whole answer, name resolution included
STALL_SECONDS = 30.0  # without a byte during a download
_USER_AGENT = {"User-Agent": "efficient-ft"}

State = Literal["ready", "packed", "partial", "absent", "broken"]


@dataclass(frozen=True)
class Archive:
    """One file of a data set, relative to `data.root`.

    Args:
        path: where the file lies.
        unpacks: the folder that unpacking it makes beside it; None for a file that is used as it is.
        url: where it comes from; None when it can only be put there by hand.
        md5: its checksum, looked at before it is unpacked; None when the publisher gives none.
        size: its length in bytes; a shorter file is a download that broke off.
        holds: what the unpacked folder must hold, relative to it.
    """

    path: str
    unpacks: str | None = None
    url: str | None = None
    md5: str | None = None
    size: int | None = None
    holds: tuple[str, ...] = ()

    def state(self, root: Path) -> State:
        """`ready` to be read, `packed` (the archive is there in full length), `partial`, `absent`, or `broken`:
        the unpacked folder is there, but not all that belongs in it."""
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
        """What the unpacked folder should hold and does not."""
        return [name for name in self.holds if not (root / str(self.unpacks) / name).exists()]

    def wanted(self, root: Path) -> str:
        """One line of what to put where, for a person."""
        line = str((root / self.path).absolute())
        if self.size is not None:
            line += f" ({megabytes(self.size)})"
        if self.unpacks is not None:
            line += f", or what it unpacks to: {(root / self.unpacks).absolute()}{os.sep}"
            if self.holds:
                line += f" with {', '.join(self.holds)}"
        state = self.state(root)
        if state == "broken":
            line += f" [the folder is there, but lacks {', '.join(self.lacks(root))}]"
        if state == "partial":
            line += f" [there are {megabytes((root / self.path).stat().st_size)} of it: incomplete or damaged]"
        return line


def megabytes(size: int) -> str:
    """Bytes as a person reads them."""
    return f"{size / 1e6:.1f} MB" if size >= 1e5 else f"{size} bytes"


def unreachable(url: str, size: int | None = None) -> str | None:
    """None if `url` answers within `PROBE_SECONDS`, else the reason in words.

    Proxies come from the environment (`https_proxy`, `no_proxy`, ...) as in all of urllib. The question is
    asked in a thread because looking up a name can block for longer than any socket timeout.
    """
    answer: list[str | None] = []

    def ask() -> None:
        answer.append(_ask(url, size))

    thread = threading.Thread(target=ask, daemon=True, name="reachability")
    thread.start()
    thread.join(PROBE_SECONDS)
    host = urllib.parse.urlsplit(url).netloc
    if not answer:
        return f"{host}{_through(url)} gave no answer within {PROBE_SECONDS:.0f} seconds"
    return None if answer[0] is None else f"{host}{_through(url)}: {answer[0]}"


def _ask(url: str, size: int | None) -> str | None:
    try:
        # a GET that is closed after the headers: some hosts refuse HEAD
        with _open(url, PROBE_SECONDS) as response:
            length = response.headers.get("Content-Length")
    except (OSError, http.client.HTTPException, ValueError) as error:
        return _reason(error)
    if size is not None and length is not None and length.isdigit() and int(length) != size:
        return f"it answers with {length} bytes where the data set has {size}"
    return None


def _open(url: str, timeout: float) -> Any:
    # an opener of its own: urllib's common one keeps the proxies of the moment it was first used
    opener = urllib.request.build_opener()
    return opener.open(urllib.request.Request(url, headers=_USER_AGENT), timeout=timeout)


def _reason(error: Exception) -> str:
    if isinstance(error, urllib.error.HTTPError):
        return f"it answers {error.code} {error.reason}"
    if isinstance(error, urllib.error.URLError):
        return str(error.reason)
    return str(error) or type(error).__name__


def _through(url: str) -> str:
    """`` through the proxy HOST`` where the environment names one; never its password."""
    parts = urllib.parse.urlsplit(url)
    proxy = urllib.request.getproxies().get(parts.scheme)
    if not proxy or urllib.request.proxy_bypass(parts.hostname or ""):
        return ""
    return f" through the proxy {urllib.parse.urlsplit(proxy).hostname or 'of the environment'}"


def fetch(archives: Sequence[Archive], root: Path) -> None:
    """Make every archive `ready`: download what is missing, check it, unpack it.

    Raises:
        UserError: a download fails or breaks off, a checksum differs, the disk is full or not writable.
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
            raise UserError(f"{(root / archive.path).absolute()}: {_reason(error)}.") from error


def _download(archive: Archive, root: Path) -> None:
    assert archive.url is not None, "the caller asked for what cannot be fetched"
    target = root / archive.path
    target.parent.mkdir(parents=True, exist_ok=True)
    free = shutil.disk_usage(target.parent).free
    if archive.size is not None and free < 2 * archive.size:
        raise UserError(
            f"{target.parent.absolute()} has {megabytes(free)} free; {target.name} needs about "
            f"{megabytes(2 * archive.size)} while it is unpacked. Choose another place with data.root=DIR."
        )
    part = target.with_name(f"{target.name}.part{os.getpid()}")
    try:
        with _open(archive.url, STALL_SECONDS) as response, open(part, "wb") as file:
            length = response.headers.get("Content-Length")
            expected = int(length) if length is not None and length.isdigit() else archive.size
            with tqdm(total=expected, unit="B", unit_scale=True, desc=target.name) as bar:
                while chunk := response.read(1 << 18):
                    file.write(chunk)
                    bar.update(len(chunk))
        got = part.stat().st_size
        # http.client takes a connection that closes early for the end of the file
        if expected is not None and got < expected:
            raise UserError(
                f"The download of {archive.url} broke off after {megabytes(got)} of {megabytes(expected)}. "
                "Run the same command again."
            )
        if not check_integrity(part, archive.md5):
            raise UserError(f"{archive.url} has not the expected checksum (md5 {archive.md5}); nothing was kept.")
        os.replace(part, target)
    finally:
        part.unlink(missing_ok=True)


def _unpack(archive: Archive, root: Path) -> None:
    assert archive.unpacks is not None
    packed, target = root / archive.path, root / archive.unpacks
    if not check_integrity(packed, archive.md5):
        raise UserError(
            f"{packed.absolute()} is damaged or is not the original file (its md5 differs from {archive.md5}). "
            "Delete it and run again, or put the original there."
        )
    # beside the target and then renamed: what was interrupted is never taken for a whole data set
    with tempfile.TemporaryDirectory(prefix=".unpacking-", dir=target.parent) as scratch:
        try:
            extract_archive(packed, scratch)
        except (EOFError, tarfile.TarError, zlib.error) as error:
            raise UserError(
                f"{packed.absolute()} cannot be unpacked ({error}): incomplete or damaged. Put a whole one there."
            ) from error
        made = Path(scratch) / target.name
        if not made.is_dir():
            found = ", ".join(sorted(p.name for p in Path(scratch).iterdir())[:5]) or "nothing"
            raise UserError(f"{packed.absolute()} does not hold the folder {target.name}/ (it holds {found}).")
        if target.is_dir() and not _has_entries(target):
            target.rmdir()
        try:
            os.replace(made, target)
        except OSError:
            if archive.state(root) != "ready":  # else another process has unpacked it meanwhile
                raise


def _has_entries(folder: Path) -> bool:
    return folder.is_dir() and any(folder.iterdir())
