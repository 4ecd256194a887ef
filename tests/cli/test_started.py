"""Tests of commands that start with closed or full streams, in a removed folder or with a malformed environment."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from efficient_ft.cli.started import malformed_environment
from tests.cli.program import REPOSITORY
from tests.conftest import unwrapped

pytestmark = pytest.mark.skipif(sys.platform == "win32", reason="POSIX shells")


def shell(folder: Path, words: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Run ``efficient-ft WORDS`` with a shell in `folder`, with each message on one line."""
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), **environment}
    command = f"{sys.executable} -m efficient_ft {words}"
    done = subprocess.run(["bash", "-c", command], cwd=folder, env=env, capture_output=True, text=True, timeout=300)
    done.stderr = unwrapped(done.stderr)
    return done


@pytest.mark.vary_one(slow=True)
@pytest.mark.parametrize("closed", [">&-", "2>&-", "<&-", "<&- >&- 2>&-"])
@pytest.mark.parametrize(("words", "status"), [("--cfg job", 0), ("optim.lr=x", 2), ("collect x", 2)])
def test_closed_streams_change_no_status(tmp_path: Path, closed: str, words: str, status: int) -> None:
    done = shell(tmp_path, f"{words} {closed}")
    assert done.returncode == status, done.stderr
    assert "Traceback" not in done.stdout + done.stderr


@pytest.mark.first(1, "slow")
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize("words", ["--cfg job", "--help", "plan --help", "selftest --help"])
def test_an_output_that_is_full_is_one_message(tmp_path: Path, words: str) -> None:
    done = shell(tmp_path, f"{words} >/dev/full")
    assert done.returncode == 2, done.stderr
    assert done.stderr.strip() == (
        "The standard output cannot be written: no space left on device. Redirect the output to another file or device."
    )


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
@pytest.mark.parametrize(("words", "status"), [("--cfg job", 0), ("optim.lr=x", 2)])
def test_messages_that_cannot_be_written_change_no_status(tmp_path: Path, words: str, status: int) -> None:
    assert shell(tmp_path, f"{words} 2>/dev/full").returncode == status


@pytest.mark.parametrize("words", ["", "--help", "plan", "collect x", "evaluate=x"])
def test_a_current_folder_that_was_removed_is_one_message(tmp_path: Path, words: str) -> None:
    done = subprocess.run(
        ["bash", "-c", f"mkdir gone; cd gone; rmdir ../gone; {sys.executable} -m efficient_ft {words}"],
        cwd=tmp_path, env={**os.environ, "PYTHONPATH": str(REPOSITORY)}, capture_output=True, text=True, timeout=300,
    )  # fmt: skip
    assert done.returncode == 2, done.stderr
    assert "The current folder cannot be used" in done.stderr
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(
    ("variables", "said"),
    [
        ({"RANK": "x"}, "The environment variable RANK must be an integer >= 0, got x. Correct or unset RANK."),
        ({"LOCAL_RANK": ""}, "The environment variable LOCAL_RANK must be an integer >= 0, got ''."),
        ({"SLURM_NTASKS": "x"}, "The environment variable SLURM_NTASKS must be an integer >= 1, got x."),
        ({"SLURM_PROCID": "-1"}, "The environment variable SLURM_PROCID must be an integer >= 0, got -1."),
        ({"WORLD_SIZE": "0"}, "The environment variable WORLD_SIZE must be an integer >= 1, got 0."),
        ({"WORLD_SIZE": "1.5"}, "The environment variable WORLD_SIZE must be an integer >= 1, got 1.5."),
        (
            {"MASTER_PORT": "99999"},
            "The environment variable MASTER_PORT must be an integer from 0 to 65535, got 99999.",
        ),
        ({"NUMBA_NUM_THREADS": "0"}, "The environment variable NUMBA_NUM_THREADS must be an integer >= 1, got 0."),
        ({"TORCHELASTIC_RUN_ID": "a"}, "The environment variable TORCHELASTIC_RUN_ID is set without RANK, LOCAL_RANK,"),
        ({"SLURM_STEP_ID": "0"}, "The environment variable SLURM_STEP_ID is set without SLURM_NTASKS, SLURM_PROCID,"),
    ],
    ids=str,
)
def test_a_malformed_environment_is_one_message(
    variables: dict[str, str], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "SLURM_NTASKS", "SLURM_PROCID", "SLURM_STEP_ID"):
        monkeypatch.delenv(name, raising=False)
    assert malformed_environment() is None
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    assert str(malformed_environment()).startswith(said)


def test_a_malformed_environment_ends_a_command(tmp_path: Path) -> None:
    done = shell(tmp_path, "--help", RANK="x")
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "The environment variable RANK must be an integer >= 0, got x. Correct or unset RANK.\n"
