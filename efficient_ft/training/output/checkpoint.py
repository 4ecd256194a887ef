"""Write and read checkpoints. Writing is atomic: if the process is killed at any time, a complete checkpoint remains.

The previous checkpoint is kept. Lightning's plugin writes to $TMPDIR, and copies the file if $TMPDIR is on another
filesystem. If the process is killed during the copy, a partial file remains.
"""

from __future__ import annotations

import logging
import os
import zipfile
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins import CheckpointIO

from efficient_ft.core.errors import UserError, why_unreadable
from efficient_ft.core.terminal import shown_path
from efficient_ft.core.text import printable
from efficient_ft.record.files import write_atomically
from efficient_ft.record.formats import FORMAT, START_AGAIN, check_format

log = logging.getLogger(__name__)

NAME = "checkpoint.ckpt"
#: Name of the file that contains the id of a run. Every checkpoint of the run also contains the id.
RUN_ID = "run_id"
#: Key of the format number in a checkpoint.
_FORMAT_KEY = "efficient_ft_format"


def previous(path: Path) -> Path:
    """Return the path of the previous checkpoint, given the path of the last checkpoint."""
    return path.with_name(path.name + ".prev")


def exists(path: Path) -> bool:
    """Return True if a checkpoint exists. Between the two renames of a save, only the previous checkpoint exists."""
    return path.is_file() or previous(path).is_file()


def read(path: Path, map_location: Any = "cpu") -> dict[str, Any]:
    """Load the checkpoint at `path`. If the file is damaged, load the previous checkpoint and log a warning.

    No code in the file is executed. The checksums are verified, because `torch.load` would accept changed values.

    Raises:
        OtherVersionError: If another version of this package wrote the checkpoint.
        UserError: If neither checkpoint can be read.
    """
    failures = []
    for candidate in (path, previous(path)):
        if not candidate.is_file():
            continue
        try:
            with zipfile.ZipFile(candidate) as archive:
                damaged = archive.testzip()
            if damaged is not None:
                raise ValueError(f"the checksum of the entry {damaged} does not match")
            checkpoint = torch.load(candidate, map_location=map_location, weights_only=True)
        except Exception as error:  # damaged files cause zip, pickle, EOF, key or value errors
            failures.append(f"{candidate}: {why_unreadable(error)}")
            continue
        if not _has_weights(checkpoint):
            failures.append(f"{candidate}: the file is not a checkpoint of a run")
            continue
        check_format(candidate, checkpoint.get(_FORMAT_KEY), START_AGAIN)
        if failures:
            log.warning(
                "The checkpoint %s is damaged. The previous checkpoint (%s) is used.", shown_path(path), candidate.name
            )
        return dict(checkpoint)
    found_text = "\n  ".join(failures) or f"no file {path}"
    raise UserError(f"No checkpoint can be read:\n  {found_text}\n{START_AGAIN}")


def noted_run(checkpoint: dict[str, Any]) -> str | None:
    """Return the id of the run that wrote a checkpoint, or None if the checkpoint has no id."""
    held = checkpoint.get("callbacks")
    states = held.values() if isinstance(held, dict) else ()
    return next((str(state[RUN_ID]) for state in states if isinstance(state, dict) and RUN_ID in state), None)


def refuse_another_run(path: Path, checkpoint: dict[str, Any]) -> None:
    """Raise UserError if the id in the checkpoint at `path` is not the id of the run."""
    file, found = path.with_name(RUN_ID), noted_run(checkpoint)
    noted = file.read_text(encoding="utf-8", errors="replace").strip() if file.is_file() else ""
    if found is not None and noted and noted != found:
        raise UserError(
            f"The checkpoint {path} belongs to another run: the checkpoint contains the id {printable(found)}, but the"
            f" file {file} contains the id {printable(noted)}. Restore the checkpoint of this run. {START_AGAIN}"
        )


def _has_weights(checkpoint: Any) -> bool:
    """Return True if the checkpoint has a state dict of tensors. Entries named ``_extra_state`` may have any type."""
    held = checkpoint.get("state_dict") if isinstance(checkpoint, dict) else None
    return isinstance(held, dict) and all(
        isinstance(name, str) and (isinstance(value, torch.Tensor) or name.endswith("_extra_state"))
        for name, value in held.items()
    )


class AtomicCheckpointIO(CheckpointIO):
    """Lightning plugin that writes checkpoints atomically, keeps the previous checkpoint, and calls `read`."""

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        target = Path(path)

        def write(temporary: Path) -> None:
            torch.save({**checkpoint, _FORMAT_KEY: FORMAT}, temporary)
            with open(temporary, "rb+") as file:
                os.fsync(file.fileno())  # the new file must be on disk before the old file is renamed
            if target.is_file():
                os.replace(target, previous(target))

        write_atomically(target, write)

    def load_checkpoint(self, path: Any, map_location: Any = None, weights_only: bool | None = None) -> dict[str, Any]:
        checkpoint = read(Path(path), map_location or "cpu")
        refuse_another_run(Path(path), checkpoint)
        return checkpoint

    def remove_checkpoint(self, path: Any) -> None:
        for file in (Path(path), previous(Path(path))):
            file.unlink(missing_ok=True)
