"""Functions that print wrapped text to a terminal or pipe, above progress bars and with colored warnings."""

from __future__ import annotations

import logging
import os
import re
import sys
import warnings
from contextlib import nullcontext, suppress
from pathlib import Path
from typing import Any, TextIO

from efficient_ft.core.errors import UserError
from efficient_ft.core.text import filled, plain_text, printable, terminal_width

#: Maximum line width of printed text in terminal columns, for readability.
_WIDEST_PROSE = 120
#: Placeholder for the spaces of a path while a line is wrapped.
_SPACE = "\ue000"
#: Pattern of a quoted setting in a message. Settings are not split across lines, so that users can paste them into a
#: shell.
_SETTING = re.compile(r"'[\w.]+=[^'\n]*'")
_YELLOW, _PLAIN = "\x1b[33m", "\x1b[0m"


def colored(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal that supports colors and ``NO_COLOR`` is not set."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown_path(path: str | os.PathLike[str]) -> str:
    """Format a path for a message.

    A path inside the current folder is made relative. `show` does not break lines inside the path.
    """
    whole = Path(path)
    with suppress(OSError, ValueError):  # the path is outside the current folder, or the folder was removed
        whole = whole.absolute().relative_to(Path.cwd())
    return unbroken(printable(whole))


def unbroken(text: str) -> str:
    """Mark a command or path so that `show` does not break it."""
    return text.replace(" ", _SPACE)


def wrapped(text: str, width: int) -> str:
    """Wrap long lines of `text`, and indent continuation lines. Lines are not broken inside words and paths."""
    lines = []
    text = _SETTING.sub(lambda found: unbroken(found[0]), text)
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += filled(line, width, f"{indent}  ")
    return "\n".join(lines).replace(_SPACE, " ")


def show(text: str, stream: TextIO | None = None) -> None:
    """Print wrapped text above the progress bars, by default to the standard output.

    A leading ``warning:`` is yellow on a terminal. Control characters are printed as escape sequences.

    Raises:
        UserError: If the stream cannot be written.
    """
    stream = stream or sys.stdout
    lines = wrapped(plain_text(text), min(terminal_width(stream, least=1), _WIDEST_PROSE))
    if lines.startswith("warning:") and colored(stream):
        lines = f"{_YELLOW}warning:{_PLAIN}{lines.removeprefix('warning:')}"
    bars: Any = getattr(sys.modules.get("tqdm"), "tqdm", None)
    with nullcontext() if bars is None else bars.external_write_mode(file=stream):
        try:
            print(lines, file=stream, flush=True)
        except BrokenPipeError:
            raise
        except OSError as error:
            raise unwritable(error) from error


def unwritable(error: OSError) -> UserError:
    """Return the error to raise if the standard output cannot be written."""
    reason = (error.strerror or str(error)).lower()
    return UserError(f"The standard output cannot be written: {reason}. Redirect the output to another file or device.")


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Handler that prints log records of this package (INFO and above) and of other packages (WARNING and above).

    The log file of a run (train.log) also contains the DEBUG records of this package.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stdout)
        self.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Print `record`."""
        try:
            own = record.name.partition(".")[0] in ("efficient_ft", "__main__", "root")
            if own or record.levelno >= logging.WARNING:
                text = self.format(record)
                warns = record.levelno >= logging.WARNING and not text.startswith("warning:")
                show(f"warning: {text}" if warns else text, self.stream)
        except Exception:
            self.handleError(record)


def start_console(verbose: bool, first: bool = True) -> None:
    """Set up the console output of a program of this package.

    If `verbose` is True, details are also printed. If `first` is False (for additional processes of a run), only errors
    are printed.
    """
    level = (logging.DEBUG if verbose else logging.INFO) if first else logging.ERROR
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ConsoleHandler):
            handler.setLevel(level)

    def show_warning(
        message: Warning | str, category: object, filename: str, lineno: int, file: Any = None, line: Any = None
    ) -> None:
        if first:
            show(f"warning: {message}", file)

    warnings.showwarning = show_warning
