"""Handle signals that end a command outside of training.

A signal takes effect even if a library discards the exception that the signal raises.
"""

from __future__ import annotations

import _thread
import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType
from typing import Any, NoReturn, cast

from efficient_ft.cli.started import first_process
from efficient_ft.core.errors import TerminatedRun
from efficient_ft.core.stopping import answer, asked, ending

#: A signal that is repeated within this time in seconds counts as one request. The program ``timeout`` sends a signal
#: both to its child process and to the process group.
_TOGETHER = 1.0
_last: float = -_TOGETHER

#: Delay in seconds before a signal is sent again if its exception was discarded.
_LATER = 0.01
#: True after `answer_signals` has installed its hook for discarded exceptions.
_hooked = False
#: True while this process forks.
_forking = False
#: Signal that arrived during a fork, or None.
_held: int | None = None


class _Interrupted(KeyboardInterrupt):
    """Exception for Ctrl-C.

    If code that ``exec`` runs from a string (for example, in dataclasses) raises a plain KeyboardInterrupt, ``python
    -m`` ends with SIGINT instead of an exit status. This subclass avoids the problem.
    """


def answer_signals() -> None:
    """Install handlers that raise KeyboardInterrupt for SIGINT and `TerminatedRun` for other signals.

    Code can clean up when these exceptions are raised. Python discards exceptions in finalizers and in callbacks of
    weak references. If an exception is discarded, the signal is sent again shortly afterwards.
    """
    global _hooked
    answer(_answer)
    if not _hooked:
        _hooked = True
        sys.unraisablehook = partial(_lost, sys.unraisablehook)


def answer_after_forks() -> None:
    """Defer signals that arrive during a fork until the fork is complete.

    Libraries hold locks in their fork callbacks, and Python discards exceptions that are raised in these callbacks.
    Call this function once, after all libraries are imported, because fork callbacks that are registered later are not
    covered.
    """
    if hasattr(os, "register_at_fork"):
        after, in_child = partial(_fork, begins=False), partial(_fork, begins=False, in_child=True)
        os.register_at_fork(before=partial(_fork, begins=True), after_in_child=in_child, after_in_parent=after)


def _answer(number: int, frame: FrameType | None) -> None:
    global _last, _held
    now, _last = _last, time.monotonic()
    asked.append(number)
    if number in asked[:-1] and number != signal.SIGINT and _last - now < _TOGETHER:
        return
    if _forking:
        _held = number
    elif _in_hook(frame):  # Python also discards exceptions that the hook raises.
        _answer_later(number)
    else:
        raise (_Interrupted() if number == signal.SIGINT else TerminatedRun(number))


def _in_hook(frame: FrameType | None) -> bool:
    """Return True if the function `_lost` is on the call stack of `frame`."""
    while frame is not None and frame.f_code is not _lost.__code__:
        frame = frame.f_back
    return frame is not None


def _fork(begins: bool, in_child: bool = False) -> None:
    global _forking, _held
    _forking = begins
    if not begins:
        if _held is not None and not in_child:
            _answer_later(_held)
        _held = None


def _lost(hook: Callable[[Any], object], unraisable: Any) -> None:
    """Send a signal again if Python has discarded the exception of the signal. Other errors are passed to `hook`."""
    error = unraisable.exc_value
    if isinstance(error, _Interrupted):
        _answer_later(signal.SIGINT)
    elif isinstance(error, TerminatedRun):
        _answer_later(int(error.code or 0) - 128)
    else:
        hook(unraisable)


def _answer_later(number: int) -> None:
    thread = threading.Timer(_LATER, _answer_again, (number,))
    thread.daemon = True
    thread.start()


def _answer_again(number: int) -> None:
    with suppress(ValueError):
        asked.remove(number)
    if hasattr(signal, "pthread_kill"):
        signal.pthread_kill(cast("int", threading.main_thread().ident), number)
    else:  # on Windows
        _thread.interrupt_main(signal.Signals(number))


@contextmanager
def while_loading() -> Iterator[None]:
    """End the process immediately if a signal arrives inside the ``with`` block.

    No exception is raised, because exceptions can be lost during imports.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = answer(leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def leave(number: int, frame: object = None) -> NoReturn:
    """Print one sentence about the signal and end the process immediately."""
    word = "Interrupted" if number == signal.SIGINT else "Terminated"
    with suppress(OSError, ValueError, AttributeError):  # The streams may be closed.
        sys.stdout.flush()
        if first_process():
            print(f"{word}. The same command restarts or continues the run.", file=sys.stderr)
        sys.stderr.flush()
    os._exit(128 + number)


def leave_in_peace() -> None:
    """Ignore further termination signals while this process prints its last message.

    Ctrl-C still ends the process immediately.
    """
    if threading.current_thread() is threading.main_thread() and asked:
        answer(lambda number, frame: os._exit(128 + number) if number == signal.SIGINT else None)


@contextmanager
def signals_first() -> Iterator[None]:
    """Raise KeyboardInterrupt or `TerminatedRun` if the ``with`` block raises another exception after a signal."""
    try:
        yield
    except (KeyboardInterrupt, TerminatedRun):
        raise
    except BaseException:
        if not asked:
            raise
        raise ending(asked[-1]) from None
