"""Tests of system errors during training: the run prints one message with its folder, and keeps all saved files."""

from __future__ import annotations

import errno
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from efficient_ft.core.errors import UserError
from efficient_ft.record import config_file
from efficient_ft.training.callbacks import recorder
from efficient_ft.training.output import checkpoint
from efficient_ft.training.output.faults import faults_of_the_system
from efficient_ft.training.run import run
from tests.training.runs import REPOSITORY, plain_config

#: Runs PLAIN in FOLDER. From optimizer step 4, files are limited to 2,000 bytes, which simulates a full disk.
_FULL = """
import json, resource, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from efficient_ft.config import check
from efficient_ft.core.errors import UserError
from efficient_ft.training.callbacks import recorder
from efficient_ft.training.run import run
recorder.RECORD_EVERY, recorder.STEP_CHECKPOINT_SECONDS = 2, 0.0
end = recorder.Recorder.on_train_batch_end
def filling(self, trainer, *args):
    if trainer.global_step == 4:
        resource.setrlimit(resource.RLIMIT_FSIZE, (2000, resource.RLIM_INFINITY))
    end(self, trainer, *args)
recorder.Recorder.on_train_batch_end = filling
try:
    run(check(json.loads(sys.argv[1])), Path(sys.argv[2]))
except UserError as error:
    print(error, file=sys.stderr)
    sys.exit(2)
"""


@pytest.mark.exhaustive
def test_a_full_disk_is_one_sentence_and_loses_nothing(tmp_path: Path) -> None:
    folder, plain = tmp_path / "run", plain_config(trainer__max_steps=8)
    done = subprocess.run(
        [sys.executable, "-c", _FULL, json.dumps(plain), str(folder)],
        capture_output=True, text=True, timeout=300, cwd=REPOSITORY,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    last = done.stderr.strip().splitlines()[-1]
    assert last.startswith(f"The run folder {folder} cannot be written: ")
    assert "the same command continues" in last
    assert "Traceback" not in done.stderr
    assert checkpoint.read(folder / checkpoint.NAME)["global_step"] == 2
    assert not list(folder.glob("*.tmp"))


def _remove(folder: Path) -> None:
    shutil.rmtree(folder)


def _move(folder: Path) -> None:
    folder.rename(folder.with_name("moved"))


def _replace(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.write_text("a file")


@pytest.mark.slow
@pytest.mark.parametrize("happens", [_remove, _move, _replace])
def test_a_folder_that_is_gone_is_said_and_not_made_again(
    happens: Callable[[Path], None], tmp_path: Path, configuration: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "run"
    monkeypatch.setattr(recorder, "RECORD_EVERY", 2)
    end = recorder.Recorder.on_train_batch_end

    def lost(self: Any, trainer: Any, *args: Any) -> None:
        if trainer.global_step == 4:
            happens(folder)
        end(self, trainer, *args)

    monkeypatch.setattr(recorder.Recorder, "on_train_batch_end", lost)
    with pytest.raises(UserError, match=r"is no longer the folder of this run") as caught:
        run(configuration(trainer__max_steps=8), folder)
    assert str(folder) in str(caught.value)
    assert not folder.is_dir()


def test_only_what_the_system_refuses_in_the_folder_is_renamed(tmp_path: Path) -> None:
    (tmp_path / config_file.NAME).write_text("")
    elsewhere = FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), "/nowhere/image.jpg")
    closed = BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))  # the reader of the output closed the pipe
    for error in (elsewhere, closed, RuntimeError("shapes differ"), ValueError("x")):
        with pytest.raises(type(error)) as caught, faults_of_the_system(tmp_path):
            raise error
        assert caught.value is error
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    for saved, then in ((False, "No checkpoint was saved"), (True, "Saved files are kept")):
        if saved:
            (tmp_path / checkpoint.NAME).touch()
        with (
            pytest.raises(UserError, match=rf"no space left on device; .*B are free\. {then}"),
            faults_of_the_system(tmp_path),
        ):
            raise full


@pytest.mark.parametrize("name", ["results.json", "checkpoint.ckpt.prev"])
def test_a_folder_in_place_of_a_file_is_named(name: str, tmp_path: Path, configuration: Any) -> None:
    (tmp_path / name).mkdir()
    with pytest.raises(UserError, match=rf"{name} is a folder, but must be a file\. Remove or rename"):
        run(configuration(trainer__max_steps=2), tmp_path)
    (tmp_path / config_file.NAME).touch()
    error = IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR), str(tmp_path / "a"), None, str(tmp_path / name))
    with pytest.raises(UserError, match=rf"cannot be written: .*{name} is a folder\."), faults_of_the_system(tmp_path):
        raise error
