"""Entry point of the command line, which handles signals even while libraries are loading."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading

from efficient_ft.cli.started import malformed_environment
from efficient_ft.cli.stopping import answer_after_forks, answer_signals, leave, while_loading
from efficient_ft.cli.streams import open_streams
from efficient_ft.core.deferred_imports import defer_torchmetrics
from efficient_ft.core.errors import TerminatedRun
from efficient_ft.core.stopping import asked


def main() -> None:
    """Run the command line of this process (`efficient_ft.cli.main.main`)."""
    open_streams()
    try:
        answer_signals()
        wrong = malformed_environment() or _no_folder()
        if wrong is not None:
            print(wrong, file=sys.stderr)
            raise SystemExit(2)
        defer_torchmetrics()
        with while_loading():
            from efficient_ft.cli.main import main as run
        answer_after_forks()
        run()
    except (KeyboardInterrupt, TerminatedRun):  # The signal arrived before `run` could handle it.
        leave(asked[-1] if asked else signal.SIGINT)
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            _leave(leaving.code or 0)
        raise
    _leave(0)


def _leave(status: int) -> None:
    """Run the exit functions, flush the output, and end the process without unloading libraries.

    Unloading torch maps 120 MiB of library files into memory, which would increase the measured peak of a run with a
    memory budget.
    """
    if "torch" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # A normal exit reports closed streams.
        return
    os._exit(status)


def _no_folder() -> str | None:
    try:
        os.getcwd()
    except OSError as error:
        return f"The current folder cannot be used ({error.strerror}). Change to an existing folder."
    return None
