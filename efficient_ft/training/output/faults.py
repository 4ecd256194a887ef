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

#: Substrings of error messages of torch and safetensors for failed writes. These errors have no system error number.
_FAILED_WRITES = ("PytorchStreamWriter", "inline_container", "unexpected pos", "I/O error", "os error")

#: Substrings of gloo's error messages if another process of the run has ended.
_LOST_PROCESS = ("Connection closed by peer", "Connection reset by peer", "Broken pipe", "Timed out waiting")


def _continues(folder: Path | None) -> str:
    """Return a sentence on what happens if the command is repeated. `folder` is None if the run folder is unknown."""
    if folder is None:
        return "The same command continues from the last checkpoint, or starts again if there is no checkpoint."
    if checkpoint.exists(folder / checkpoint.NAME):
        return "Saved files are kept, and the same command continues from the last checkpoint."
    return "No checkpoint was saved, so the same command starts the run again."


def require_folder(folder: Path) -> None:
    """Raise UserError if the run folder was removed, moved or replaced after the start of the run."""
    if not (folder / config_file.NAME).is_file():
        raise UserError(
            f"{folder} is no longer the folder of this run: the folder was removed, moved or replaced during the run."
            " No files were written elsewhere. If you move the folder back, the same command continues the run."
            " Otherwise, the same command starts the run again."
        )


def refuse_lost_process(error: BaseException) -> None:
    """Raise an error that ends this process if another process of the run has ended.

    Raises:
        KeyboardInterrupt, TerminatedRun: If this process has received a signal that requests termination.
        UserError: If `error` reports that the communication with another process failed because that process has ended.
    """
    if "gloo" in str(error).lower() and any(text in str(error) for text in _LOST_PROCESS):
        if stopping.asked:
            raise stopping.ending(stopping.asked[-1]) from None
        raise UserError(
            "Another process of this run has ended. The other process failed with the message above or was killed, e.g."
            f" because memory ran out. {_continues(None)}"
        ) from error


@contextmanager
def faults_of_the_system(folder: Path, begun: Callable[[], bool] = lambda: True) -> Iterator[None]:
    """Inside a ``with`` block, convert system errors in the run folder to errors whose messages name the folder.

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
        raise UserError(f"The run folder {folder} cannot be written: {reason}. {_continues(folder)}") from error


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
