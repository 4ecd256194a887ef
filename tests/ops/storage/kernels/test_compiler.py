"""Tests of the fallback to plain operations if numba is installed but cannot compile."""

from __future__ import annotations

import subprocess
import sys

import pytest

from tests.conftest import REPOSITORY

PROGRAM = """
import logging, numba, torch
def fail(*arguments, **options):
    raise RuntimeError("cannot cache function")
numba.cfunc = fail
logging.basicConfig(format="%(levelname)s %(message)s")
from efficient_ft.ops import gelu
from efficient_ft.ops.storage.kernels import cpu
x = torch.randn(4, 64)
assert not cpu.supports(x) and gelu._kernels() is None
cpu.load()
"""


def test_a_failing_compiler_is_reported_once() -> None:
    pytest.importorskip("numba")
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=REPOSITORY, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("WARNING numba cannot compile the CPU kernels (cannot cache function).") == 1
