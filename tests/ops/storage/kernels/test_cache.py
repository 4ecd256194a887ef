"""Tests of the disk cache of the CPU kernels: cached code is correct in every process, and the cache does not grow."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

pytest.importorskip("numba")

#: A program that packs with all kernels of the given widths and compares the results with plain torch.
PROGRAM = """
import sys
import torch
from efficient_ft.ops.storage import groups, sparse
from efficient_ft.ops.storage.kernels import cpu

x, seed = torch.randn(3, 5000, generator=torch.Generator().manual_seed(0)), torch.tensor(12345)
for word in sys.argv[1:]:
    kind, number = word.split(":")
    if kind == "bits":
        for group in (64, 1000):
            for chosen in (None, seed):
                found = cpu.group_pack(x.view(1, -1), int(number), group, chosen)
                expected = groups.group_pack_reference(x, int(number), group, chosen)
                assert all(map(torch.equal, found, expected)), word
                back = cpu.group_unpack(*found, x.numel(), int(number), torch.float32)
                assert torch.allclose(back, groups.group_unpack_reference(*found, x.numel(), int(number))), word
    else:
        y = x.to({"2": torch.float16, "4": torch.float32, "8": torch.float64}[number])
        found = cpu.sparse_pack(y[:, None], 1000, None, sparse.SUBSAMPLE, 1)
        assert all(map(torch.equal, found, sparse.sparse_pack_reference(y, 1000, True))), word
        back = cpu.sparse_unpack(*found, 5000, y.dtype)
        assert torch.equal(back, sparse.sparse_unpack_reference(*found, 5000)), word
"""


def run(folder: Path, *words: str) -> None:
    """Run the program in a separate process with the cache in `folder`."""
    environment = {**os.environ, "NUMBA_CACHE_DIR": str(folder), "PYTHONPATH": str(REPOSITORY)}
    ended = subprocess.run([sys.executable, "-c", PROGRAM, *words], env=environment, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr


@pytest.mark.exhaustive
def test_code_cached_by_several_processes_is_right_in_one(tmp_path: Path) -> None:
    # Each process numbers its compiled functions, so different variants can have the same symbols.
    for words in (["bits:8"], ["bits:4"], ["bits:3", "bits:2"], ["bytes:2"], ["bytes:8"], ["bytes:4"]):
        run(tmp_path, *words)
    every = ["bits:2", "bits:8", "bits:3", "bits:4", "bytes:8", "bytes:4", "bytes:2"]
    run(tmp_path, *every)
    before = sorted(tmp_path.rglob("*"))
    run(tmp_path, *reversed(every))
    assert sorted(tmp_path.rglob("*")) == before, "each start leaves further files"
