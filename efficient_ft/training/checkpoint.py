"""Checkpoints that survive a kill at any moment: written beside, made durable, moved into place, the last one kept.

Lightning writes through $TMPDIR and copies where that is another filesystem: a kill then leaves half a file.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from efficient_ft.core.errors import UserError

log = logging.getLogger(__name__)

NAME = "checkpoint.ckpt"


def write_atomically(path: Path, write: Callable[[Path], None]) -> None:
    """`write` to a file beside `path`, make it durable, and move it into place; `path` is whole at any moment.

    One process writes into a folder at a time, so that what a killed one left beside is written over.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    beside = path.with_name(f"{path.name}.tmp")
    try:
        write(beside)
        with open(beside, "rb+") as file:
            os.fsync(file.fileno())
        os.replace(beside, path)
    finally:
        beside.unlink(missing_ok=True)
    _sync_folder(path.parent)


def write_text_atomically(path: Path, text: str) -> None:
    write_atomically(path, lambda beside: _write_text(beside, text))


def _write_text(path: Path, text: str) -> None:
    path.write_text(text, encoding="utf-8")


def _sync_folder(folder: Path) -> None:
    """Make the move itself durable; Windows cannot open a folder for it."""
    try:
        handle = os.open(folder, os.O_RDONLY)
    except OSError:
        return
    try:
        os.fsync(handle)
    except OSError:
        pass
    finally:
        os.close(handle)


def previous(path: Path) -> Path:
    """Where the checkpoint before the one at `path` is kept."""
    return path.with_name(path.name + ".prev")


def exists(path: Path) -> bool:
    """Whether there is anything to continue from; between two moves only the previous one is there."""
    return path.is_file() or previous(path).is_file()


def read(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """The checkpoint at `path`, or the one before where it is damaged, which is said. Runs no code from the file.

    Raises:
        UserError: neither can be read.
    """
    failures = []
    for candidate in (path, previous(path)):
        if not candidate.is_file():
            continue
        try:
            checkpoint = torch.load(candidate, map_location=map_location, weights_only=True)
        except Exception as error:  # a damaged file raises zip, pickle, EOF, key and value errors alike
            failures.append(f"{candidate}: {(str(error).splitlines() or ['unreadable'])[0][:200]}")
            continue
        if failures:
            log.warning("The checkpoint %s is damaged; continuing from the one before (%s).", path, candidate.name)
        return checkpoint
    found = "\n  ".join(failures) or f"no file {path}"
    raise UserError(
        f"No checkpoint can be read:\n  {found}\nresume=never starts anew (the old folder is kept under another name)."
    )


class AtomicCheckpointIO(CheckpointIO):
    """Lightning's reading and writing of checkpoints, through `write_atomically` and `read`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)

        def write(beside: Path) -> None:
            torch.save(checkpoint, beside)
            with open(beside, "rb+") as file:
                os.fsync(file.fileno())  # before the old one loses its place
            if target.is_file():
                os.replace(target, previous(target))

        write_atomically(target, write)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        return read(Path(path), map_location or "cpu")

    def remove_checkpoint(self, path: Any) -> None:
        for file in (Path(path), previous(Path(path))):
            file.unlink(missing_ok=True)
