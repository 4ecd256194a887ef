"""Tests of signals that arrive while the command imports its libraries."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.training.runs import REPOSITORY

pytestmark = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")


def _catches(process: int, number: int) -> bool:
    """Return True if a process has a handler for a signal."""
    found = re.search(r"^SigCgt:\s*(\w+)", Path(f"/proc/{process}/status").read_text(), re.MULTILINE)
    return found is not None and bool(int(found[1], 16) >> (number - 1) & 1)


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "Interrupted"), (signal.SIGTERM, 143, "Terminated")]
)
def test_a_signal_before_the_training_is_one_sentence(
    number: signal.Signals, status: int, said: str, tmp_path: Path
) -> None:
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    command = [sys.executable, "-m", "efficient_ft", "trainer.progress=false"]
    process = subprocess.Popen(
        command, cwd=tmp_path, env=env, stderr=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    )
    end = time.monotonic() + 60
    while not _catches(process.pid, signal.SIGTERM) and time.monotonic() < end:
        time.sleep(0.005)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode == status, error
    assert "Traceback" not in error
    assert said in error


@pytest.mark.parametrize(("number", "said"), [(signal.SIGINT, "Interrupted"), (signal.SIGTERM, "Terminated")])
def test_a_signal_before_libraries_are_loaded_is_one_sentence(number: signal.Signals, said: str) -> None:
    code = f"""
import signal
from efficient_ft.cli import entry
entry.malformed_environment = lambda: signal.raise_signal({int(number)})
entry.main()
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=REPOSITORY, capture_output=True, text=True, timeout=60)
    assert done.returncode == 128 + number
    assert done.stderr.startswith(said)
    assert done.stderr.count("\n") == 1
