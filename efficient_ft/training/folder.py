"""The run folder: one run per folder, one process at a time, and nothing of an earlier run is deleted."""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from filelock import FileLock, Timeout

from efficient_ft.config import Config, fingerprint, image_folders
from efficient_ft.core.errors import UserError
from efficient_ft.core.files import refuse_link, remove_temporary
from efficient_ft.core.terminal import shown_path
from efficient_ft.record import config_file, results, step_stats
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.formats import START_AGAIN
from efficient_ft.record.results import flatten
from efficient_ft.training import checkpoint, export
from efficient_ft.training.console import rank, say

#: Locked by the process that trains in the folder; the operating system releases it when that process ends.
LOCK = ".lock"
#: Holds the digest of the images that a run trains on (`data.listing.Listing.digest`; several tasks: joined by +).
IMAGES = "images"
#: Any of these files shows that a run was started in a folder.
_TRACES = (results.NAME, config_file.NAME, checkpoint.NAME, export.NAME, "metrics.jsonl")
#: What a run writes under these names; a folder in the place of one is refused before the training.
_FILES = (*_TRACES, "metrics.csv", "run_id", IMAGES, f"{checkpoint.NAME}.prev")
#: What a run appends to, which a link in its place would lead elsewhere; other files replace a link.
_APPENDED = ("metrics.jsonl", step_stats.NAME, "tensorboard", "wandb")


def refuse_another_run(config: Config, folder: Path) -> None:
    """Refuse a folder that holds a run with other settings, unless ``resume=never`` moves that run away.

    Raises:
        OtherVersionError: an earlier version of this package wrote the folder.
        UserError: the settings differ, or its config.yaml is damaged.
    """
    if config.resume == "never" or not (folder / config_file.NAME).is_file():
        return
    stored = config_file.read_config(folder)
    if fingerprint(stored) == fingerprint(config):
        return
    raise UserError(f"{folder} holds another run ({differences(stored, config)}). {START_AGAIN}")


def refuse_other_images(config: Config, folder: Path, digest: str) -> None:
    """Refuse a folder whose run was trained on other images; note the `digest` of those that it is trained on.

    Raises:
        UserError: the digests differ, or the note is damaged.
    """
    file = folder / IMAGES
    if not file.is_file():
        if rank() == 0:
            write_text_atomically(file, f"{digest}\n")
        return
    try:
        noted = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"{file} is damaged: it is not text. {START_AGAIN}") from error
    if noted != digest:
        raise UserError(
            f"The images in {', '.join(image_folders(config))} are not those that the run in {folder} was trained on:"
            f" another copy of the data set, or files that were added, removed or replaced since. {START_AGAIN}"
        )


def differences(stored: Config, config: Config) -> str:
    """The first three settings that differ, for a message."""
    old, new = (flatten(one.model_dump(mode="json")) for one in (stored, config))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)]
    return ", ".join(f"{key} is {old.get(key)} there, {new.get(key)} here" for key in changed[:3])


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold the folder's lock, so that no other process trains in it. The first of several DDP processes locks for all.

    Raises:
        UserError: another process holds it.
    """
    if rank() != 0:
        yield
        return
    folder.mkdir(parents=True, exist_ok=True)
    refuse_link(folder / LOCK)
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"{folder} is in use: the same command is running in another process. Wait for it, or choose another"
            " hydra.run.dir."
        ) from None
    try:
        yield
    finally:
        lock.release()


def prepare_folder(config: Config, folder: Path) -> None:
    """Write config.yaml, in the first process; with ``resume=never`` move an earlier run away first.

    Raises:
        UserError: there is a folder in place of a file that the run writes, or a link in place of one it appends to.
    """
    if rank() != 0:
        return
    if config.resume == "never":
        _move_earlier_run(folder)
    for name in _FILES:
        if (folder / name).is_dir():
            raise UserError(f"{folder / name} is a folder; the run writes a file of this name. Remove or rename it.")
    for name in _APPENDED:
        refuse_link(folder / name)
    remove_temporary(folder)
    config_file.write_config(folder, config)


def _move_earlier_run(folder: Path) -> None:
    """Move what an earlier run left in `folder` to ``<folder>.1``, ``.2``, …"""
    if not any((folder / name).exists() for name in _TRACES):
        return
    number = 1
    while (target := folder.with_name(f"{folder.name}.{number}")).exists():
        number += 1
    target.mkdir()
    for entry in folder.iterdir():
        # Hydra has already opened the log file of this command.
        if entry.suffix != ".log" and entry.name not in (".hydra", LOCK):
            shutil.move(str(entry), target / entry.name)
    say(f"resume=never: the earlier run was moved to {shown_path(target)}.")


def run_id(folder: Path) -> str:
    """The run's id for loggers: kept in the folder and in every checkpoint, so that a resumed run keeps it."""
    state, file = folder / checkpoint.NAME, folder / "run_id"
    if file.is_file() and (found := file.read_text(encoding="utf-8", errors="replace").strip()).isalnum():
        return found  # else it is damaged, and the checkpoint has it as well
    if checkpoint.exists(state):
        for held in checkpoint.read(state)["callbacks"].values():
            if "run_id" in held:
                return str(held["run_id"])
    created = os.urandom(4).hex()
    if rank() == 0:
        write_text_atomically(file, created + "\n")
    return created
