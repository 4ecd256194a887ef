"""Tests of predictions.npz: arrays that do not belong to one kind of task are rejected."""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.record.predictions import NAME, read_predictions, selections, write_predictions

INDEX = np.arange(3)
CLASSES = {"index": INDEX, "label": INDEX, "predicted": INDEX, "probability": np.full(3, 0.5, np.float32)}
LABELS = {"index": INDEX, "labels": np.ones((3, 2), bool), "predicted": np.zeros((3, 2), bool)}
TARGETS = {"index": INDEX, "target": np.ones((3, 2), np.float32), "predicted": np.zeros((3, 2), np.float32)}


@pytest.mark.parametrize("arrays", [CLASSES, LABELS, TARGETS])
def test_predictions_are_read_as_written(tmp_path: Path, arrays: dict[str, Any]) -> None:
    write_predictions(tmp_path, {"": {"val": arrays}})
    found = read_predictions(tmp_path)[""]["val"]
    assert found.keys() == arrays.keys()
    for name in arrays:
        np.testing.assert_array_equal(found[name], arrays[name])
    assert selections(found)


@pytest.mark.parametrize(
    "arrays",
    [
        {"index": INDEX, "predicted": INDEX},
        {name: values for name, values in CLASSES.items() if name != "probability"},
        {name: values for name, values in CLASSES.items() if name != "index"},
        {name: np.array(1) for name in CLASSES},
        {name: values[:0] for name, values in CLASSES.items()},
        {**CLASSES, "index": INDEX[:2]},
        {**CLASSES, "label": INDEX - 1},
        {**CLASSES, "predicted": np.array(["a", "b", "c"])},
        {**LABELS, "predicted": np.zeros((3, 1), bool)},
        {**LABELS, "predicted": np.zeros(3, bool)},
        {**TARGETS, "predicted": np.zeros((3, 3), np.float32)},
        {**TARGETS, "target": np.zeros((3, 2), complex)},
    ],
)
def test_arrays_that_do_not_match_are_rejected(tmp_path: Path, arrays: dict[str, Any]) -> None:
    np.savez(tmp_path / NAME, **{f"/val/{name}": values for name, values in arrays.items()})
    with pytest.raises(UserError, match=rf"{NAME} is damaged: its arrays do not match"):
        read_predictions(tmp_path)


def test_files_of_other_formats_are_rejected(tmp_path: Path) -> None:
    with open(tmp_path / NAME, "wb") as file:
        np.save(file, INDEX)
    with pytest.raises(UserError, match=rf"{NAME} is damaged"):
        read_predictions(tmp_path)


def test_damaged_compressed_data_is_rejected(tmp_path: Path) -> None:
    write_predictions(tmp_path, {"": {"val": CLASSES}})
    with zipfile.ZipFile(tmp_path / NAME) as file:
        first = file.infolist()[0]
    content = bytearray((tmp_path / NAME).read_bytes())
    name, extra = (int.from_bytes(content[at : at + 2], "little") for at in (26, 28))
    content[30 + name + extra] = 0xFF  # a type of block that does not exist
    assert first.header_offset == 0
    (tmp_path / NAME).write_bytes(content)
    with pytest.raises(UserError, match=rf"{NAME} is damaged"):
        read_predictions(tmp_path)
