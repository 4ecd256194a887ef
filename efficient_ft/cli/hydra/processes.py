"""Run jobs in separate processes that share the machine, stop them when the sweep stops, and read their outcomes."""

from __future__ import annotations

import os
import queue
import signal
import subprocess
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil

from efficient_ft.cli.exits import INTERRUPTED, OUTCOME_FILE
from efficient_ft.core.files import open_file
from efficient_ft.core.format import format_seconds
from efficient_ft.core.parsing import parse_json

#: Time in seconds between SIGTERM and SIGKILL. A process can write a checkpoint during this time.
GRACE = 60.0
#: Time in seconds between Ctrl-C and SIGTERM. A process that shares the terminal ends after Ctrl-C without SIGTERM. In
#: a notebook, Ctrl-C may reach only the parent process.
ASKED = 2.0

#: Environment variables that set the number of threads of numeric libraries. If the user has set a variable, its value
#: is kept.
_THREADS = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "NUMBA_NUM_THREADS")


@dataclass(frozen=True)
class Ended:
    """The outcome of a process: its results, or the reason for its failure in one line.

    `printed` is the output of the process if it was neither shown nor written to a file. `diverged` is True if the
    process failed because its loss was not finite. `exceeded` is True if the process needed too much memory. `killed`
    is True if a signal ended the process.
    """

    results: dict[str, Any] | None
    failure: str | None
    printed: str = ""
    diverged: bool = False
    exceeded: bool = False
    killed: bool = False


def run(
    command: Sequence[str],
    environment: Mapping[str, str] | None = None,
    output: Path | None = None,
    timeout: float | None = None,
    started: Callable[[int], None] = lambda process: None,
) -> Ended:
    """Run `command` and wait until the process ends. The process is stopped after `timeout` seconds.

    `started` is called with the id of the process.

    If `environment` is given, the output is written to the file `output`, or returned if `output` is None. Otherwise,
    the output is printed to the terminal.
    """
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as folder,
        nullcontext() if environment is None else open_file(output or Path(folder) / "printed", "ab") as printed,
    ):
        file = Path(folder) / "outcome.json"
        process = subprocess.Popen(
            command,
            env={**os.environ, **(environment or {}), OUTCOME_FILE: str(file)},
            stdout=printed,
            stderr=None if printed is None else subprocess.STDOUT,
        )
        late = ""
        try:
            _running.add(process)
            started(process.pid)
            try:
                status = process.wait(timeout)
            except subprocess.TimeoutExpired:
                assert timeout is not None
                late = f"stopped after {format_seconds(timeout)} (job_timeout)"
                if not stop(process):
                    late += f"; killed, because the process did not end within {format_seconds(GRACE)} after SIGTERM"
                status = process.wait()
        except KeyboardInterrupt:
            # Ctrl-C may not have reached the child process (see `ASKED`). The child process may finish writing.
            try:
                process.wait(ASKED)
            except subprocess.TimeoutExpired:
                process.terminate()
                process.wait()
            raise
        finally:
            if process.poll() is None:
                stop(process)
            _running.discard(process)
        outcome = _outcome(file)
        shown = (Path(folder) / "printed").read_text(errors="replace") if printed and output is None else ""
    if status == INTERRUPTED:
        raise KeyboardInterrupt
    if status == 0:
        return Ended(outcome.get("results"), None, shown)
    if late:
        return Ended(None, late, shown)
    if "reason" in outcome:
        diverged, exceeded = outcome.get("diverged", False), outcome.get("exceeded", False)
        return Ended(None, outcome["reason"], shown, diverged, exceeded, status > 128)
    if status < 0:
        name = signal.Signals(-status).name if -status in set(signal.Signals) else f"signal {-status}"
        reason = f"killed by {name}" + (", probably for lack of memory" if name == "SIGKILL" else "")
        return Ended(None, reason, shown, killed=True)
    return Ended(None, f"exit status {status}", shown, killed=status > 128)


def stop(process: subprocess.Popen[bytes]) -> bool:
    """Send SIGTERM to a process, and wait until the process and its descendants have ended.

    Processes that are still running after `GRACE` seconds are killed. Return True if `process` ended without being
    killed.
    """
    deadline = time.monotonic() + GRACE
    started = _descendants(process.pid)
    process.terminate()
    try:
        process.wait(GRACE)
        asked = True
    except subprocess.TimeoutExpired:
        asked = False
        started |= _descendants(process.pid)  # Descendants cannot be listed after `process` ends.
        process.kill()
        process.wait()
    # Wait for data-loading workers and for the other DDP processes. These processes end after the first process.
    while left := [one for one in started if _lives(one)]:
        if time.monotonic() > deadline:
            for one in left:
                with suppress(psutil.Error):
                    one.kill()
            break
        time.sleep(0.05)
    return asked


def _lives(process: psutil.Process) -> bool:
    """Return True if a process is running. A zombie process is not running."""
    with suppress(psutil.Error):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def _descendants(process: int) -> set[psutil.Process]:
    with suppress(psutil.Error):
        return set(psutil.Process(process).children(recursive=True))
    return set()


def _outcome(file: Path) -> dict[str, Any]:
    """Return the outcome that a job wrote, or an empty dict if the file is missing or incomplete."""
    try:
        found = parse_json(file.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


#: Running processes that `run` has started.
_running: set[subprocess.Popen[bytes]] = set()


class Slots:
    """Threads and GPUs of the machine, divided into slots for `count` parallel jobs.

    All slots have the same number of threads. GPUs are assigned in turn.
    """

    def __init__(self, count: int) -> None:
        threads = str(max(1, _usable_cpus() // count))
        gpus = _gpus()
        self._stopped = False
        self._free: queue.SimpleQueue[dict[str, str]] = queue.SimpleQueue()
        for index in range(count):
            share = {name: threads for name in _THREADS if name not in os.environ}
            if gpus:
                share["CUDA_VISIBLE_DEVICES"] = gpus[index % len(gpus)]
            self._free.put(share)

    @contextmanager
    def taken(self) -> Iterator[dict[str, str]]:
        """Reserve a slot for the duration of the ``with`` block, and return the environment variables of the slot."""
        share = self._free.get()
        try:
            if self._stopped:
                raise KeyboardInterrupt
            yield share
        finally:
            self._free.put(share)

    def stop(self, seconds: float) -> None:
        """Do not start further jobs, and terminate the jobs that still run after `seconds` seconds.

        A second Ctrl-C during this time terminates the jobs immediately.
        """
        try:
            self._stopped = True
            deadline = time.monotonic() + seconds
            while _running and time.monotonic() < deadline:
                time.sleep(0.05)
        finally:
            for process in list(_running):
                process.terminate()


def _usable_cpus() -> int:
    """Return the number of CPUs that this process may use. Schedulers and containers may restrict a process to some."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _gpus() -> list[str]:
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        return [name for name in visible.split(",") if name]
    try:  # Counting GPUs with torch would take seconds.
        listed = subprocess.run(["nvidia-smi", "--list-gpus"], capture_output=True, text=True, timeout=30, check=True)
    except (OSError, subprocess.SubprocessError):
        return []
    return [str(index) for index, line in enumerate(listed.stdout.splitlines()) if line.startswith("GPU ")]
