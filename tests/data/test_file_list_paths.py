"""Tests of the storage of many file paths in a few arrays."""

from __future__ import annotations

import os
import pickle

import numpy as np

from efficient_ft.data.file_list import Paths

#: Paths with a folder, without a folder, with non-ASCII characters, and with bytes that are not valid UTF-8 (as in old
#: archives).
_PATHS = [
    os.path.join("data", "cat", "1.jpg"),
    os.path.join("data", "cat", "a", "2.jpg"),
    "3.jpg",
    os.path.join("data", "Kätzchen", "ä.jpg"),
    os.path.join("data", "cat", os.fsdecode(b"\xff4.jpg")),
]


def test_paths_are_returned_as_they_were_given() -> None:
    paths = Paths(_PATHS)
    assert list(paths) == _PATHS
    assert [paths[index] for index in (2, -1, np.int64(3))] == [_PATHS[2], _PATHS[-1], _PATHS[3]]
    assert list(pickle.loads(pickle.dumps(paths))) == _PATHS
    assert list(Paths()) == list(Paths.join([])) == []


def test_chosen_and_concatenated_paths_are_those_of_lists() -> None:
    paths = Paths(_PATHS)
    chosen = paths.take(np.asarray([3, 0, 3]))
    assert list(chosen) == [_PATHS[3], _PATHS[0], _PATHS[3]]
    joined = Paths.join([chosen, Paths(), paths])
    assert list(joined) == [*chosen, *_PATHS]
    assert list(joined.take(np.flatnonzero(np.arange(8) > 5))) == _PATHS[3:]


def test_a_path_takes_little_more_than_its_name() -> None:
    paths = Paths(f"{os.sep}a long name of a folder{os.sep}{i:06d}.jpg" for i in range(1000))
    assert len(pickle.dumps(paths.take(np.arange(1000)))) < 1000 * 28
