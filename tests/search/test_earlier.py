"""Tests of stopping a process that still runs after its search was killed."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.search import earlier
from efficient_ft.search.earlier import PROPOSALS, record_process, remove_proposals, stop_earlier

#: Writes a file after SIGTERM, as a run writes its checkpoint, and ends. With "ignore", the process ignores SIGTERM.
_RUN = """
import pathlib, signal, sys, time
def end(number, frame):
    if sys.argv[2] != "ignore":
        pathlib.Path(sys.argv[1] + "/checkpoint").touch()
        sys.exit(0)
signal.signal(signal.SIGTERM, end)
pathlib.Path(sys.argv[1] + "/began").touch()
time.sleep(300)
"""


def started(folder: Path, kind: str = "") -> subprocess.Popen[bytes]:
    process = subprocess.Popen([sys.executable, "-c", _RUN, str(folder), kind])
    while not (folder / "began").exists():
        time.sleep(0.01)
    return process


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_recorded_process_is_stopped(tmp_path: Path) -> None:
    log, lines = tmp_path / "full_lr_0.1.log", list[str]()
    process = started(tmp_path)
    record_process(log, process.pid)
    assert (tmp_path / "full_lr_0.1.pid").is_file()
    stop_earlier(log, lines.append)
    assert process.wait(10) == 0
    assert (tmp_path / "checkpoint").exists()
    assert lines == [f"Stopping process {process.pid} of the earlier search, which is still running …"]
    stop_earlier(log, lines.append)
    assert len(lines) == 1


def test_another_process_with_the_same_id_is_not_stopped(tmp_path: Path) -> None:
    process = started(tmp_path)
    try:
        log, lines = tmp_path / "a.log", list[str]()
        record_process(log, process.pid)
        number, began = (tmp_path / "a.pid").read_text().split()
        for text in (f"{number} {float(began) - 60}", "damaged", "", "99999999 1.0"):
            (tmp_path / "a.pid").write_text(text)
            stop_earlier(log, lines.append)
        assert process.poll() is None
        assert not lines
    finally:
        process.kill()
        process.wait()


@pytest.mark.skipif(os.name != "posix", reason="POSIX signals")
def test_a_process_that_does_not_end_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(earlier, "WAIT", 0.2)
    process = started(tmp_path, "ignore")
    try:
        record_process(tmp_path / "a.log", process.pid)
        with pytest.raises(UserError, match=f"Process {process.pid} of the earlier search does not end"):
            stop_earlier(tmp_path / "a.log", lambda line: None)
    finally:
        process.kill()
        process.wait()


def test_files_of_the_proposals_are_removed(tmp_path: Path) -> None:
    (tmp_path / PROPOSALS).touch()
    record_process(tmp_path / PROPOSALS, os.getpid())
    assert len(list(tmp_path.iterdir())) == 2
    remove_proposals(tmp_path)
    remove_proposals(tmp_path)
    assert not list(tmp_path.iterdir())
