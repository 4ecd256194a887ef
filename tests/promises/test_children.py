"""Tests of child processes of trials: returned values, exit statuses, and no remaining processes."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing import forkserver
from pathlib import Path

import pytest

from tests.promises.children import Child, prepare_environment, returned, run_child, wait_until
from tests.promises.trial import BrokenPromiseError

pytestmark = [
    pytest.mark.slow,  # the server imports every library
    pytest.mark.skipif(sys.platform == "win32", reason="forks processes"),
]


@pytest.fixture(autouse=True, scope="module")
def _environment() -> None:
    prepare_environment()


def _twice(number: int) -> int:
    print("printed")
    return 2 * number


def _nothing() -> None:
    pass


def _raise() -> None:
    raise RuntimeError("a mistake")


def _leave() -> None:
    print("last words", flush=True)
    sys.exit(3)


def _hang_with_a_child(file: Path) -> None:
    process = subprocess.Popen(["sleep", "600"])
    file.write_text(str(process.pid))
    time.sleep(600)


def _environment_of(name: str) -> tuple[str, int]:
    import torch

    return os.environ[name], torch.get_num_threads()


def test_a_child_returns_a_value_and_its_output_is_kept(tmp_path: Path) -> None:
    done = run_child(_twice, 21, output=tmp_path / "log")
    assert (done.status, done.value, done.said) == (0, 42, "printed")
    assert returned(_environment_of, "MINE", output=tmp_path / "log2", environment={"MINE": "here"}) == ("here", 1)


def test_children_of_several_threads_keep_their_status(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    read, read_twice = forkserver.read_signed, []

    def slowly(handle: int) -> int:
        time.sleep(0.1)
        try:
            return read(handle)
        except EOFError:
            read_twice.append(handle)
            raise

    monkeypatch.setattr(forkserver, "read_signed", slowly)

    def statuses(thread: int) -> set[int]:
        return {run_child(_nothing, output=tmp_path / f"{thread}_{number}").status for number in range(8)}

    with ThreadPoolExecutor(4) as pool:
        assert set().union(*pool.map(statuses, range(4))) == {0}
    assert not read_twice


def test_exceptions_exits_and_signals_have_their_status(tmp_path: Path) -> None:
    raised = run_child(_raise, output=tmp_path / "raised")
    assert raised.status == 1
    assert "RuntimeError: a mistake" in raised.printed
    left = run_child(_leave, output=tmp_path / "left")
    assert (left.status, left.value, left.said) == (3, None, "last words")
    with pytest.raises(BrokenPromiseError, match="status 3:\nlast words"):
        returned(_leave, output=tmp_path / "again")
    killed = Child(_hang_with_a_child, tmp_path / "pid", output=tmp_path / "killed")
    assert wait_until((tmp_path / "pid").exists, 60)
    killed.signal(signal.SIGKILL)
    assert killed.ended().status == -signal.SIGKILL


def test_a_child_that_hangs_is_killed_with_all_that_it_started(tmp_path: Path) -> None:
    file = tmp_path / "pid"
    child = Child(_hang_with_a_child, file, output=tmp_path / "log")
    assert wait_until(lambda: file.exists() and bool(file.read_text()), 60)
    with pytest.raises(BrokenPromiseError, match="ran longer than 100 ms"):
        child.ended(0.1)
    started = Path("/proc") / file.read_text() / "stat"
    if Path("/proc/self/stat").exists():
        assert wait_until(lambda: not started.exists() or started.read_text().rsplit(")", 1)[1].split()[0] == "Z", 10)
