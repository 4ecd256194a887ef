"""Standard streams of the command that are closed or cannot be written."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


class Diagnostics(io.TextIOWrapper):
    """Standard error that discards text which cannot be written, e.g. on a full disk or a closed terminal.

    The status and the results of a command do not depend on it.
    """

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class Output(io.TextIOWrapper):
    """Standard output that records the first failed write, even if a library ignores the error.

    Attributes:
        lost: the first error.
    """

    lost: OSError | None = None

    def write(self, text: str) -> int:
        try:
            return super().write(text)
        except OSError as error:
            self.lost = self.lost or error
            raise

    def flush(self) -> None:
        try:
            super().flush()
        except OSError as error:
            self.lost = self.lost or error
            raise


def open_streams() -> None:
    """Open the null device for each closed standard stream, and record errors of the two output streams.

    Python has no stream for a closed descriptor (``>&-``), and the next file that is opened would get its number.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            handle = os.open(os.devnull, os.O_RDWR)
            if handle != number:
                os.dup2(handle, number)
                os.close(handle)
            os.set_inheritable(number, True)
    if sys.stdin is None:
        sys.stdin = sys.__stdin__ = open(os.devnull, encoding="utf-8")  # type: ignore[misc]  # noqa: SIM115
    sys.stdout = sys.__stdout__ = _watched(1, sys.stdout, Output)  # type: ignore[misc]
    sys.stderr = sys.__stderr__ = _watched(2, sys.stderr, Diagnostics)  # type: ignore[misc]


def _watched(number: int, stream: Any, form: type[io.TextIOWrapper]) -> Any:
    """Return the stream as an instance of `form`; return a stream that is not a file, as in tests, unchanged."""
    if stream is None:
        return form(open(os.devnull, "wb"), "utf-8", "replace")
    if type(stream) is not io.TextIOWrapper:
        return stream
    with suppress(OSError):
        stream.flush()
    binary = open(number, "wb", closefd=False)  # noqa: SIM115
    lines = form is Diagnostics or stream.line_buffering
    return form(binary, stream.encoding, stream.errors, line_buffering=lines, write_through=stream.write_through)


def discard_output() -> OSError | None:
    """Flush standard output; after a failed write, redirect it to the null device and return the error."""
    found: OSError | None = None
    try:
        sys.stdout.flush()
    except OSError as error:
        found = error
    found = getattr(sys.stdout, "lost", None) or found
    if found is not None:
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return found
