"""Functions that install handlers for termination signals, record received signals, and ignore signals in workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from efficient_ft.core.errors import TerminatedRun

#: Termination signals other than SIGINT (Ctrl-C). Schedulers, service managers and closed terminals send these signals.
TERMINATING: tuple[int, ...] = tuple(
    int(number)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None  # Windows supports only SIGTERM
)
#: All termination signals, including Ctrl-C.
STOPPING = (int(signal.SIGINT), *TERMINATING)
#: Termination signals received so far, in order.
asked: list[int] = []


def answer(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install `handler` for all termination signals, and return a dict from signals to their previous handlers.

    If SIGHUP is already ignored (as with ``nohup``), it remains ignored.
    """
    before = {}
    for number in STOPPING:
        if number != getattr(signal, "SIGHUP", None) or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before


def ending(number: int) -> KeyboardInterrupt | TerminatedRun:
    """Return the exception that ends a process after the signal `number`."""
    return KeyboardInterrupt() if number == signal.SIGINT else TerminatedRun(number)


def leave_to_parent(_: int = 0) -> None:
    """Ignore termination signals in a worker process. The parent process finishes a step and then ends the worker.

    Terminals and ``timeout`` often send a signal to a whole process group. Service managers and schedulers (systemd,
    Slurm) often send a signal to all processes of a job. A SIGTERM from the parent process still ends a worker.
    """
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    elif hasattr(os, "setpgid"):  # macOS does not report the sender of a signal
        os.setpgid(0, 0)


def _end_with_parent(parent: int) -> None:
    """End this process after a SIGTERM from the process `parent`, or after any SIGTERM if `parent` has ended."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
        pass
    os._exit(0)
