"""Tests of resident memory and its high-water mark, which include touched pages and exclude freed pages."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from efficient_ft.core import process_memory
from efficient_ft.core.process_memory import RESET, SAMPLED, HighWaterMark, resident_bytes
from tests.conftest import REPOSITORY

MIB = 2**20
CAN_RESET = process_memory._reset_mark()


def in_a_process(code: str) -> Any:
    """Run `code` in a fresh process, and return its output parsed as JSON."""
    begin = (  # closing a private map frees its memory
        "import json, mmap, time\n"
        "from pathlib import Path\n"
        "from efficient_ft.core import process_memory\n"
        "from efficient_ft.core.process_memory import HighWaterMark, resident_bytes\n"
        "def touch(mib):\n"
        "    private = {'flags': mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, 'MAP_PRIVATE') else {}\n"
        "    block = mmap.mmap(-1, mib << 20, **private)\n"
        "    for page in range(0, mib << 20, 4096): block[page] = 1\n"
        "    return block\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", begin + code], cwd=REPOSITORY, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


#: Code that forces a sampled mark, as if /proc were not writable. "lifetime" keeps the system's mark readable.
WAYS = {
    "reset": "",
    "sampled": "process_memory._CLEAR_REFS = process_memory._STATUS = Path('/nowhere/at/all')\n",
    "sampled, lifetime": "process_memory._CLEAR_REFS = Path('/nowhere/at/all')\n",
}


@pytest.mark.parametrize("way", WAYS)
def test_touched_memory_is_seen_and_freed_memory_is_not(way: str) -> None:
    if way == "reset" and not CAN_RESET:
        pytest.skip("the system's mark cannot be reset here")
    wait = "" if way == "reset" else "time.sleep(0.05)\n    "
    found = in_a_process(
        f"{WAYS[way]}"
        "found = []\n"
        "for mib in (200, 0, 50):\n"
        "    mark = HighWaterMark()\n"
        "    mark.start()\n"
        f"    block = touch(mib) if mib else None; {wait}\n"
        "    if block: block.close()\n"
        "    mark.stop()\n"
        "    found.append([mark.growth_bytes, mark.source, resident_bytes() - mark.before_bytes])\n"
        "print(json.dumps(found))\n"
    )
    for (growth, source, left), expected in zip(found, (200, 0, 50), strict=True):
        assert growth == pytest.approx(expected * MIB, abs=6 * MIB)
        assert left < 6 * MIB
        assert source == (RESET if way == "reset" else SAMPLED)


@pytest.mark.skipif(sys.platform != "linux", reason="the system's mark rises for good elsewhere too")
def test_a_peak_too_short_for_samples_is_read_from_the_mark_of_the_process() -> None:
    growth = in_a_process(
        f"{WAYS['sampled, lifetime']}"
        "process_memory._INTERVAL = 60\n"
        "mark = HighWaterMark()\n"
        "with mark:\n"
        "    touch(100).close()\n"
        "print(json.dumps(mark.growth_bytes))\n"
    )
    assert growth == pytest.approx(100 * MIB, abs=6 * MIB)


def test_a_mark_that_the_system_does_not_reset_is_not_used(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    status = tmp_path / "status"
    for written in (f"VmHWM:\t{(resident_bytes() + 500 * MIB) // 1024} kB\n", "Name: x\n"):
        status.write_text(written)
        monkeypatch.setattr(process_memory, "_CLEAR_REFS", tmp_path / "ignored")
        monkeypatch.setattr(process_memory, "_STATUS", status)
        mark = HighWaterMark()
        with mark:
            pass
        assert mark.source == SAMPLED
        assert mark.growth_bytes < 100 * MIB


def test_freed_memory_that_the_allocator_keeps_is_released() -> None:
    grown, left = in_a_process(
        "from efficient_ft.core.allocator import keep_freed_memory\n"
        "kept = keep_freed_memory()\n"
        "before = resident_bytes()\n"
        "block = bytearray(b'x') * (64 << 20); del block\n"
        "grown = resident_bytes() - before\n"
        "process_memory.release_freed_memory()\n"
        "print(json.dumps([grown if kept else None, resident_bytes() - before]))\n"
    )
    if grown is None:
        pytest.skip("no glibc")
    assert grown > 60 * MIB
    assert left < 6 * MIB


# ------------------------------------------------------------------------------------------------ limits
def _tree(root: Path, cgroup: str, files: dict[str, str]) -> Path:
    """Write a file system with the control groups of a process."""
    (root / "proc/self").mkdir(parents=True)
    (root / "proc/self/cgroup").write_text(cgroup)
    for name, text in files.items():
        file = root / "sys/fs/cgroup" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text)
    return root


_V1 = "9:cpu,cpuacct:/docker/a\n4:memory:/docker/a\n1:name=systemd:/docker/a\n"


@pytest.mark.parametrize(
    ("cgroup", "files", "limit"),
    [
        ("0::/app.slice/job\n", {"app.slice/job/memory.max": "1048576\n", "app.slice/memory.max": "max\n"}, 2**20),
        ("0::/app.slice/job\n", {"app.slice/job/memory.max": "max\n", "app.slice/memory.max": "4096\n"}, 4096),
        ("0::/\n", {"memory.max": "8192\n"}, 8192),
        ("0::/../host/path\n", {"memory.max": "8192\n"}, 8192),  # a container that sees only its own group
        (_V1, {"memory/docker/a/memory.limit_in_bytes": "12288\n"}, 12288),
        (_V1, {"memory/memory.limit_in_bytes": "16384\n"}, 16384),
        (_V1, {"memory/docker/a/memory.limit_in_bytes": "9223372036854771712\n"}, None),
        ("0::/\n", {"memory.max": "max\n"}, None),
        ("0::/\n", {}, None),
    ],
)
def test_the_lowest_limit_of_a_container_counts(
    tmp_path: Path, cgroup: str, files: dict[str, str], limit: int | None
) -> None:
    found = process_memory.memory_limit_bytes(_tree(tmp_path, cgroup, files))
    assert found == (psutil.virtual_memory().total if limit is None else limit)


def test_without_control_groups_the_machine_is_the_limit(tmp_path: Path) -> None:
    assert process_memory.memory_limit_bytes(tmp_path) == psutil.virtual_memory().total
    assert 0 < process_memory.memory_limit_bytes() <= psutil.virtual_memory().total


SMAPS = """\
7f00-7f10 r--p 00000000 fe:00 1    /lib/libcublasLt.so.13
Rss:                  64 kB
Anonymous:             0 kB
7f10-7f20 r-xp 00000000 fe:00 1    /lib/libcublasLt.so.13
Anonymous:             0 kB
7f20-7f30 r--p 00000000 fe:00 1    /lib/libcublasLt.so.13
Anonymous:             4 kB
7f30-7f40 rw-p 00000000 fe:00 1    /lib/libcublasLt.so.13
Anonymous:             0 kB
7f40-7f50 r-xp 00000000 fe:00 1    /lib/libtorch_cpu.so
Anonymous:             0 kB
7f50-7f60 rw-p 00000000 00:00 0
Anonymous:             0 kB
"""


def test_only_unchanged_pages_of_unused_libraries_are_released(tmp_path: Path) -> None:
    (tmp_path / "smaps").write_text(SMAPS)
    ranges = list(process_memory._unchanged_pages(tmp_path / "smaps", process_memory._UNUSED))
    assert ranges == [(0x7F00, 0x7F10), (0x7F10, 0x7F20)]  # not relocated, writable or used by steps
    assert not list(process_memory._unchanged_pages(tmp_path / "missing", process_memory._UNUSED))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="Linux only")
def test_releasing_library_pages_leaves_libraries_usable() -> None:
    code = """
import torch
before = process_memory.file_backed_bytes()
process_memory.release_library_pages()
after = process_memory.file_backed_bytes()
print(json.dumps([before, after, torch.cuda.is_available() or float((torch.ones(8, 8) @ torch.ones(8, 8)).sum())]))
"""
    before, after, product = in_a_process(code)
    assert after <= before
    assert product in (512.0, True)
