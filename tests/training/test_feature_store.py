"""The feature store: rows are read as they were written, after a kill, damage, a full disk, and by many processes."""

from __future__ import annotations

import errno
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efficient_ft.core.errors import UserError
from efficient_ft.training.feature_store import FORMS, FeatureStore, RowForm, StoreFullError

ABOUT = {"network": "a network"}


def rows_of(form: RowForm, count: int, seed: int = 0) -> tuple[Tensor, Tensor]:
    values = torch.randn(count, form.values, generator=torch.Generator().manual_seed(seed)) * 5
    return values, form.encode(values)


# ------------------------------------------------------------------------------------------------ forms
@settings(max_examples=30, deadline=None)
@given(values=st.integers(1, 300), count=st.integers(1, 5), dtype=st.sampled_from([torch.float32, torch.bfloat16]))
def test_values_come_back_within_the_precision_of_the_form(values: int, count: int, dtype: torch.dtype) -> None:
    x = (torch.randn(count, values, generator=torch.Generator().manual_seed(values)) * 5).to(dtype)
    for name in FORMS:
        form = RowForm(name, values)
        rows = form.encode(x)
        assert (rows.dtype, rows.shape) == (torch.uint8, (count, form.bytes))
        found = form.decode(rows)
        assert (found.dtype, found.shape) == (torch.float32, (count, values))
        if name == "fp32":
            assert torch.equal(found, x.float())
        elif name == "fp16":
            assert torch.equal(found, x.float().half().float())
        else:  # half a step of 255 of the range of a group, and the rounding of fp16
            for begin in range(0, values, 64):
                part, back = x[:, begin : begin + 64].float(), found[:, begin : begin + 64]
                span = (part.amax(1) - part.amin(1))[:, None]
                assert ((part - back).abs() <= span * (0.5 / 255 + 2e-3) + part.abs().amax() * 2e-3).all()
        alone = form.encode(x[-1:])
        assert torch.equal(alone, rows[-1:]), "a row does not depend on the others"


@pytest.mark.parametrize("name", ["fp16", "int8"])
def test_values_that_a_form_does_not_hold_are_refused(name: str) -> None:
    large = torch.tensor([[0.0, 1.0, 1e9]])
    with pytest.raises(UserError, match=rf"too large to be stored as {name}\. Store them as fp32\."):
        RowForm(name, 3).encode(large)
    assert torch.equal(RowForm("fp32", 3).decode(RowForm("fp32", 3).encode(large)), large)
    assert RowForm(name, 3).decode(RowForm(name, 3).encode(torch.tensor([[0.0, 1.0, torch.nan]])))[0, 2].isnan()


# ------------------------------------------------------------------------------------------------ rows
def a_store(folder: Path, rows: int = 10, row_bytes: int = 80) -> FeatureStore:
    return FeatureStore(folder, ABOUT, rows, row_bytes)


def test_rows_are_there_once_they_are_written_for_every_process_and_run(tmp_path: Path) -> None:
    form = RowForm("fp32", 20)
    store, (_, rows) = a_store(tmp_path / "of" / "it"), rows_of(form, 10)
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
    _, rows = rows_of(RowForm("fp32", 20), 10)
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
    _, rows = rows_of(RowForm("fp32", 20), 10)
    store = a_store(tmp_path)
    store.write([0], rows[[0]])
    monkeypatch.setattr(
        "efficient_ft.training.feature_store._checksum", lambda row: (_ for _ in ()).throw(KeyboardInterrupt)
    )
    with pytest.raises(KeyboardInterrupt):
        store.write([1], rows[[1]])
    monkeypatch.undo()
    again = a_store(tmp_path)
    assert again.written()[[0]].all()
    assert not again.written()[[1]].all()


class _Full:
    """A file on a disk that is full after some bytes."""

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
    _, rows = rows_of(RowForm("fp32", 20), 10)
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
    _, rows = rows_of(RowForm("fp32", 20), 200)
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

    _, rows = rows_of(RowForm("fp32", 20), 200)
    store = a_store(tmp_path, rows=200)

    def work(row: int) -> bool:
        store.write([row], rows[[row]])
        found = store.read([row])
        return found is not None and torch.equal(found, rows[[row]])

    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(work, range(200)))
