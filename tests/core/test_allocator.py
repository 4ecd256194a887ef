"""Freed memory stays in the process, on systems with glibc."""

from __future__ import annotations

import subprocess
import sys

import pytest

from efficient_ft.core.allocator import keep_freed_memory
from tests.conftest import REPOSITORY


@pytest.mark.skipif(sys.platform != "linux", reason="glibc only")
def test_freed_memory_is_kept() -> None:
    # Resident pages after a large block is freed, in a process of its own.
    code = (
        "import sys, pathlib\n"
        "from efficient_ft.core.allocator import keep_freed_memory\n"
        "kept = keep_freed_memory() if sys.argv[1] == 'keep' else None\n"
        "resident = lambda: int(pathlib.Path('/proc/self/statm').read_text().split()[1])\n"
        "before = resident(); block = bytearray(b'x') * (64 << 20); held = resident(); del block\n"
        "print(kept, round((resident() - before) / (held - before)))\n"
    )
    said = [
        subprocess.run(
            [sys.executable, "-c", code, mode], cwd=REPOSITORY, capture_output=True, text=True, check=True
        ).stdout.strip()
        for mode in ("keep", "leave")
    ]
    if said[0].startswith("False"):
        pytest.skip("no glibc")
    assert said == ["True 1", "None 0"]


def test_elsewhere_the_allocator_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert keep_freed_memory() is False
