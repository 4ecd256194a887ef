"""Record the processes of a search, and stop a process that is still running after its search was killed."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil

from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_text_atomically

#: Name of the file with the output of the process that proposes recipes.
PROPOSALS = "proposals.log"
#: Maximum time in seconds in which a process ends after SIGTERM. A run first finishes its step and writes a checkpoint.
WAIT = 600.0


def record_process(log: Path, process: int) -> None:
    """Record the id and the start time of the process whose output is written to `log`."""
    with suppress(psutil.Error):  # the process may have ended
        write_text_atomically(_file(log), f"{process} {psutil.Process(process).create_time()}\n")


def stop_earlier(log: Path, say: Callable[[str], None]) -> None:
    """Stop the process whose output is written to `log` if it is still running, and wait until it ends.

    Raises:
        UserError: If the process does not end.
    """
    process, end = _earlier(log), time.monotonic() + WAIT
    if process is None:
        return
    say(f"Stopping process {process.pid} of the earlier search, which is still running …")
    with suppress(psutil.Error):
        process.terminate()
    while _earlier(log) is not None:
        if time.monotonic() > end:
            raise UserError(
                f"Process {process.pid} of the earlier search does not end. Kill the process: kill -9 {process.pid}"
            )
        time.sleep(0.05)


def remove_proposals(folder: Path) -> None:
    """Remove the files of the process that proposed recipes for the search in `folder`."""
    for file in (folder / PROPOSALS, _file(folder / PROPOSALS)):
        file.unlink(missing_ok=True)


def _file(log: Path) -> Path:
    return log.with_suffix(".pid")


def _earlier(log: Path) -> psutil.Process | None:
    """Return the recorded process if it is still running, or None."""
    with suppress(OSError, ValueError, psutil.Error):
        number, started = _file(log).read_text(encoding="utf-8").split()
        process = psutil.Process(int(number))
        # Process ids are reused, so the start times are compared.
        if abs(process.create_time() - float(started)) < 1 and process.status() != psutil.STATUS_ZOMBIE:
            return process
    return None
