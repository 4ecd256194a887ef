"""Tests of the fallback to plain operations if numba is installed but cannot compile."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import REPOSITORY

#: A program that uses kernels although numba cannot compile. The argument is the reason.
PROGRAM = """
import logging, sys, torch
import numba.core.caching, numba.core.compiler

def fail(*arguments, **options):
    raise RuntimeError("cannot compile")

if sys.argv[1] == "compiler":
    numba.core.compiler.compile_extra = fail
else:
    # By default, numba would select another folder.
    numba.core.caching.CacheImpl._locator_classes = [numba.core.caching.UserProvidedCacheLocator]
logging.basicConfig(format="%(levelname)s %(message)s")
from efficient_ft.ops import gelu
from efficient_ft.ops.storage import group_pack
from efficient_ft.ops.storage.kernels import cpu
x = torch.randn(4, 64)
assert not cpu.supports(x) and gelu._kernels() is None
cpu.load()
group_pack(x, 4, 64)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("reason", "message"), [("compiler", "cannot compile"), ("folder", "cannot cache function '.*probe_job': .*")]
)
def test_a_failing_compiler_is_reported_once(reason: str, message: str, tmp_path: Path) -> None:
    pytest.importorskip("numba")
    folder = tmp_path / "cache"
    if reason == "folder":  # a file cannot be used as a folder, even by a user with all rights
        folder.write_text("")
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, reason],
        cwd=REPOSITORY,
        env={**os.environ, "NUMBA_CACHE_DIR": str(folder)},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    warning = rf"WARNING numba cannot compile the CPU kernels \({message}\)\. Plain PyTorch operations"
    assert len(re.findall(warning, done.stderr)) == 1, done.stderr
