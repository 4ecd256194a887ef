"""Tests of the row store: rows are correct after a kill, damage or a full disk, and with concurrent processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from efficient_ft.data.row_store import RowStore, StoreFullError

ABOUT = {"network": "a network"}


def bytes_of(rows: int, row_bytes: int = 80) -> Tensor:
    return torch.randint(256, (rows, row_bytes), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


def a_store(folder: Path, rows: int = 10, row_bytes: int = 80) -> RowStore:
    return RowStore(folder, ABOUT, rows, row_bytes)


def test_rows_are_there_once_they_are_written_for_every_process_and_run(tmp_path: Path) -> None:
    store, rows = a_store(tmp_path / "of" / "it"), bytes_of(10)
    assert store.missing() == 10
    assert store.read([0]) is None
    store.write([7, 0], rows[[7, 0]])
    for one in (store, a_store(tmp_path / "of" / "it"), pickle.loads(pickle.dumps(store))):
        assert one.written()[[0, 7, 0]].all()
        assert not one.written()[[0, 1]].all()
        assert one.missing() == 8
        found = one.read([0, 7])
        assert found is not None
        assert torch.equal(found, rows[[0, 7]])
        assert one.read([7, 3]) is None
    assert (tmp_path / "of" / "it" / "about.json").read_text().count("a network") == 1


def test_a_store_takes_no_space_before_its_rows(tmp_path: Path) -> None:
    a_store(tmp_path, rows=10**6, row_bytes=10**5)
    assert (tmp_path / "rows").stat().st_size == 10**11
    assert (tmp_path / "rows").stat().st_blocks * 512 < 10**6


@pytest.mark.parametrize("damage", ["bytes", "shorter"])
def test_a_damaged_row_is_not_there_until_it_is_written_again(tmp_path: Path, damage: str) -> None:
    rows = bytes_of(10)
    a_store(tmp_path).write(range(10), rows)
    if damage == "bytes":
        with open(tmp_path / "rows", "r+b") as file:
            file.seek(3 * 80 + 17)
            file.write(b"\x00\x01\x02")
    else:
        os.truncate(tmp_path / "rows", 3 * 80 + 17)
    store = a_store(tmp_path)
    assert torch.equal(store.read([2]), rows[[2]])  # type: ignore[arg-type]
    assert store.read([2, 3]) is None
    assert not store.written()[[3]].all()
    store.write([3], rows[[3]])
    assert torch.equal(store.read([3]), rows[[3]])  # type: ignore[arg-type]


def test_a_row_cut_off_in_writing_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = bytes_of(10)
    store = a_store(tmp_path)
    store.write([0], rows[[0]])
    monkeypatch.setattr("efficient_ft.data.row_store._checksum", lambda row: (_ for _ in ()).throw(KeyboardInterrupt))
    with pytest.raises(KeyboardInterrupt):
        store.write([1], rows[[1]])
    monkeypatch.undo()
    again = a_store(tmp_path)
    assert again.written()[[0]].all()
    assert not again.written()[[1]].all()


class _Full:
    """A file on a disk that is full after `left` bytes."""

    def __init__(self, left: int) -> None:
        self.left = left

    def seek(self, place: int) -> None:
        pass

    def write(self, data: memoryview) -> int:
        if not self.left:
            raise OSError(errno.ENOSPC, "No space left on device")
        written, self.left = min(self.left, len(data)), max(0, self.left - len(data))
        return written


def test_a_full_disk_is_told_apart_from_other_errors(tmp_path: Path) -> None:
    rows = bytes_of(10)
    store = a_store(tmp_path)
    assert store.read([0]) is None  # opens the files
    store._file = _Full(100)  # type: ignore[assignment]
    with pytest.raises(StoreFullError):
        store.write([0, 1], rows[:2])
    assert not store.written()[[1]].all()


def _write_share(folder: Path, share: int, rows: Tensor) -> None:
    store = a_store(folder, rows=len(rows), row_bytes=rows.shape[1])
    for row in np.random.default_rng(share).permutation(len(rows)).tolist():
        store.write([row], rows[[row]])


def test_several_processes_write_the_same_store(tmp_path: Path) -> None:
    rows = bytes_of(200)
    processes = [multiprocessing.Process(target=_write_share, args=(tmp_path, share, rows)) for share in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
        assert process.exitcode == 0
    store = a_store(tmp_path, rows=200)
    assert store.missing() == 0
    assert torch.equal(store.read(range(200)), rows)  # type: ignore[arg-type]


def test_threads_read_and_write_at_once(tmp_path: Path) -> None:
    from concurrent.futures import ThreadPoolExecutor

    rows = bytes_of(200)
    store = a_store(tmp_path, rows=200)

    def work(row: int) -> bool:
        store.write([row], rows[[row]])
        found = store.read([row])
        return found is not None and torch.equal(found, rows[[row]])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
