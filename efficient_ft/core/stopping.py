"""Handle termination signals: install handlers, record received signals, and ignore the signals in workers."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from efficient_ft.core.errors import TerminatedRun

#: Termination signals from schedulers, service managers and closed terminals, in addition to Ctrl-C (SIGINT).
TERMINATING: tuple[int, ...] = tuple(
    int(number)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None  # Windows has only SIGTERM
)
#: All termination signals, including Ctrl-C.
STOPPING = (int(signal.SIGINT), *TERMINATING)
#: Termination signals received so far, in order.
asked: list[int] = []


def answer(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install `handler` for all termination signals, and return the previous handlers by signal.

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
    """Ignore termination signals in a worker process. Its parent finishes a step and then ends the worker.

    A signal often reaches a whole process group (a terminal, ``timeout``) or all processes of a job (systemd, Slurm).
    SIGTERM from the parent still ends a worker.
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
