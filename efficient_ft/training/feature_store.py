"""Features of images in a file: rows of equal length, each with a checksum, read and written by several processes.

A row is there once its checksum is. Writing a row ends with its checksum, so a process that is killed leaves no half
row, and two processes that write the same row write the same bytes. Rows are read with ordinary reads: pages of a
mapped file would count as memory of the process.
"""

from __future__ import annotations

import errno
import json
import os
import threading
import zlib
from collections.abc import Mapping, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efficient_ft.core.errors import UserError
from efficient_ft.ops.packing.groups import group_pack, group_unpack

#: Ways in which values are stored.
FORMS = ("fp32", "fp16", "int8")

#: Values of a group with 8 bits, which has a minimum and a step.
_GROUP = 64
#: What a disk without room, or a user without a share of it left, answers.
_NO_ROOM = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG}
#: Marks a checksum as written.
_WRITTEN = 1 << 32


class StoreFullError(Exception):
    """The disk has no room for another row."""


class RowForm:
    """How a row of values is stored.

    Args:
        name: one of `FORMS`. ``int8`` is groups of 64 values with 8 bits each, and a minimum and a step in fp16.
        values: of a row.
    """

    def __init__(self, name: str, values: int) -> None:
        assert name in FORMS
        self.name, self.values = name, values
        self._groups = -(-values // _GROUP)
        #: Of a row.
        self.bytes = {"fp32": 4 * values, "fp16": 2 * values, "int8": self._groups * (_GROUP + 4)}[name]

    def encode(self, values: Tensor) -> Tensor:
        """Return values (B, n) of any floating type as bytes (B, `bytes`).

        Raises:
            UserError: a value is too large for the form.
        """
        values = values.float()
        if self.name == "fp32":
            return values.contiguous().view(torch.uint8)
        if self.name == "fp16":
            halves = values.half()
            self._require(halves.isfinite() | ~values.isfinite())
            return halves.contiguous().view(torch.uint8)
        last = values[:, -1:].expand(-1, self._groups * _GROUP - self.values)
        codes, ranges = group_pack(torch.cat([values, last], 1), 8, _GROUP)
        self._require(ranges.isfinite().all() | ~values.isfinite().all())
        of_rows = ranges.view(2, len(values), -1).transpose(0, 1).flatten(1).contiguous()
        return torch.cat([codes.view(len(values), -1), of_rows.view(torch.uint8)], 1)

    def decode(self, rows: Tensor) -> Tensor:
        """Return the values (B, n), fp32, of bytes (B, `bytes`)."""
        if self.name == "fp32":
            return rows.view(torch.float32)
        if self.name == "fp16":
            return rows.view(torch.float16).float()
        codes, of_rows = rows.split([self._groups * _GROUP, 4 * self._groups], 1)
        ranges = of_rows.contiguous().view(torch.float16).view(len(rows), 2, -1).transpose(0, 1)
        flat = group_unpack(
            codes.reshape(-1, _GROUP), ranges.reshape(2, -1).contiguous(), codes.numel(), 8, torch.float32
        )
        return flat.view(len(rows), -1)[:, : self.values]

    def _require(self, fits: Tensor) -> None:
        if not fits.all():
            raise UserError(
                f"The features have values that are too large to be stored as {self.name}. Store them as fp32."
            )


class FeatureStore:
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
        new = folder / f"about.json.{os.getpid()}"
        new.write_text(json.dumps(about, indent=1) + "\n", encoding="utf-8")
        os.replace(new, folder / "about.json")
        for name, size in (("rows", rows * row_bytes), ("checksums", rows * 8)):
            with open(folder / name, "ab") as file:  # creates it
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
            self._file, self._sums = (FileIO(self.folder / name, "r+") for name in ("rows", "checksums"))
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


def _checksum(row: np.ndarray) -> int:
    """The checksum of a row's bytes; never 0."""
    return zlib.crc32(np.ascontiguousarray(row).data) | _WRITTEN
