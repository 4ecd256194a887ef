"""Tests of the command as a program: help, exit statuses, run folders and entry points, without training."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import types
from pathlib import Path

import pytest

from efficient_ft.cli import commands
from efficient_ft.cli.exits import clean_exits
from efficient_ft.cli.main import main as main_of_command
from efficient_ft.cli.main import without_repeated
from efficient_ft.core.errors import UserError
from tests.cli.program import REPOSITORY, call, runs_of
from tests.conftest import unwrapped


def test_an_unknown_command_is_named_with_help_too(program: Path) -> None:
    done = call(program, "tables", "--help")
    assert done.returncode == 2
    assert done.stderr == "tables: arguments must have the form KEY=VALUE. See --help. Did you mean 'table'?\n"


def test_settings_that_lightning_sets_again_are_removed() -> None:
    added = ["hydra.run.dir='/there/x'", "hydra.job.name=train_ddp_process_1", "hydra.output_subdir=null"]
    assert without_repeated(["seed=1", "hydra.run.dir=x", *added]) == ["seed=1", *added]
    given = ["hydra.run.dir=x", "hydra.run.dir=x", "seed=1"]
    assert without_repeated(given) == given  # reported as a mistake


@pytest.mark.parametrize(
    ("raised", "status"),
    [(FileExistsError(17, "File exists", "out"), 2), (PermissionError(13, "Permission denied", "out"), 2),
     (OSError(28, "No space left on device", "out"), 2), (OSError(28, "No space left on device"), 2),
     (FileNotFoundError(2, "No such file", "out"), None)],
)  # fmt: skip
def test_what_the_system_refuses_is_one_message(
    raised: OSError, status: int | None, capsys: pytest.CaptureFixture[str]
) -> None:
    """A missing file keeps its traceback, because it may be a bug."""
    with pytest.raises(SystemExit if status else FileNotFoundError) as caught, clean_exits():
        raise raised
    if status:
        assert caught.value.code == status  # type: ignore[attr-defined]
        plain = f"A file could not be written: {raised.strerror}. Free space, and repeat the command.\n"
        said = plain if raised.filename is None else f"out: {raised.strerror}.\n"
        assert unwrapped(capsys.readouterr().err) == said


@pytest.mark.slow
def test_help_configuration_and_completion_load_no_torch(tmp_path: Path) -> None:
    code = (
        "import runpy, sys\n"
        "try:\n"
        f"    runpy.run_path({str(REPOSITORY / 'train.py')!r}, run_name='__main__')\n"
        "except SystemExit as left:\n"
        "    assert not left.code, left.code\n"
        "print(sorted({'torch', 'lightning', 'timm', 'peft', 'numpy'} & set(sys.modules)))\n"
    )
    for arguments, said in [
        (["--help"], "method: "),
        (["--cfg", "job", "model=deit_tiny", "data=folder"], "deit_tiny_patch16_224"),
        (["--shell-completion", "query=bash"], "model=efficientformer_l1"),
    ]:
        done = subprocess.run(
            [sys.executable, "-c", code, *arguments],
            cwd=tmp_path,
            capture_output=True,
            text=True,
            encoding="utf-8",
            env={**os.environ, "COMP_LINE": "python train.py model=eff"},
        )
        assert done.returncode == 0, done.stderr
        assert said in done.stdout
        assert done.stdout.splitlines()[-1] == "[]", done.stdout[-200:]
    assert not list(tmp_path.iterdir())


def test_a_mistake_exits_with_2_and_its_text_alone_and_leaves_nothing(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, str(REPOSITORY / "train.py"), "optim.lr=abc"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "optim.lr must be a number >= 1e-12, got abc.\n"
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_outcomes_of_a_run(program: Path) -> None:
    unlucky, bug, interrupted = (call(program, f"method.lbp_wht.order={order}") for order in (5, 6, 7))
    assert (unlucky.returncode, unlucky.stderr) == (2, "order 5 is out of luck\nand explains it at length\n")
    assert bug.returncode == 1
    assert "Traceback" in bug.stderr
    assert bug.stderr.rstrip().endswith("RuntimeError: a bug")
    assert interrupted.returncode == 130
    assert "same command continues" in interrupted.stderr
    assert "Traceback" not in interrupted.stderr


@pytest.mark.slow
def test_a_reader_that_closes_the_pipe_ends_a_run_without_a_message(program: Path) -> None:
    """A closed pipe, as in `efficient-ft ... | head`, is not reported as an error of the run folder."""
    read, write = os.pipe()
    os.close(read)
    done = subprocess.run([sys.executable, "program.py"], cwd=program, stdout=write, stderr=subprocess.PIPE, text=True)
    os.close(write)
    assert (done.returncode, done.stderr) == (141, "")


@pytest.mark.slow
def test_a_run_has_the_folder_of_its_configuration_or_the_one_it_is_given(program: Path) -> None:
    assert call(program).returncode == 0
    (folder,) = runs_of(program)
    assert re.fullmatch(r"outputs/digits/vit_digits/lbp_wht-ours/[0-9a-f]{8}", folder.as_posix())
    assert (program / folder / ".hydra" / "overrides.yaml").is_file()
    assert call(program, "trainer.progress=false", "hydra.run.dir='my run'").returncode == 0
    assert (program / "my run" / "results.json").is_file()

    # An evaluation uses the settings of the run and the given arguments, and writes no files.
    before = sorted(program.rglob("*"))
    assert call(program, "method.lbp_wht.order=3", "optim.lr=0.5", "hydra.run.dir=third").returncode == 0
    after_third = sorted(program.rglob("*"))
    done = call(program, "evaluate=third", "optim.lr=0.25")
    assert done.stdout == "ran 3 lr 0.25 root ./data evaluate third\n", done.stderr
    counted = call(program, "cost_only=true").stdout
    assert counted.endswith("\nran 4 lr 0.002 root ./data evaluate None\n")
    assert counted.startswith("note: lbp_wht differs from the published method: padding=ortho")
    assert sorted(program.rglob("*")) == after_third != before
    for folder_, said in [("nix", "the folder does not exist"), ("outputs", "no model.safetensors")]:
        refused = call(program, f"evaluate={folder_}")
        assert refused.returncode == 2
        assert said in refused.stderr


def test_further_commands_are_dispatched_by_the_first_word(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "efficient_ft", "predict", "--help"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(REPOSITORY)},
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("usage: efficient-ft predict")
    assert "--top" in done.stdout


def test_a_command_ends_with_its_status(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    def mistaken(arguments: list[str]) -> None:
        raise UserError(f"no {arguments}")

    def interrupted(arguments: list[str]) -> None:
        raise KeyboardInterrupt

    outcomes = {0: lambda arguments: None, 3: lambda arguments: 3, 2: mistaken, 130: interrupted}
    for status, main in outcomes.items():
        monkeypatch.setitem(commands.COMMANDS, "mine", "mine")
        monkeypatch.setitem(sys.modules, "mine", types.SimpleNamespace(main=main))
        monkeypatch.setattr(sys, "argv", ["efficient-ft", "mine", "x"])
        if status == 0:
            main_of_command()
            continue
        with pytest.raises(SystemExit) as end:
            main_of_command()
        assert end.value.code == status
    assert unwrapped(capsys.readouterr().err) == "no ['x']\nInterrupted.\n"


def test_a_copy_of_the_repository_in_a_folder_with_spaces_works(tmp_path: Path) -> None:
    copy = tmp_path / "a copy"
    copy.mkdir()
    shutil.copy(REPOSITORY / "train.py", copy)
    for folder in ("conf", "efficient_ft", "hydra_plugins"):
        shutil.copytree(REPOSITORY / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    done = subprocess.run(
        [sys.executable, str(copy / "train.py"), "--cfg", "job", "optim.lr=0.5"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "lr: 0.5" in done.stdout


@pytest.mark.slow
def test_slurm_is_refused_where_there_is_none(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["efficient-ft", "-m", "hydra/launcher=submitit_slurm", "seed=0,1"])
    with pytest.raises(SystemExit) as ended:
        main_of_command()
    assert ended.value.code == 2
    assert "hydra/launcher=submitit_slurm requires Slurm" in unwrapped(capsys.readouterr().err)


@pytest.mark.parametrize("name", ["bench", "collect", "export", "figure", "predict", "report", "study"])
def test_a_command_without_arguments_lists_what_it_can_do(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    commands.run_command(name, [])
    assert f"efficient-ft {name}" in capsys.readouterr().out
    assert not any(tmp_path.iterdir())
