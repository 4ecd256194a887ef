"""Check the output folder of a run or a sweep, and report errors if the folder cannot be created or written."""

from __future__ import annotations

import errno
import logging
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from logging.handlers import MemoryHandler
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.conf import HydraConf
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict, read_write
from omegaconf.errors import OmegaConfBaseException

from efficient_ft.cli.streams import discard_output
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.record.files import write_text_atomically

_SETTINGS = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
#: Default output folder of runs and sweeps.
_DEFAULT = "outputs"
#: Maximum number of log records that are buffered until a run begins.
_RECORDS = 10_000


def check_output_folder(name: str, parsed: Sequence[Override]) -> None:
    """Raise a `SettingError` if an output folder has an empty name or an unresolvable reference."""
    for override in parsed:
        if override.key_or_group not in _SETTINGS:
            continue
        text = str(override.value() or "").strip()
        if not text:
            given = "null" if override.value() is None else "an empty string"
            raise SettingError(override.key_or_group, given, "a folder", "Omit the setting to use the default folder.")
        if "${" not in text:
            continue
        composed = compose(name, [override.input_line or ""], return_hydra_config=True)
        try:
            if "${" in str(OmegaConf.select(composed, override.key_or_group)):
                do = "Remove the backslash. ${NAME} is replaced by the value of a setting."
                raise SettingError(override.key_or_group, text, "a folder without \\${", do)
        except OmegaConfBaseException as error:
            reason = str(error).splitlines()[0].rstrip(".")
            if "MissingMandatoryValue" in reason:  # Hydra sets the missing value for each job.
                continue
            raise SettingError(override.key_or_group, text, "a folder", f"A reference is invalid: {reason}.") from None


def hydra_files(composed: DictConfig, sweep: bool) -> tuple[Path, ...]:
    """Return the files and folders in which the command of a run or a sweep is recorded."""
    hydra = composed.hydra
    try:
        if sweep:
            return (Path(hydra.sweep.dir) / "multirun.yaml",)
        folder = Path(hydra.run.dir)
        with read_write(hydra), open_dict(hydra):
            hydra.runtime.output_dir = str(folder)
        handlers = (hydra.job_logging or {}).get("handlers") or {}
        files = [Path(handler.filename) for handler in handlers.values() if "filename" in (handler or ())]
        inner = folder / (hydra.output_subdir or ".hydra")  # If output_subdir is null, `CommandRecord` writes .hydra.
        return (*files, inner, *(inner / name for name in ("config.yaml", "hydra.yaml", "overrides.yaml")))
    except (OmegaConfBaseException, TypeError, AttributeError):  # Other checks report invalid settings.
        return ()


#: Names of the entries of the run folder that Hydra writes, and of all entries that exist before the first step.
_OF_HYDRA = {".hydra", "train.log"}
_BEFORE_TRAINING = {*_OF_HYDRA, ".lock", "config.yaml", "images", "contents.json", "run_id"}


class CommandRecord:
    """The record of a command: the folder ``.hydra`` and the log file.

    The record is written after the run has been accepted.
    """

    def __init__(self, folder: Path, hydra: HydraConf, composed: DictConfig) -> None:
        self._folder, self._hydra, self._composed = folder, hydra, composed
        #: Maps each file handler of the root logger to the handler that replaces it until the run begins. Hydra flushes
        #: all handlers when a command ends, but a handler without a target keeps its records.
        self._held: dict[logging.FileHandler, MemoryHandler] = {}
        root = logging.getLogger()
        for handler in root.handlers:
            if isinstance(handler, logging.FileHandler) and Path(handler.baseFilename).parent == folder.absolute():
                handler.close()  # The next record reopens the log file.
                log = Path(handler.baseFilename)
                if log.is_file() and not log.stat().st_size:
                    log.unlink()
                self._held[handler] = MemoryHandler(_RECORDS, logging.CRITICAL + 1)
                self._held[handler].setLevel(handler.level)
        root.handlers[:] = [self._held.get(one, one) for one in root.handlers]  # type: ignore[call-overload]

    def write(self) -> None:
        """Write the record. After this call, log records are written to the log file."""
        if self._hydra.output_subdir is None:
            parts: dict[str, Any] = {
                "config": self._composed,
                "hydra": {"hydra": self._hydra},
                "overrides": self._hydra.overrides.task,
            }
            for name, part in parts.items():
                text = OmegaConf.to_yaml(part if OmegaConf.is_config(part) else OmegaConf.create(part))
                write_text_atomically(self._folder / ".hydra" / f"{name}.yaml", text)
        root = logging.getLogger()
        names = {memory: handler for handler, memory in self._held.items()}
        root.handlers[:] = [names.get(one, one) for one in root.handlers]  # type: ignore[call-overload]
        for handler, memory in self._held.items():
            memory.setTarget(handler)
            memory.flush()
        self._held = {}


@contextmanager
def leaving_nothing(folder: Path) -> Iterator[None]:
    """Remove a new run folder if the run inside the ``with`` block is rejected before training."""
    here = Path.cwd()
    new = folder not in (here, *here.parents) and set(os.listdir(folder)) <= _OF_HYDRA
    try:
        yield
    except UserError:
        if new and set(os.listdir(folder)) <= _BEFORE_TRAINING:
            with suppress(OSError):  # The original error is more important.
                shutil.rmtree(folder)
                for above in folder.parents:
                    if above == Path.cwd() or _DEFAULT not in above.parts:
                        break
                    above.rmdir()  # The first non-empty folder raises an error.
        raise


@contextmanager
def output_folder_faults(overrides: Sequence[str]) -> Iterator[None]:
    """Convert an OSError in the output folder to a `UserError` that names the setting of the folder."""
    try:
        yield
    except UserError:
        raise
    except (OSError, ValueError) as raised:
        # logging raises a ValueError if it cannot open a log file.
        error = raised if isinstance(raised, OSError) else raised.__cause__
        if not isinstance(error, OSError):
            raise
        if (lost := discard_output()) is not None:
            raise lost from None  # The error comes from the standard output.
        given = dict(text.split("=", 1) for text in overrides if text.startswith(tuple(f"{key}=" for key in _SETTINGS)))
        key = next((key for key in ("hydra.run.dir", "hydra.sweep.dir") if key in given), None)
        folder = Path(given[key].strip("'\"") if key else _DEFAULT).absolute()
        full = error.errno in (errno.ENOSPC, errno.EDQUOT)
        if error.filename is None and not full:
            raise
        place = Path(os.fsdecode(error.filename or folder)).absolute()
        above = place == folder or place in folder.parents
        if not above and (folder not in place.parents or error.errno == errno.ENOENT):  # The file is unrelated.
            raise
        reason = (error.strerror or str(error)).lower()
        if full:
            from efficient_ft.training.output.faults import free_space

            reason += free_space(folder)
        do = "Choose another folder" if key else "Choose another folder: hydra.run.dir=DIR"
        raise UserError(
            f"{key or 'hydra.run.dir'}: the folder {place} cannot be created or written to ({reason}). {do}, or correct"
            " the error, and repeat the command. Existing files are kept."
        ) from raised
