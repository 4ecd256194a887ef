"""Signals that ask a process to end: their numbers, those received so far, and how worker processes ignore them."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable
from typing import Any

from efficient_ft.core.errors import TerminatedRun

#: Signals by which schedulers, service managers and closed terminals ask a process to end, besides Ctrl-C (SIGINT).
TERMINATING: tuple[int, ...] = tuple(
    int(number)
    for name in ("SIGTERM", "SIGHUP", "SIGUSR1", "SIGXCPU")
    if (number := getattr(signal, name, None)) is not None  # Windows has only the first
)
#: All signals that ask a process to end.
STOPPING = (int(signal.SIGINT), *TERMINATING)
#: Those that have asked this process to end, in their order.
asked: list[int] = []


def answer(handler: Callable[[int, Any], None]) -> dict[int, Any]:
    """Install `handler` for all signals that ask to end; return the handlers before, by signal.

    SIGHUP stays ignored where ``nohup`` has set it so.
    """
    before = {}
    for number in STOPPING:
        if number != getattr(signal, "SIGHUP", None) or signal.getsignal(number) is not signal.SIG_IGN:
            before[number] = signal.signal(number, handler)
    return before


def ending(number: int) -> KeyboardInterrupt | TerminatedRun:
    """Return the exception that ends a process after a signal."""
    return KeyboardInterrupt() if number == signal.SIGINT else TerminatedRun(number)


def leave_to_parent(_: int = 0) -> None:
    """Ignore signals that ask to end, in a worker process: its parent finishes a step first, and then ends it.

    A signal often reaches a whole process group (a terminal, ``timeout``) or all processes of a job (systemd, Slurm).
    SIGTERM from the parent, by which it ends a worker that hangs, still does.
    """
    for number in STOPPING:
        if number != signal.SIGTERM:
            signal.signal(number, signal.SIG_IGN)
    if hasattr(signal, "sigwaitinfo"):
        signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGTERM})
        threading.Thread(target=_end_with_parent, args=(os.getppid(),), daemon=True).start()
    elif hasattr(os, "setpgid"):  # macOS does not tell who sent a signal
        os.setpgid(0, 0)


def _end_with_parent(parent: int) -> None:
    """Wait for SIGTERM from the process `parent`, or for any after its end, and end this process."""
    while signal.sigwaitinfo({signal.SIGTERM}).si_pid != parent and os.getppid() == parent:
        pass
    os._exit(0)
