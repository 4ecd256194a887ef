"""The entry point of the command: it answers Ctrl-C and SIGTERM from the first moment on, while libraries load."""

from __future__ import annotations

import atexit
import os
import sys
import threading

from efficient_ft.cli.stopping import answer_signals, while_loading


def main() -> None:
    """Run the command line of this process; see `efficient_ft.cli.main.main`."""
    answer_signals()
    with while_loading():
        from efficient_ft.cli.main import main as run
    try:
        run()
    except SystemExit as leaving:
        if isinstance(leaving.code, int | None):
            _leave(leaving.code or 0)
        raise
    _leave(0)


def _leave(status: int) -> None:
    """End the process without unloading torch, whose libraries read 120 MiB of their files at the usual end.

    These would count in the peak of a process whose memory has a budget. Everything else of the usual end is done.
    """
    if "torch" not in sys.modules or threading.current_thread() is not threading.main_thread():
        return
    try:
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        sys.stdout.flush()
        sys.stderr.flush()
    except (OSError, ValueError, AttributeError):  # a closed stream, or another Python: the usual end reports it
        return
    os._exit(status)
