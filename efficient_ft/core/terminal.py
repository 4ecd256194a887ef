"""Print wrapped text on a terminal or in a pipe, with colored warnings, above progress bars."""

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

#: Maximum width of prose, for readability.
_WIDEST_PROSE = 120
#: Replaces spaces in a path while its line is wrapped.
_SPACE = "\ue000"
#: A quoted setting in a message, which users paste into their shell.
_SETTING = re.compile(r"'[\w.]+=[^'\n]*'")
_YELLOW, _PLAIN = "\x1b[33m", "\x1b[0m"


def colored(stream: TextIO) -> bool:
    """Return True if `stream` is a terminal with colors and the user has not set ``NO_COLOR``."""
    return stream.isatty() and not os.environ.get("NO_COLOR") and os.environ.get("TERM") != "dumb"


def shown_path(path: str | os.PathLike[str]) -> str:
    """Return a path for a message, relative if it is below the current folder. Lines are not broken inside it."""
    whole = Path(path)
    with suppress(OSError, ValueError):  # outside of the current folder, or that folder was removed
        whole = whole.absolute().relative_to(Path.cwd())
    return unbroken(printable(whole))


def unbroken(text: str) -> str:
    """Return a command or path in a form that `show` does not break."""
    return text.replace(" ", _SPACE)


def wrapped(text: str, width: int) -> str:
    """Wrap long lines of `text` with an indent. Words and paths are not broken."""
    lines = []
    text = _SETTING.sub(lambda found: unbroken(found[0]), text)
    for line in text.split("\n"):
        indent = line[: len(line) - len(line.lstrip())]
        lines += filled(line, width, f"{indent}  ")
    return "\n".join(lines).replace(_SPACE, " ")


def show(text: str, stream: TextIO | None = None) -> None:
    """Print wrapped text above a progress bar. A leading ``warning:`` is yellow on a terminal.

    Args:
        text: the text. Control characters are printed as escapes.
        stream: output stream; None: the standard output.

    Raises:
        UserError: the stream cannot be written.
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
    """Return the message for a standard output that cannot be written."""
    reason = (error.strerror or str(error)).lower()
    return UserError(f"The standard output cannot be written: {reason}. Redirect it to another place.")


class ConsoleHandler(logging.StreamHandler):  # type: ignore[type-arg]
    """Show log records with `show`: from level INFO for this package, from WARNING for other libraries.

    The log file of a run (train.log) contains all records, from level DEBUG for this package.
    """

    def __init__(self, stream: TextIO | None = None) -> None:
        super().__init__(stream or sys.stdout)
        self.setLevel(logging.INFO)

    def emit(self, record: logging.LogRecord) -> None:
        """Show a record."""
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

    Args:
        verbose: show details, as the setting with this name.
        first: False for a further process of the same run, which shows only errors.
    """
    level = (logging.DEBUG if verbose else logging.INFO) if first else logging.ERROR
    for handler in logging.getLogger().handlers:
        if isinstance(handler, ConsoleHandler):
            handler.setLevel(level)
    warnings.showwarning = _show_warning if first else _show_nothing


def _show_warning(
    message: Warning | str,
    category: type[Warning],
    filename: str,
    lineno: int,
    file: TextIO | None = None,
    line: str | None = None,
) -> None:
    show(f"warning: {message}", file or sys.stdout)


def _show_nothing(*args: Any, **kwargs: Any) -> None:
    pass
