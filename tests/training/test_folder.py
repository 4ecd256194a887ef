"""Tests of the run folder: it holds one run, is locked by one process, and is never deleted or misread."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from PIL import Image
from safetensors.torch import save_file

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.models import factory
from efficient_ft.record.formats import OtherVersionError
from efficient_ft.training.output import checkpoint, folder
from efficient_ft.training.run import run
from tests.conftest import REPOSITORY


def test_a_finished_run_is_shown_not_trained(finished, capsys):
    place, config, results = finished
    before = {f.name: f.stat().st_mtime_ns for f in place.iterdir() if f.name != "config.yaml"}
    assert run(config, place) == results
    assert {f.name: f.stat().st_mtime_ns for f in place.iterdir() if f.name != "config.yaml"} == before
    shown = capsys.readouterr().out
    assert "already finished" in shown
    assert format_percent(results["accuracy"]["best"]) in shown


@pytest.mark.slow
def test_resume_never_keeps_the_old_run_under_another_name(tmp_path, configuration, finished, capsys, without_cost):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    old = {f.name: f.read_bytes() for f in place.iterdir() if f.name != ".lock"}
    run(configuration(resume="never", trainer__max_steps=2), place)
    kept = tmp_path / "run.1"
    assert {f.name: f.read_bytes() for f in kept.iterdir()} == old  # the lock file is not moved
    assert checkpoint.read(place / checkpoint.NAME)["global_step"] == 2
    assert str(kept) in capsys.readouterr().out


def test_the_same_command_twice_at_once_is_refused(tmp_path, configuration):
    place, config = tmp_path / "run", configuration(trainer__max_steps=2)
    place.mkdir()
    code = "import sys, time; from filelock import FileLock; lock = FileLock(sys.argv[1]); lock.acquire();"
    code += "print(1, flush=True); time.sleep(60)"
    other = subprocess.Popen([sys.executable, "-c", code, str(place / ".lock")], stdout=subprocess.PIPE)
    try:
        assert other.stdout is not None
        assert other.stdout.readline()
        with pytest.raises(UserError, match=r"is in use: the same command is running .*hydra\.run\.dir"):
            run(config, place)
        assert [file.name for file in place.iterdir()] == [".lock"]
    finally:
        other.kill()
        other.communicate()
    with folder.locked(place) as held:  # the lock is free after a kill
        held.begin(config, {}, lambda: None)
    with folder.locked(place):  # the lock is free after a normal end
        pass


# ---------------------------------------------------------------------------------------------- moving a run
#: For each number from 1, copies the run FINISHED to FOLDER/number/run and moves the copy away in a process.
#: The process is killed before the file change with this number. The loop ends at a number without a file change.
_KILLED = """
import os, shutil, signal, sys
from pathlib import Path
from efficient_ft.config import check
from efficient_ft.training.output import folder
from tests.training.runs import plain_config

def move_away(place, at):
    seen = []
    def watch(event, arguments):
        if event in ("os.rename", "os.mkdir", "os.rmdir", "os.remove", "shutil.move") or (
            event == "open" and isinstance(arguments[2], int) and arguments[2] & (os.O_WRONLY | os.O_RDWR)):
            if os.fspath(arguments[0]).startswith(str(place)):
                seen.append(event)
                if len(seen) == at:
                    os.kill(os.getpid(), signal.SIGKILL)
    with folder.locked(place) as held:
        held.trains = True  # what is written is kept
        sys.addaudithook(watch)
        held.begin(check(plain_config(resume="never")), {"images": "0"}, lambda: None)
    assert len(seen) == at - 1

status, at = -signal.SIGKILL, 0
while status == -signal.SIGKILL:
    at += 1
    place = Path(sys.argv[2]) / str(at) / "run"
    shutil.copytree(sys.argv[1], place)
    child = os.fork()
    if not child:
        move_away(place, at)
        os._exit(0)
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
sys.exit(status)
"""


@pytest.mark.exhaustive
def test_a_kill_while_resume_never_moves_a_run_away_never_splits_it(tmp_path, finished):
    old = {f.name: f.read_bytes() for f in finished[0].iterdir() if f.name != ".lock"}
    command = [sys.executable, "-c", _KILLED, str(finished[0]), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, cwd=REPOSITORY)
    assert done.returncode == 0, done.stderr
    numbers = sorted(tmp_path.iterdir())
    assert len(numbers) > 5
    for number in numbers:
        place, moved = number / "run", number / "run.1"
        whole = moved if moved.is_dir() else place
        assert {f.name: f.read_bytes() for f in whole.iterdir() if f.name != ".lock"} == old, number
        if whole is moved and place.is_dir() and number.name != str(len(numbers)):
            left = {
                f.name for f in place.iterdir() if not f.name.startswith(".efficient_ft.")
            }  # excludes temporary folders
            assert left <= {".lock", "config.yaml", "contents.json", "images"}, number


def test_a_rejected_resume_never_brings_the_earlier_run_back(tmp_path, configuration, finished):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    before = tree(tmp_path)
    never = configuration(resume="never", method={"checkpointing": {}, "lisa": {"num_layers": 5}})
    with pytest.raises(UserError):
        run(never, place)
    assert tree(tmp_path) == before


def test_the_current_folder_is_not_moved_away(tmp_path, configuration, finished, monkeypatch):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    monkeypatch.chdir(place)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=r"cannot move .*run, because this folder contains the current folder"):
        run(configuration(resume="never"), Path("."))
    assert tree(tmp_path) == before


def test_a_part_of_a_run_alone_is_reported(tmp_path, configuration, finished):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    (place / "config.yaml").unlink()
    with pytest.raises(UserError, match=r"run contains a part of a run \(results\.json.*no config\.yaml\."):
        run(configuration(), place)


# ---------------------------------------------------------------------------------------------- contents
def images_of(root: Path, size: int = 6) -> Path:
    """Write images of two classes whose files have the same size, and return the folder."""
    for label, value in (("0", 60), ("1", 200)):
        (root / label).mkdir(parents=True)
        for number in range(size):
            pixels = np.full((8, 8, 3), value + number, dtype=np.uint8)
            Image.fromarray(pixels).save(root / label / f"{number}.bmp")
    return root


def exchanged(root: Path) -> None:
    (root / "0").rename(root / "x")
    (root / "1").rename(root / "0")
    (root / "x").rename(root / "1")


def edited(root: Path) -> None:
    file = root / "1" / "4.bmp"
    file.write_bytes(file.read_bytes()[:-1] + b"\x07")


def of_folder(configuration: Any, root: Path, **changes: Any) -> Any:
    return configuration(
        data={"name": "folder", "root": str(root), "batch_size": 4, "num_workers": 0, "keep_decoded": "off"},
        trainer__max_steps=1, **changes,
    )  # fmt: skip


@pytest.mark.parametrize("finish", [True, False], ids=["finished", "interrupted"])
@pytest.mark.parametrize(
    ("change", "named"),
    [(exchanged, r"train: \d+ of \d+ entries changed \(0/0\.bmp"), (edited, r"changed \(1/4\.bmp\)")],
    ids=["classes exchanged", "a file edited"],
)
def test_changed_files_of_equal_sizes_are_refused_and_named(
    tmp_path, configuration, without_cost, change, named, finish
):
    root, place = images_of(tmp_path / "images"), tmp_path / "run"
    config = of_folder(configuration, root)
    run(config, place)
    if not finish:
        (place / "results.json").unlink()
    change(root)
    before = tree(place)
    with pytest.raises(UserError, match=named) as caught:
        run(config, place)
    assert "have changed since the run began" in str(caught.value)
    assert tree(place) == before


def test_a_copied_data_set_is_the_same(tmp_path, configuration, without_cost, capsys):
    root, place = images_of(tmp_path / "images"), tmp_path / "run"
    config = of_folder(configuration, root)
    run(config, place)
    copy = tmp_path / "copy"
    shutil.copytree(root, copy, copy_function=shutil.copyfile)  # does not copy modification times
    shutil.rmtree(root)
    copy.rename(root)
    (place / "results.json").unlink()
    capsys.readouterr()
    run(config, place)
    assert "Continuing the run" in capsys.readouterr().out


@pytest.mark.slow
def test_replaced_weights_are_refused(tmp_path, configuration, without_cost):
    config = configuration(trainer__max_steps=1)
    network = factory.create_model(config.model, 10)
    file, place = tmp_path / "weights.safetensors", tmp_path / "run"
    save_file(network.state_dict(), file)
    config = configuration(trainer__max_steps=1, model__weights=str(file))
    run(config, place)
    (place / "results.json").unlink()
    state = network.state_dict()
    state["head.weight"] = state["head.weight"] + 1
    save_file(state, file)
    with pytest.raises(UserError, match=r"model\.weights: 1 of 1 entries changed \(weights\.safetensors\)"):
        run(config, place)


@pytest.mark.parametrize("text", ["", "[]", "{}", '{"train": 3}', '{"train": {"count": 3}}', "\x00"])
def test_damaged_contents_are_refused(tmp_path, configuration, finished, text):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    (place / "contents.json").write_text(text)
    with pytest.raises(UserError, match=r"contents\.json is damaged|have changed since the run began"):
        run(configuration(), place)


def tree(place: Path) -> dict[str, bytes]:
    """Return the contents of all files below a folder, except locks."""
    files = (file for file in place.rglob("*") if file.is_file() and file.name != ".lock")
    return {file.relative_to(place).as_posix(): file.read_bytes() for file in files}


def test_another_run_in_the_folder_is_refused(configuration, finished):
    with pytest.raises(
        UserError, match=r"optim\.lr is 0\.01 in that run and 0\.001 in this run.*hydra\.run\.dir, or set resume=never"
    ):
        run(configuration(optim__lr=1e-3), finished[0])


# ---------------------------------------------------------------------------------------------- other versions
@pytest.mark.parametrize("done", [True, False], ids=["finished", "interrupted"])
def test_a_folder_of_another_version_is_refused_and_kept(tmp_path, configuration, finished, without_cost, done):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    plain = yaml.safe_load((place / "config.yaml").read_text())
    plain["model"]["dropout"] = plain["model"].pop("drop_rate")
    (place / "config.yaml").write_text(yaml.safe_dump(plain))
    if not done:
        (place / "results.json").unlink()
    before = {f.name: f.read_bytes() for f in place.iterdir()}
    with pytest.raises(OtherVersionError) as caught:
        run(configuration(), place)
    text = str(caught.value)
    assert "config.yaml was written by another version" in text
    assert "it has the setting model.dropout, which is unknown to this version" in text
    assert "Choose another hydra.run.dir, or set resume=never" in text
    assert {f.name: f.read_bytes() for f in place.iterdir()} == before
    if not done:
        run(configuration(resume="never", trainer__max_steps=1), place)
        assert yaml.safe_load((tmp_path / "run.1" / "config.yaml").read_text()) == plain


def test_results_of_another_version_are_refused(tmp_path, configuration, finished):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    results = json.loads((place / "results.json").read_text())
    del results["format"]
    (place / "results.json").write_text(json.dumps(results))
    with pytest.raises(OtherVersionError, match=r"results\.json was written by another version.*resume=never"):
        run(configuration(), place)


@pytest.mark.parametrize("text", ["[1, 2]", "model: {name: [", "method: 3", "", "task: text"])
def test_a_damaged_configuration_is_refused(tmp_path, configuration, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read.*resume=never"):
        run(configuration(), tmp_path)


def test_a_configuration_that_was_cut_off_is_refused(tmp_path, configuration, finished):
    text = (finished[0] / "config.yaml").read_text()
    (tmp_path / "config.yaml").write_text(text[: text.index("optim:")])
    with pytest.raises(UserError, match=r"the entry optim is missing\. .*resume=never"):
        run(configuration(), tmp_path)
