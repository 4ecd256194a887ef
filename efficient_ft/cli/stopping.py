"""Ctrl-C and SIGTERM outside of a training: the process ends with status 130 or 143, also if a library catches it."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import NoReturn

from efficient_ft.cli.started import first_process
from efficient_ft.core.errors import TerminatedRun

#: Signals that have asked this process to end.
_asked: list[int] = []


class _Interrupted(KeyboardInterrupt):
    """Ctrl-C.

    With ``python -m``, Python kills its process by SIGINT at the end, in place of the status asked for, if a plain
    KeyboardInterrupt has ever left code that ``exec`` ran from a text, as dataclasses and other libraries do.
    """


def answer_signals() -> None:
    """Let SIGINT raise KeyboardInterrupt and SIGTERM `TerminatedRun`, for what cleans up after itself."""
    signal.signal(signal.SIGINT, _answer)
    signal.signal(signal.SIGTERM, _answer)


def _answer(number: int, frame: object) -> NoReturn:
    _asked.append(number)
    raise (_Interrupted() if number == signal.SIGINT else TerminatedRun())


@contextmanager
def while_loading() -> Iterator[None]:
    """End at once at a signal inside the block: an exception within an import leaves half a library, or is lost.

    There must be nothing yet that has to be cleaned up.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    before = {number: signal.signal(number, _leave) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _leave(number: int, frame: object) -> NoReturn:
    word, ended = ("Interrupted", 130) if number == signal.SIGINT else ("Terminated", 143)
    sys.stdout.flush()
    if first_process():
        print(f"{word}. The same command starts again, or continues from the last checkpoint.", file=sys.stderr)
    sys.stderr.flush()
    os._exit(ended)


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
        if not _asked:
            raise
        raise (KeyboardInterrupt() if _asked[-1] == signal.SIGINT else TerminatedRun()) from None
