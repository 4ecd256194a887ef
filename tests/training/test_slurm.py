"""Tests of jobs in a Slurm cluster of two nodes on this machine."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
import yaml

from efficient_ft.training.output import checkpoint
from tests.training.runs import REPOSITORY, assert_same_run, rows_of, run_by_torchrun, run_in_processes
from tests.training.slurm import cluster

pytestmark = pytest.mark.slow

ARGUMENTS = [
    "trainer=slurm", "trainer.num_nodes=2", "trainer.accelerator=cpu", "trainer.epochs=5", "trainer.progress=false",
    "data.batch_size=64", "data.num_workers=0", "method=full", "model.frozen_bn=true",
    "optim=sgd", "optim.lr=0.02", "optim.warmup_steps=0",
    "+model.kwargs={depth:2,embed_dim:16,num_heads:2}", "cost.baseline=none", "cost.steps=1", "allocator=keep",
    "hydra.sweep.dir=runs", "hydra.sweep.subdir=run",
]  # fmt: skip


def test_a_requeued_job_continues_to_the_bits_of_a_straight_run_and_equals_one_process(tmp_path: Path) -> None:
    """A job is stopped by `scontrol requeue` and by the signal of a time limit, and continues from both checkpoints."""
    pytest.importorskip("hydra_plugins.hydra_submitit_launcher")
    folder = tmp_path / "runs" / "run"
    with cluster(tmp_path / "slurm") as variables:
        environment = {**os.environ, **variables, "PYTHONPATH": str(REPOSITORY)}

        def slurm(*command: str) -> str:
            done = subprocess.run(command, capture_output=True, text=True, env=environment)
            assert done.returncode == 0, f"{command}: {done.stderr}"
            return done.stdout.strip()

        with open(tmp_path / "submitted.log", "w") as log:
            command = [sys.executable, "-m", "efficient_ft", *ARGUMENTS]
            submitted = subprocess.Popen(command, cwd=tmp_path, env=environment, stdout=log, stderr=log)
        try:
            wait_for(folder, 1, submitted)
            slurm("scontrol", "requeue", slurm("squeue", "-h", "-o", "%i"))
            wait_for(folder, 3, submitted)
            slurm("scancel", "--signal=USR2", slurm("squeue", "-h", "-o", "%i"))
            assert submitted.wait(timeout=600) == 0
        except BaseException:
            print(slurm("squeue"), slurm("sinfo", "-R"), printed_in(tmp_path), sep="\n")
            raise
        finally:
            submitted.kill()
            submitted.wait()
    printed = printed_in(tmp_path / "runs" / ".submitit")
    assert printed.count("Continuing the run in") == 2, printed
    assert "Traceback" not in printed

    plain = yaml.safe_load((folder / "config.yaml").read_text())
    for ended in run_by_torchrun(plain, tmp_path / "straight"):
        assert ended.returncode == 0, ended.stderr
    assert_same_run(folder, tmp_path / "straight", steps=False)

    plain["data"]["batch_size"], plain["trainer"]["num_nodes"] = 128, 1
    run_in_processes(plain, tmp_path / "one")
    one, two = (checkpoint.read(place / checkpoint.NAME)["state_dict"] for place in (tmp_path / "one", folder))
    for key, value in one.items():
        torch.testing.assert_close(two[key], value, rtol=1e-3, atol=1e-4)


def wait_for(folder: Path, epochs: int, submitted: subprocess.Popen[bytes]) -> None:
    """Wait until the run in `folder` has finished `epochs` epochs."""
    end = time.monotonic() + 300
    while time.monotonic() < end and submitted.poll() is None:
        if (folder / "metrics.jsonl").is_file() and len(rows_of(folder)) >= epochs:
            return
        time.sleep(0.05)
    raise AssertionError(f"{epochs} epochs were not finished in five minutes")


def printed_in(folder: Path) -> str:
    """Return the output of the daemons and the jobs."""
    files = sorted({*folder.rglob("*.log"), *folder.rglob("*_log.*")})
    return "\n".join(f"--- {file.relative_to(folder)}\n{file.read_text(errors='replace')}" for file in files)
