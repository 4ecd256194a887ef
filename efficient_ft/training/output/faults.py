"""Messages for system errors that occur while a run writes into its folder, e.g. a full disk or a removed folder."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

from safetensors import SafetensorError

from efficient_ft.core import stopping
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.record import config_file
from efficient_ft.training.output import checkpoint

#: Substrings of the messages of torch and safetensors for a failed write. These errors have no system error number.
_FAILED_WRITES = ("PytorchStreamWriter", "inline_container", "unexpected pos", "I/O error", "os error")

#: Substrings of the messages of gloo after another process of the run has ended.
_LOST_PROCESS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


def _continues(folder: Path | None) -> str:
    """Return a sentence that states what a repeated command would do. `folder` is None if it is not known."""
    if folder is None:
        return "The same command continues from the last checkpoint, or starts again if there is none."
    if checkpoint.exists(folder / checkpoint.NAME):
        return "Saved files are kept, and the same command continues from the last checkpoint."
    return "Nothing was saved yet, so the same command starts again."


def require_folder(folder: Path) -> None:
    """Raise UserError if the run folder was removed, moved or replaced after the start of the run."""
    if not (folder / config_file.NAME).is_file():
        raise UserError(
            f"{folder} is no longer the folder of this run: it was removed, moved or replaced while the run was writing"
            " into it. Nothing was written to another place. If you move it back, the same command continues."
            " Otherwise, the same command starts again."
        )


def refuse_lost_process(error: BaseException) -> None:
    """Raise an error that ends this process if another process of the run has ended.

    Raises:
        KeyboardInterrupt, TerminatedRun: If this process has received a signal that requests its end.
        UserError: If `error` reports a failed exchange with a process that has ended.
    """
    if "gloo" in str(error).lower() and any(text in str(error) for text in _LOST_PROCESS):
        if stopping.asked:
            raise stopping.ending(stopping.asked[-1]) from None
        raise UserError(
            "Another process of this run has ended. It failed with the message above, or it was killed, e.g. because"
            f" memory ran out. {_continues(None)}"
        ) from error


@contextmanager
def faults_of_the_system(folder: Path, begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside a ``with`` block, convert system errors in the run folder to error messages that name the folder.

    `begun` returns True if the run has written its configuration into the folder.

    Raises:
        UserError: If the disk is full, if the folder was removed, if a permission is missing, or if another process has
            ended.
    """
    try:
        yield
    except BrokenPipeError:  # the reader of the output closed the pipe, e.g. `| head`
        raise
    except (OSError, RuntimeError, SafetensorError) as error:
        refuse_lost_process(error)
        reason = _reason(error, folder)
        if reason is None:
            raise
        if begun():
            require_folder(folder)
        raise UserError(f"{folder} cannot be written: {reason}. {_continues(folder)}") from error


def _reason(error: Exception, folder: Path) -> str | None:
    """Return a description of the system error, or None for other errors and for errors in another folder."""
    if isinstance(error, OSError) and error.errno is not None:
        name = error.filename
        elsewhere = name is not None and folder.resolve() not in (place := Path(os.fsdecode(name)).resolve()).parents
        if elsewhere and place != folder.resolve():
            return None
        said = os.strerror(error.errno).lower()
        if error.errno in (errno.EISDIR, errno.ENOTDIR):
            return f"{os.fsdecode(error.filename2 or name or folder)} {said.replace('is a directory', 'is a folder')}"
        return f"{said}{free_space(folder) if error.errno in (errno.ENOSPC, errno.EDQUOT) else ''}"
    if any(text in str(error) for text in _FAILED_WRITES):
        return f"the system did not write all bytes{free_space(folder)}"
    return None


def free_space(folder: Path) -> str:
    """Return a clause that states the free space on the disk of `folder`. The folder need not exist."""
    place = next((one for one in (folder, *folder.parents) if one.is_dir()), None)
    return "" if place is None else f"; {format_bytes(shutil.disk_usage(place).free)} are free"
