"""End a command with an exit status and an error message, and report the outcome to the sweep."""

from __future__ import annotations

import errno
import os
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NoReturn

from efficient_ft.cli.stopping import leave_in_peace, signals_first
from efficient_ft.cli.streams import discard_output
from efficient_ft.core.errors import DivergedError, MemoryLimitError, TerminatedRun, UserError, on_command_line
from efficient_ft.core.terminal import show, unwritable
from efficient_ft.core.text import plain_text
from efficient_ft.record.files import json_text

#: Environment variable with the path of the file in which a sweep job stores its outcome.
OUTCOME_FILE = "EFFICIENT_FT_OUTCOME_FILE"

#: Error numbers of file system errors that the user can correct, for example a missing permission.
_OF_THE_SYSTEM = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENOSPC, errno.EDQUOT, errno.EEXIST, errno.ENOTDIR,
                  errno.EISDIR, errno.ENAMETOOLONG, errno.ELOOP}  # fmt: skip

#: Error numbers of a full disk or quota. An error of ``write`` does not name the file.
_FULL = {errno.ENOSPC, errno.EDQUOT}

#: Exit status of an interrupted command, as in shells.
INTERRUPTED = 130

INTERRUPTED_TEXT = "Interrupted. The same command continues the run from the last checkpoint."


def report_outcome(**outcome: Any) -> None:
    """Report the ``results`` of this run, or the ``reason`` of a failure, to the sweep that started the run."""
    if OUTCOME_FILE in os.environ:
        Path(os.environ[OUTCOME_FILE]).write_text(json_text(outcome), encoding="utf-8")


def fail(error: UserError | str, status: int = 2) -> NoReturn:
    """Print the wrapped text of `error` to stderr, without a traceback, and exit with `status`."""
    leave_in_peace()
    text = plain_text(str(error))
    discard_output()
    show(text, sys.stderr)
    kind = {"diverged": isinstance(error, DivergedError), "exceeded": isinstance(error, MemoryLimitError)}
    report_outcome(reason=text.splitlines()[0], **kind)
    raise SystemExit(status)


def of_the_system(error: OSError) -> UserError | None:
    """Return a `UserError` if the user can correct the file system error `error`, or None otherwise."""
    if error.filename is None and error.errno in _FULL:
        return UserError(f"A file could not be written: {error.strerror}. Free space, and repeat the command.")
    if error.filename is None or error.errno not in _OF_THE_SYSTEM:
        return None
    return UserError(f"{os.fsdecode(error.filename)}: {error.strerror}.")


def leave_closed_pipe() -> NoReturn:
    """Exit with the status of SIGPIPE after the reader of the output (for example, ``| head``) has closed the pipe."""
    discard_output()
    raise SystemExit(128 + 13) from None  # The number of SIGPIPE is 13.


@contextmanager
def clean_exits(interrupted: str = INTERRUPTED_TEXT) -> Iterator[None]:
    """Convert user mistakes, interrupts and closed pipes inside the ``with`` block to exit statuses.

    For a `UserError`, the text of the error is printed and the status is 2. For Ctrl-C, the text `interrupted` is
    printed and the status is 130. Other exceptions propagate with their traceback.
    """
    try:
        with signals_first(), on_command_line():
            yield
            if (lost := discard_output()) is not None:
                raise lost
    except UserError as error:
        fail(error)
    except KeyboardInterrupt:
        fail(interrupted, INTERRUPTED)
    except TerminatedRun as terminated:
        fail(interrupted.replace("Interrupted", "Terminated"), int(terminated.code or 1))
    except SystemExit as leaving:
        # Lightning raises SystemExit if a fit is interrupted.
        if isinstance(leaving.__context__, KeyboardInterrupt):
            fail(interrupted, INTERRUPTED)
        lost = discard_output()
        if isinstance(lost, BrokenPipeError):
            leave_closed_pipe()
        if lost is not None and not leaving.code:
            fail(unwritable(lost))
        raise
    except BrokenPipeError:
        leave_closed_pipe()
    except OSError as error:
        of_output = error.filename is None and discard_output() is not None
        said = unwritable(error) if of_output else of_the_system(error)
        if said is None:
            report_outcome(reason=f"{type(error).__name__}: {error}")
            raise
        fail(said)
    except Exception as error:
        report_outcome(reason="".join(traceback.format_exception_only(error)).strip().splitlines()[-1])
        raise
