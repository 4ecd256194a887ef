"""Tests of the command line of a Slurm submission. Tests with real jobs are in tests/training/test_slurm.py."""

from __future__ import annotations

import shutil
import sys

import pytest

from efficient_ft.cli.hydra import slurm
from efficient_ft.cli.main import main as main_of_command
from efficient_ft.config import check
from efficient_ft.core.errors import SettingError
from tests.config.settings import with_settings
from tests.conftest import unwrapped


@pytest.fixture(autouse=True)
def outside_of_a_job(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("SLURM_JOB_ID", raising=False)
    monkeypatch.setenv("SLURM_KILL_BAD_EXIT", "1")


def test_a_submission_asks_for_the_nodes_tasks_and_gpus_of_its_runs() -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    arguments = slurm.with_launcher(["trainer=slurm", "hydra.launcher.partition=gpu"])
    assert arguments == ["trainer=slurm", slurm.LAUNCHER, "hydra.launcher.partition=gpu"]
    shape = {"trainer__num_nodes": 2, "trainer__devices": 4}
    found = slurm.submission(arguments, [check(with_settings(**shape, seed=seed)) for seed in (0, 1)])
    assert found[0] == "--multirun"
    assert {"hydra.launcher.nodes=2", "hydra.launcher.tasks_per_node=4", "hydra.launcher.gpus_per_node=4"} < set(found)
    assert found[-3:] == arguments, "those of the user win"
    on_cpu = slurm.submission(["-m", *arguments], [check(with_settings(**shape, trainer__accelerator="cpu"))])
    assert not any("gpus_per_node" in one for one in on_cpu)
    assert on_cpu[:2] == ["-m", "hydra.launcher.nodes=2"]
    assert "--multirun" not in on_cpu


def test_runs_that_slurm_cannot_start_are_refused() -> None:
    with pytest.raises(SettingError, match="must be equal in all jobs of a sweep with trainer=slurm, got 1 1 auto"):
        slurm.submission(["a=b"], [check(with_settings(trainer__num_nodes=nodes)) for nodes in (1, 2)])
    with pytest.raises(SettingError, match=r"trainer.devices must be an integer >= 1 with trainer=slurm, got auto"):
        slurm.submission([], [check(with_settings(trainer__devices="auto"))])


def test_a_job_trains_and_submits_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    assert slurm.submits(["trainer=slurm"])
    assert not slurm.submits(["trainer=ddp"])
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    assert not slurm.submits(["trainer=slurm"])
    assert slurm.with_launcher(["trainer=slurm"]) == ["trainer=slurm"]


@pytest.mark.parametrize(
    ("arguments", "environment", "said"),
    [
        (["trainer=slurm"], {}, "trainer=slurm requires Slurm, but srun was not found on this machine."),
        (["-m", "seed=0,1"], {"WORLD_SIZE": "2"}, "-m starts a process for each job. Use -m without torchrun and srun"),
    ],
)
def test_what_starts_no_job_is_refused(
    arguments: list[str],
    environment: dict[str, str],
    said: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    monkeypatch.setattr(sys, "argv", ["efficient-ft", *arguments])
    with pytest.raises(SystemExit) as ended:
        main_of_command()
    assert ended.value.code == 2
    assert unwrapped(capsys.readouterr().err).startswith(said)
