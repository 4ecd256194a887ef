"""Store rows of equal length and their checksums in files that several processes share.

A row exists if its checksum exists. The checksum is written last, so a row does not exist if a process is killed while
it writes the row. Processes that write the same row must write the same bytes. The file is not memory-mapped, because
mapped pages would count as process memory.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from io import FileIO
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor

from efficient_ft.core.errors import SettingError
from efficient_ft.core.files import open_file, refuse_link, write_text_atomically
from efficient_ft.core.format import bytes_setting, format_bytes
from efficient_ft.core.units import parse_bytes

_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}  # errors of a full disk or an exhausted quota
_WRITTEN = 1 << 32  # bit that marks a checksum as written


class StoreFullError(Exception):
    """An error that is raised if the disk has no space for another row."""


class RowStore:
    """A store of byte rows in a folder. Several processes and threads may use a store at the same time.

    The folder is created, and the description `about` is written to about.json. If a store is pickled and sent to a
    worker process, the worker opens the files again.

    Attributes:
        full: True if a row could not be written because the disk was full. Users of the store set this attribute.
    """

    full = False

    def __init__(self, folder: Path, about: Mapping[str, Any], rows: int, row_bytes: int) -> None:
        self.folder, self.rows, self.row_bytes = folder, rows, row_bytes
        folder.mkdir(parents=True, exist_ok=True)
        refuse_link(folder)
        write_text_atomically(folder / "about.json", json.dumps(about, indent=1) + "\n")
        for name, size in (("rows", rows * row_bytes), ("checksums", rows * 8)):
            with open_file(folder / name, "ab") as file:
                if os.path.getsize(folder / name) != size:
                    file.truncate(size)  # creates a sparse file
        self._reset()

    def _reset(self) -> None:
        self._process = -1
        self._lock = threading.Lock()
        self._checked = np.zeros(self.rows, dtype=bool)

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in vars(self).items() if not key.startswith("_")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._reset()

    def _open(self) -> None:
        """Open the files in this process, because a forked process would share file positions with its parent."""
        if self._process != os.getpid():
            files = (open_file(self.folder / name, "rb+", 0) for name in ("rows", "checksums"))
            self._file, self._sums = (cast(FileIO, file) for file in files)
            self._process, self._lock = os.getpid(), threading.Lock()

    @contextmanager
    def opened(self) -> Iterator[None]:
        """Open the files before threads use the store inside the ``with`` block, and close the files at the end."""
        self._open()
        try:
            yield
        finally:
            self._file.close()
            self._sums.close()
            self._process = -1

    def written(self) -> Tensor:
        """Return a boolean mask of shape (rows,) that is True for rows that have been written."""
        return torch.from_numpy(np.fromfile(self.folder / "checksums", dtype="<u8") != 0)

    def missing(self) -> int:
        """Return the number of rows that have not been written."""
        return int((~self.written()).sum())

    def read(self, rows: Sequence[int]) -> Tensor | None:
        """Read rows as uint8 (B, `row_bytes`), or return None if a row does not exist or is damaged.

        The checksum of a damaged row is erased, so the row does not exist afterwards.
        """
        self._open()
        found = np.empty((len(rows), self.row_bytes), dtype=np.uint8)
        with self._lock:
            for k, row in enumerate(rows):
                if not self._checked[row]:
                    self._sums.seek(row * 8)
                    total = int.from_bytes(self._sums.read(8), "little")
                    if not total:
                        return None
                self._file.seek(row * self.row_bytes)
                complete = self._file.readinto(memoryview(found[k])) == self.row_bytes
                if self._checked[row] and complete:
                    continue
                if not complete or total != _checksum(found[k]):
                    self._write(self._sums, row * 8, bytes(8))
                    self._checked[row] = False
                    return None
                self._checked[row] = True
        return torch.from_numpy(found)

    def write(self, rows: Sequence[int], values: Tensor) -> None:
        """Write rows, uint8 (B, `row_bytes`). Raise `StoreFullError` if the disk is full."""
        self._open()
        data = values.numpy()
        assert data.shape == (len(rows), self.row_bytes)
        assert data.dtype == np.uint8
        with self._lock:
            for k, row in enumerate(rows):
                self._write(self._file, row * self.row_bytes, np.ascontiguousarray(data[k]).data)
                self._write(self._sums, row * 8, _checksum(data[k]).to_bytes(8, "little"))

    def _write(self, file: FileIO, place: int, data: bytes | memoryview) -> None:
        left = memoryview(data)
        file.seek(place)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError as error:
            if error.errno in _NO_ROOM:
                raise StoreFullError from error
            raise


def require_room(settings: str, limit: str | int | float, stores: Mapping[Path, int], what: str, how: str) -> None:
    """Raise `SettingError` if stores exceed a limit or the free disk space.

    Args:
        settings: common prefix of the settings ``<settings>_limit`` and ``<settings>_folder``.
        limit: maximum total size of the stores, with a unit (for example, ``4GB``).
        stores: total size in bytes of the store in each folder. All folders have the same parent and need not exist.
        what: noun for the rows, used in messages.
        how: advice on avoiding the stores, shown in messages.

    Raises:
        SettingError: If `limit` is invalid or too small, or the disk does not have enough free space.
    """
    size = sum(stores.values())
    if size > parse_bytes(f"{settings}_limit", limit):
        raise SettingError(f"{settings}_limit", limit, f"at least {bytes_setting(size)} for these {what}", how)
    (parent,) = {folder.parent for folder in stores}
    there = next(path for path in (parent, *parent.absolute().parents) if path.exists())
    taken = sum(file.stat().st_blocks * 512 for folder in stores for file in folder.glob("*"))
    free = shutil.disk_usage(there).free
    if size - taken > free:
        needed = f"at least {format_bytes(size - taken)} of free space for these {what}"
        known = f"on a disk with {needed} ({format_bytes(free)} is available)"
        raise SettingError(f"{settings}_folder", parent, known, how)


def _checksum(row: np.ndarray) -> int:
    return zlib.crc32(np.ascontiguousarray(row).data) | _WRITTEN
