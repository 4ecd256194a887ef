"""Rows of equal length in a file, each with a checksum, read and written by several processes.

A row is there once its checksum is. Writing a row ends with its checksum, so a process that is killed leaves no half
row, and two processes that write the same row write the same bytes. Rows are read with ordinary reads: pages of a
mapped file would count as memory of the process.
"""

from __future__ import annotations

import errno
import json
import os
import shutil
import threading
import zlib
from collections.abc import Mapping, Sequence
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

#: What a disk without room, or a user without a share of it left, answers.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Marks a checksum as written.
_WRITTEN = 1 << 32


class StoreFullError(Exception):
    """The disk has no room for another row."""


class RowStore:
    """Rows of bytes in a folder; the same folder may be open in several processes and threads.

    A copy that is pickled for a worker process opens the files there again.

    Args:
        folder: of the store; created.
        about: what the rows depend on, written next to them for people.
        rows: their number.
        row_bytes: of a row.
    """

    def __init__(self, folder: Path, about: Mapping[str, Any], rows: int, row_bytes: int) -> None:
        self.folder, self.rows, self.row_bytes = folder, rows, row_bytes
        folder.mkdir(parents=True, exist_ok=True)
        refuse_link(folder)
        write_text_atomically(folder / "about.json", json.dumps(about, indent=1) + "\n")
        for name, size in (("rows", rows * row_bytes), ("checksums", rows * 8)):
            with open_file(folder / name, "ab") as file:  # creates it
                if os.path.getsize(folder / name) != size:
                    file.truncate(size)  # grows without taking space
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
        """Open the files in this process: a forked one would share the places in them with its parent."""
        if self._process != os.getpid():
            files = (open_file(self.folder / name, "rb+", 0) for name in ("rows", "checksums"))
            self._file, self._sums = (cast(FileIO, file) for file in files)
            self._process, self._lock = os.getpid(), threading.Lock()

    def written(self) -> Tensor:
        """Which rows have been written: bool (rows,)."""
        return torch.from_numpy(np.fromfile(self.folder / "checksums", dtype="<u8") != 0)

    def missing(self) -> int:
        """The number of rows not written yet."""
        return int((~self.written()).sum())

    def read(self, rows: Sequence[int]) -> Tensor | None:
        """Read rows.

        Returns:
            uint8 (B, `row_bytes`); None if one is not there, or damaged: such a row is not there from then on.
        """
        self._open()
        found = np.empty((len(rows), self.row_bytes), dtype=np.uint8)
        with self._lock:
            for k, row in enumerate(rows):
                total = 0 if self._checked[row] else self._sum(row)
                if not total and not self._checked[row]:
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
        """Write rows.

        Args:
            rows: their numbers.
            values: uint8 (B, `row_bytes`).

        Raises:
            StoreFullError: the disk has no room.
        """
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

    def _sum(self, row: int) -> int:
        self._sums.seek(row * 8)
        return int.from_bytes(self._sums.read(8), "little")


def require_room(settings: str, limit: str | int | float, stores: Mapping[Path, int], what: str, how: str) -> None:
    """Refuse rows that are larger than a limit, or than what the disk has left for them.

    Args:
        settings: the beginning of the names of two settings, ``<settings>_limit`` and ``<settings>_folder``.
        limit: the largest size, with a unit.
        stores: bytes of all rows of each store, by its folder, which need not exist; all in one folder.
        what: they are.
        how: the user can do without them.

    Raises:
        SettingError: `limit` is no size, or is too small, or the disk is too full.
    """
    size = sum(stores.values())
    if size > parse_bytes(f"{settings}_limit", limit):
        raise SettingError(f"{settings}_limit", limit, f"at least {bytes_setting(size)} for these {what}", how)
    (parent,) = {folder.parent for folder in stores}
    there = next(path for path in (parent, *parent.absolute().parents) if path.exists())
    taken = sum(file.stat().st_blocks * 512 for folder in stores for file in folder.glob("*"))
    free = shutil.disk_usage(there).free
    if size - taken > free:
        raise SettingError(
            f"{settings}_folder",
            parent,
            f"on a disk with {format_bytes(size - taken)} left for these {what} ({format_bytes(free)} are)",
            how,
        )


def _checksum(row: np.ndarray) -> int:
    """The checksum of a row's bytes; never 0."""
    return zlib.crc32(np.ascontiguousarray(row).data) | _WRITTEN
