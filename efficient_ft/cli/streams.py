"""Handle standard streams that are closed or cannot be written."""

from __future__ import annotations

import io
import os
import sys
from contextlib import suppress
from typing import Any


class Diagnostics(io.TextIOWrapper):
    """Standard error stream that ignores write errors, e.g. on a full disk or a closed terminal."""

    def write(self, text: str) -> int:
        with suppress(OSError):
            super().write(text)
        return len(text)

    def flush(self) -> None:
        with suppress(OSError):
            super().flush()


class Output(io.TextIOWrapper):
    """Standard output stream that stores the first write error in `lost`, even if a library ignores this error."""

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
    """Open the null device for each closed standard stream, and replace the two output streams.

    `Output` and `Diagnostics` replace standard output and standard error. If a descriptor is closed (``>&-``), Python
    does not create the stream, and the next opened file would get the number of the descriptor.
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
    """Return the stream as an instance of `form`. A stream that is not a file, as in tests, is returned unchanged."""
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
    """Flush standard output. If a write has failed, redirect the output to the null device and return the error."""
    flushed: OSError | None = None
    try:
        sys.stdout.flush()
    except OSError as error:
        flushed = error
    found: OSError | None = getattr(sys.stdout, "lost", None) or flushed
    if found is not None:
        with suppress(OSError, ValueError, AttributeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return found
