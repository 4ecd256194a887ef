"""Functions that write files atomically and never write through a link.

A file is never written partially, even if the process is killed or the power fails. Links are not followed, because
another user of a shared folder could create a link to a different file of this user, and that file would be
overwritten.
"""

from __future__ import annotations

import errno
import os
import stat
import tempfile
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import IO, Any

from efficient_ft.core.errors import UserError
from efficient_ft.core.terminal import shown_path

#: Prefix and suffix of the names of temporary folders.
_TEMPORARY = (".efficient_ft.", ".tmp")
#: Prefixes of the paths of the process's streams. A file cannot replace a stream.
_STREAMS = ("/dev/stdout", "/dev/stderr", "/dev/fd/", "/proc/")


def write_atomically(path: Path, write: Callable[[Path], object]) -> None:
    """Call `write` to create a temporary file, sync the file to disk, and rename the file to `path`.

    The temporary file has the same name as `path` and the default permissions of new files. The temporary file is
    created in a new folder next to `path` that only this user can access. If `path` is a link, the link is replaced,
    and the target of the link is not changed. Devices and pipes, such as ``/dev/stdout``, are written directly.
    """
    if _is_stream(path):
        write(path)
        return
    path.parent.mkdir(parents=True, exist_ok=True)
    private = Path(tempfile.mkdtemp(prefix=_TEMPORARY[0], suffix=_TEMPORARY[1], dir=path.parent))
    temporary = private / path.name
    try:
        write(temporary)
        with open(temporary, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(temporary, path)
    finally:
        _remove_folder(private)
    _sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    """Write a text as UTF-8 (see `write_atomically`)."""
    write_bytes_atomically(path, text.encode())


def write_bytes_atomically(path: Path, content: bytes) -> None:
    """Write bytes to a file (see `write_atomically`)."""
    write_atomically(path, lambda temporary: temporary.write_bytes(content))


def remove_temporary(folder: Path) -> None:
    """Remove temporary files that killed processes left in `folder`. Links are not followed.

    No other process may write to `folder` at the same time.
    """
    for entry in os.scandir(folder):
        named = entry.name.startswith(_TEMPORARY[0]) and entry.name.endswith(_TEMPORARY[1])
        if named and entry.is_dir(follow_symlinks=False):
            _remove_folder(Path(entry.path))


def open_file(path: Path, mode: str, buffering: int = -1) -> IO[Any]:
    """Open a file for writing, unless `path` is a link.

    `mode` and `buffering` are passed to `open`. Text is encoded as UTF-8.

    Raises:
        UserError: If `path` is a link.
    """
    try:
        return open(path, mode, buffering, encoding=None if "b" in mode else "utf-8", opener=_not_a_link)
    except OSError as error:
        if error.errno == errno.ELOOP:
            refuse_link(path)
        raise


def set_default_permissions(path: Path, mode: int) -> None:
    """Set the permissions `mode`, reduced by the umask of this process, as for a file that `open` creates."""
    umask = os.umask(0)
    os.umask(umask)
    path.chmod(mode & ~umask)


def refuse_link(path: Path) -> None:
    """Check that a file or folder to be written is not a link.

    Raises:
        UserError: If `path` is a link.
    """
    if os.path.islink(path):  # pathlib raises an error for a name that is too long
        raise UserError(
            f"{shown_path(path)} is a link to {shown_path(os.readlink(path))}. The target would be overwritten."
            " Remove the link, or choose another folder."
        )


def _remove_folder(private: Path) -> None:
    """Remove the files in a folder, and remove the folder if it has no subfolders. Errors are ignored."""
    with suppress(OSError):  # an error here must not hide an error from writing the file
        for file in private.iterdir():
            file.unlink()
        private.rmdir()


def _is_stream(path: Path) -> bool:
    """Return True if `path` is a device, a pipe or a stream of the process."""
    if str(path).startswith(_STREAMS):
        return True
    try:
        mode = path.stat().st_mode
    except OSError:
        return False
    return stat.S_ISCHR(mode) or stat.S_ISFIFO(mode)


def _not_a_link(path: str, flags: int) -> int:
    # Windows does not have O_NOFOLLOW, but creating links requires a privilege there.
    return os.open(path, flags | getattr(os, "O_NOFOLLOW", 0), 0o666)


def _sync_folder(folder: Path) -> None:
    """Sync `folder` to disk (not on Windows), so that a rename in `folder` survives a power failure."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        with suppress(OSError):
            os.fsync(handle)
    finally:
        os.close(handle)
