"""The run folder: one run, one process at a time, nothing deleted, nothing of an earlier version misread."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import yaml

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.record.formats import OtherVersionError
from efficient_ft.training import checkpoint, folder
from efficient_ft.training.run import run


def test_a_finished_run_is_shown_not_trained(finished, capsys):
    place, config, results = finished
    before = {f.name: f.stat().st_mtime_ns for f in place.iterdir() if f.name != "config.yaml"}
    assert run(config, place) == results
    assert {f.name: f.stat().st_mtime_ns for f in place.iterdir() if f.name != "config.yaml"} == before
    shown = capsys.readouterr().out
    assert "already finished" in shown
    assert format_percent(results["accuracy"]["best"]) in shown


def test_resume_never_keeps_the_old_run_under_another_name(tmp_path, configuration, finished, capsys, without_cost):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    old = {f.name: f.read_bytes() for f in place.iterdir() if f.name != ".lock"}
    run(configuration(resume="never", trainer__max_steps=2), place)
    kept = tmp_path / "run.1"
    assert {f.name: f.read_bytes() for f in kept.iterdir()} == old
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
    with folder.locked(place):  # free after a kill
        folder.prepare_folder(config, place)
    with folder.locked(place):  # and after an ordinary end
        pass


def test_another_run_in_the_folder_is_refused(configuration, finished):
    with pytest.raises(UserError, match=r"optim\.lr is 0\.01 there, 0\.001 here.*hydra\.run\.dir, or resume=never"):
        run(configuration(optim__lr=1e-3), finished[0])


# ---------------------------------------------------------------------------------------------- earlier versions
def renamed_since(plain: dict) -> None:
    """Settings as they were called before the renaming."""
    plain["trainer"]["accumulate"] = plain["trainer"].pop("grad_accum_steps")
    plain["model"]["drop"] = plain["model"].pop("drop_rate")


@pytest.mark.parametrize("done", [True, False], ids=["finished", "interrupted"])
def test_a_folder_of_an_earlier_version_is_refused_and_kept(tmp_path, configuration, finished, without_cost, done):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    plain = yaml.safe_load((place / "config.yaml").read_text())
    renamed_since(plain)
    (place / "config.yaml").write_text(yaml.safe_dump(plain))
    if not done:
        (place / "results.json").unlink()
    before = {f.name: f.read_bytes() for f in place.iterdir()}
    with pytest.raises(OtherVersionError) as caught:
        run(configuration(), place)
    text = str(caught.value)
    assert "config.yaml was written by an earlier version" in text
    assert "model.drop, which is model.drop_rate now" in text or "trainer.accumulate, which" in text
    assert "Choose another hydra.run.dir, or resume=never" in text
    assert {f.name: f.read_bytes() for f in place.iterdir()} == before
    if not done:
        run(configuration(resume="never", trainer__max_steps=1), place)
        assert yaml.safe_load((tmp_path / "run.1" / "config.yaml").read_text()) == plain


def test_results_of_an_earlier_version_are_refused(tmp_path, configuration, finished):
    place = tmp_path / "run"
    shutil.copytree(finished[0], place)
    results = json.loads((place / "results.json").read_text())
    del results["format"]
    (place / "results.json").write_text(json.dumps(results))
    with pytest.raises(OtherVersionError, match=r"results\.json was written by an earlier version.*resume=never"):
        run(configuration(), place)


@pytest.mark.parametrize("text", ["[1, 2]", "model: {name: [", "method: 3", ""])
def test_a_damaged_configuration_is_refused(tmp_path, configuration, text):
    (tmp_path / "config.yaml").write_text(text)
    with pytest.raises(UserError, match=r"config\.yaml cannot be read.*resume=never"):
        run(configuration(), tmp_path)
