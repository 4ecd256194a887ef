"""The run folder. Each folder belongs to one run and can be used by one command at a time.

Files of earlier runs are never deleted.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path

import lightning.pytorch as L
from filelock import FileLock, Timeout
from lightning.pytorch.callbacks import LambdaCallback

from efficient_ft.config import Config, fingerprint, image_folders
from efficient_ft.core.errors import UserError
from efficient_ft.core.files import refuse_link, remove_temporary
from efficient_ft.core.parsing import parse_json
from efficient_ft.core.terminal import shown_path
from efficient_ft.data.contents import Contents
from efficient_ft.record import config_file, predictions, results, step_stats
from efficient_ft.record.files import LOCK, write_text_atomically
from efficient_ft.record.formats import START_AGAIN
from efficient_ft.record.results import flatten
from efficient_ft.training import precision
from efficient_ft.training.output import checkpoint, export
from efficient_ft.training.output.console import rank, say

#: Name of the file with the digest of the data (`data.listing.Listing.digest`). Multiple digests are joined with "+".
IMAGES = "images"
#: Name of the file with hashes of the data and weights at the start of a run (`data.contents.Contents.record`).
CONTENTS = "contents.json"
#: Names of the folder and of the log files that Hydra writes.
RECORD, LOGS = ".hydra", ("train.log",)
#: Names of files that exist only if a run was started in the folder.
_TRACES = (results.NAME, config_file.NAME, checkpoint.NAME, export.NAME, "metrics.jsonl")
#: Names of the files that a run writes. If a folder has one of these names, the run is rejected before training.
_FILES = (*_TRACES, "metrics.csv", checkpoint.RUN_ID, IMAGES, CONTENTS, precision.NAME, f"{checkpoint.NAME}.prev",
          predictions.NAME)  # fmt: skip
#: Files and folders to which a run appends. Links with these names are rejected. Other files replace links.
_APPENDED = ("metrics.jsonl", step_stats.NAME, "tensorboard", "wandb")


def refuse_another_run(config: Config, folder: Path) -> None:
    """Raise an error if the folder contains a run with other settings, unless ``resume=never`` moves that run away.

    Raises:
        OtherVersionError: If another version of this package wrote the folder.
        UserError: If the settings differ, or if config.yaml in the folder is damaged.
    """
    if config.resume == "never" or not (folder / config_file.NAME).is_file():
        return
    stored = config_file.read_config(folder)
    if fingerprint(stored) == fingerprint(config) or _changes_length(config, stored, folder):
        return
    old, new = (flatten(one.model_dump(mode="json")) for one in (stored, config))
    changed = [key for key in {**old, **new} if old.get(key) != new.get(key)][:3]
    texts = (f"the setting {key} is {old.get(key)} in that run and {new.get(key)} in this run" for key in changed)
    raise UserError(f"The folder {folder} contains another run ({', '.join(texts)}). {START_AGAIN}")


def _changes_length(config: Config, stored: Config, folder: Path) -> bool:
    """Return True if the configurations differ only in the length of the run, which has no effect on the steps so far.

    The length (`trainer.epochs`, `trainer.max_steps` and `optim.decay_steps`) has no effect as long as the learning
    rate is constant. The run must not be finished.
    """
    if stored.optim.schedule != "constant" or config.optim.warmup_steps is None or (folder / results.NAME).is_file():
        return False
    length = {"epochs": config.trainer.epochs, "max_steps": config.trainer.max_steps}
    optim = stored.optim.model_copy(update={"decay_steps": config.optim.decay_steps})
    trainer = stored.trainer.model_copy(update=length)
    if fingerprint(stored.model_copy(update={"optim": optim, "trainer": trainer})) != fingerprint(config):
        return False
    state = folder / checkpoint.NAME
    step = checkpoint.read(state)["global_step"] if checkpoint.exists(state) else 0
    # Without max_steps, only the data determine the step in which the decay begins.
    return all(
        step <= one.trainer.max_steps - (one.optim.decay_steps or 0)
        if one.trainer.max_steps > 0
        else one.optim.decay_steps is None
        for one in (stored, config)
    )


def refuse_split_run(folder: Path) -> None:
    """Raise UserError if a folder contains a part of a run but no config.yaml, e.g. after an incomplete copy."""
    found = _traces(folder)
    if found and config_file.NAME not in found:
        raise UserError(
            f"The folder {folder} contains a part of a run ({', '.join(found)}), but no {config_file.NAME}. Move all"
            " files of the run into one folder, or choose another hydra.run.dir."
        )


def _traces(folder: Path) -> list[str]:
    """Return the names in `_TRACES` that are files in a folder. Links and folders with these names are ignored."""
    return [name for name in _TRACES if (folder / name).is_file() and not (folder / name).is_symlink()]


def refuse_changed_contents(folder: Path, contents: Contents) -> None:
    """Raise UserError if the data or weights have changed since the run began, or if their record is damaged."""
    file = folder / CONTENTS
    if not file.is_file():
        return
    try:
        changes = contents.changes(parse_json(file.read_text(encoding="utf-8")))
    except (ValueError, TypeError, LookupError, AttributeError) as error:
        raise UserError(f"{file} is damaged. {START_AGAIN}") from error
    if changes:
        raise UserError(
            f"The data or weights of the run in {folder} have changed since the run began: {'; '.join(changes)}."
            f" Restore the data and weights to continue this run. {START_AGAIN}"
        )


def refuse_other_images(config: Config, folder: Path, digest: str) -> None:
    """Raise UserError if the recorded digest of the images differs from `digest`, or if the record is damaged."""
    file = folder / IMAGES
    if not file.is_file():
        return
    try:
        noted = file.read_text(encoding="utf-8").strip()
    except UnicodeDecodeError as error:
        raise UserError(f"The file {file} is damaged, because its content is not text. {START_AGAIN}") from error
    if noted != digest:
        raise UserError(
            f"The images in {', '.join(image_folders(config))} differ from the training images of the run in {folder}."
            " The data set is a different copy, or files have been added, removed or replaced since the run began."
            f" {START_AGAIN}"
        )


class RunFolder:
    """Folder of a run.

    `begin` writes the files that must exist before the first step, and `undo` restores the previous state. `lock` is
    None except in the first process.
    """

    def __init__(self, path: Path, lock: FileLock | None) -> None:
        self.path, self._lock = path, lock
        #: `begun` is True after the configuration was written, and `trains` is True after the training has started.
        self.begun = self.trains = False
        #: The folder to which an earlier run was moved, and the contents of the files before `begin`.
        self._moved: Path | None = None
        self._before: dict[Path, bytes] | None = None

    def begin(self, config: Config, notes: Mapping[str, str], record: Callable[[], None]) -> None:
        """Write config.yaml, the files in `notes`, and the record of the command.

        Check all inputs before the call. With ``resume=never``, an existing run folder is moved away in a single
        rename.

        Args:
            config: the configuration of the run.
            notes: mapping from file names to texts. Existing files are not overwritten.
            record: function that writes the record of the command. The function is called at the end.

        Raises:
            UserError: If another process has locked the folder.
        """
        if self._lock is None:
            self.begun = True
            return
        if config.resume == "never" and _traces(self.path):
            self._move_away()
        self._before = {file: file.read_bytes() for file in self._small() if file.is_file()}
        config_file.write_config(self.path, config)
        self.begun = True
        for name, text in notes.items():
            if not (self.path / name).is_file():
                write_text_atomically(self.path / name, f"{text}\n")
        record()

    def started(self) -> L.Callback:
        """Return a callback that records the start of the training."""
        return LambdaCallback(on_train_start=lambda *_: setattr(self, "trains", True))

    def _small(self) -> list[Path]:
        """Return the paths of the files that are written before the first step."""
        names = (config_file.NAME, IMAGES, CONTENTS, precision.NAME, checkpoint.RUN_ID, *LOGS)
        named = [self.path / name for name in names]
        return [*named, *(self.path / RECORD).glob("*")]

    def _move_away(self) -> None:
        place = self.path.resolve()
        if place == Path.cwd() or place in Path.cwd().parents:
            raise UserError(
                f"resume=never cannot move the folder {place}, because this folder contains the current folder. Change"
                " to another folder, or choose another hydra.run.dir."
            )
        number = 1
        while (target := place.with_name(f"{place.name}.{number}")).exists():
            number += 1
        os.rename(place, target)
        before, self._moved = self._lock, target
        place.mkdir()
        self._lock = _acquired(self.path)
        assert before is not None
        before.release()
        (target / LOCK).unlink(missing_ok=True)
        say(f"resume=never: the earlier run was moved to {shown_path(target)}.")

    def undo(self) -> None:
        """Restore the state before `begin`. Files in a new folder are kept, because the command removes them later."""
        if self._moved is not None:
            place = self._moved.with_name(self.path.resolve().name)
            shutil.rmtree(place)
            os.rename(self._moved, place)
        elif self._before:
            for file in self._small():
                if file not in self._before:
                    file.unlink(missing_ok=True)
                elif file.suffix == ".log":  # a log handler may have the file open
                    os.truncate(file, len(self._before[file]))
                elif file.read_bytes() != self._before[file]:
                    file.write_bytes(self._before[file])

    def release(self) -> None:
        """Release the lock."""
        if self._lock is not None:
            self._lock.release()


def _acquired(folder: Path) -> FileLock:
    """Acquire the lock of a folder, or raise UserError if another process holds it."""
    lock = FileLock(folder / LOCK, timeout=0)
    try:
        lock.acquire()
    except Timeout:
        raise UserError(
            f"The folder {folder} is in use: the same command is running in another process. Wait until that process"
            " ends, or choose another hydra.run.dir."
        ) from None
    return lock


@contextmanager
def locked(folder: Path) -> Iterator[RunFolder]:
    """Inside a ``with`` block, lock the folder, so that no other command trains in it.

    The first process locks the folder for all processes of a run. If the block raises an exception before the first
    step, the folder is restored.

    Raises:
        UserError: If another process holds the lock, if a folder has the name of a run file, or if a file to which the
            run appends is a link.
    """
    if rank() != 0:
        yield RunFolder(folder, None)
        return
    for name in _FILES:
        if (folder / name).is_dir():
            raise UserError(f"{folder / name} is a folder, but must be a file. Remove or rename the folder.")
    for name in (LOCK, *_APPENDED):
        refuse_link(folder / name)
    folder.mkdir(parents=True, exist_ok=True)
    remove_temporary(folder)
    held = RunFolder(folder, _acquired(folder))
    try:
        yield held
    except BaseException:
        if not held.trains:
            with suppress(OSError):  # an error of `undo` must not replace the error that ended the run
                held.undo()
        raise
    finally:
        held.release()


def run_id(folder: Path) -> str:
    """Return the id of the run for loggers.

    The id is stored in the folder and in every checkpoint, so that a resumed run keeps its id.
    """
    state, file = folder / checkpoint.NAME, folder / checkpoint.RUN_ID
    if file.is_file() and (found := file.read_text(encoding="utf-8", errors="replace").strip()).isalnum():
        return found  # a damaged file is ignored, because the checkpoint contains the id
    if checkpoint.exists(state) and (noted := checkpoint.noted_run(checkpoint.read(state))) is not None:
        return noted
    created = os.urandom(4).hex()
    if rank() == 0:
        write_text_atomically(file, created + "\n")
    return created
