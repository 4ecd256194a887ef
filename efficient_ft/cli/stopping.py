"""Signals that ask to end, outside of a training: one sentence and their status, also if a library catches them."""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import NoReturn

from efficient_ft.cli.started import first_process
from efficient_ft.core.errors import TerminatedRun
from efficient_ft.core.stopping import answer, asked, ending

#: Seconds within which a second signal is the same request: ``timeout`` sends one to its child, and one to its group.
_TOGETHER = 1.0
_last: float = -_TOGETHER


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C.

    With ``python -m``, Python kills its process by SIGINT at the end, in place of the status asked for, if a plain
    KeyboardInterrupt has ever left code that ``exec`` ran from a text, as dataclasses and other libraries do.
    """


def answer_signals() -> None:
    """Let SIGINT raise KeyboardInterrupt and other signals `TerminatedRun`, for what cleans up after itself."""
    answer(_answer)


def _answer(number: int, frame: object) -> None:
    global _last
    now, _last = _last, time.monotonic()
    asked.append(number)
    if number in asked[:-1] and number != signal.SIGINT and _last - now < _TOGETHER:
        return
    raise (_Interrupted() if number == signal.SIGINT else TerminatedRun(number))


@contextmanager
def while_loading() -> Iterator[None]:
    """End at once at a signal inside the block: an exception within an import leaves half a library, or is lost.

    There must be nothing yet that has to be cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = answer(_leave)
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    word = "Interrupted" if number == signal.SIGINT else "Terminated"
    with suppress(OSError, ValueError, AttributeError):  # closed streams
        sys.stdout.flush()
        if first_process():
            print(f"{word}. The same command starts again, or continues from the last checkpoint.", file=sys.stderr)
        sys.stderr.flush()
    os._exit(128 + number)


def leave_in_peace() -> None:
    """Ignore further requests to end, while this process says why it ends; Ctrl-C ends it at once."""
    if threading.current_thread() is threading.main_thread() and asked:
        answer(lambda number, frame: os._exit(128 + number) if number == signal.SIGINT else None)


@contextmanager
def signals_first() -> Iterator[None]:
    """Raise KeyboardInterrupt or `TerminatedRun` in place of any other exception that follows a signal.

    Libraries turn the one within a callback into an error of their own, and into others after it.
    """
    try:
        yield
    except (KeyboardInterrupt, TerminatedRun):
        raise
    except BaseException:
        if not asked:
            raise
        raise ending(asked[-1]) from None
