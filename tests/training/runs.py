"""Helpers for small test runs: their configuration, their interruption and their comparison."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from efficient_ft.config import Config
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.training.output import checkpoint
from tests.promises.children import prepare_environment, run_child
from tests.promises.runs import after_step, in_processes, with_changes
from tests.promises.runs import metrics as rows_of
from tests.promises.runs import require_same_run as assert_same_run

__all__ = [
    "assert_same_run", "interrupted_at", "killed_at", "killed_process", "method_states", "plain_config", "rows_of",
    "run_by_torchrun", "run_in_processes", "uneven_batches",
]  # fmt: skip

REPOSITORY = Path(__file__).resolve().parents[2]

#: Runs PLAIN in FOLDER and sends the process SIGKILL, or the signal KILLED_BY, after optimizer step AT (0: never).
#: In a run with several processes, only the process RANK receives the signal.
SCRIPT = """
import json, os, signal, sys
from pathlib import Path
import torch
torch.set_num_threads(1)
from efficient_ft.cli.exits import clean_exits
from efficient_ft.config import check
from efficient_ft.training.callbacks import recorder
from efficient_ft.training.run import run
plain, folder, at = json.loads(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3])
ranks = [int(rank) for rank in sys.argv[4:]]
recorder.RECORD_EVERY, recorder.STEP_CHECKPOINT_SECONDS = 4, 0.0 if at else 600.0
end = recorder.Recorder.on_train_batch_end
def dying(self, trainer, *args):
    end(self, trainer, *args)
    if trainer.global_step == at and trainer.global_rank in (ranks or [trainer.global_rank]):
        os.kill(os.getpid(), int(os.environ.get("KILLED_BY", signal.SIGKILL)))
recorder.Recorder.on_train_batch_end = dying
with clean_exits():
    run(check(plain), folder)
"""


def plain_config(**changes: Any) -> dict[str, Any]:
    """Return a configuration as plain containers. `changes` are dotted keys with `__` instead of the dot."""
    plain: dict[str, Any] = {
        "model": {
            "name": "vit_digits",
            "pretrained": False,
            "frozen_bn": False,
            "drop_rate": 0.1,
            "drop_path_rate": 0.2,
            "kwargs": {"depth": 2, "embed_dim": 16, "num_heads": 2},
        },
        "data": {
            "name": "digits",
            "batch_size": 128,
            "num_workers": 0,
            "augment": {"scale": [0.6, 1.0], "flip": False},
        },
        "method": {"full": {}},
        "optim": {"name": "adamw", "lr": 1e-2, "weight_decay": 0.05, "label_smoothing": 0.0, "grad_clip_norm": 1.0},
        "trainer": {"epochs": 2, "precision": "fp32", "accelerator": "cpu", "progress": False},
        "cost": {"baseline": "none", "steps": 1},
    }
    return with_changes(plain, **changes)


def method_states(folder: Path) -> dict[str, dict[str, Any]]:
    """Return the methods' states in the checkpoint of `folder`, by method name."""
    held = checkpoint.read(folder / checkpoint.NAME)["callbacks"].get("MethodCallback", {})
    return {key.partition("[")[0]: state for key, state in held.items()}


def interrupted_at(step: int, config: Config, folder: Path, number: signal.Signals = signal.SIGINT) -> None:
    """Run until a signal (by default Ctrl-C) arrives in optimizer step `step`."""
    from efficient_ft.training.callbacks.recorder import Recorder
    from efficient_ft.training.run import run

    end = Recorder.on_train_batch_end

    def interrupted(self: Recorder, trainer: Any, *args: Any) -> None:
        if trainer.global_step == step:
            signal.raise_signal(number)
        end(self, trainer, *args)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Recorder, "on_train_batch_end", interrupted)
        with pytest.raises(KeyboardInterrupt):
            run(config, folder)
    assert checkpoint.read(folder / checkpoint.NAME)["global_step"] == step


def killed_at(step: int, plain: dict[str, Any], folder: Path) -> None:
    """Run in a process that is killed after optimizer step `step`."""
    prepare_environment()
    done = run_child(_train, plain, folder, step, output=folder.with_name(f"{folder.name}.log"))
    assert done.status == -signal.SIGKILL, done.printed
    assert not (folder / "results.json").exists()


def _train(plain: dict[str, Any], folder: Path, at: int = 0) -> None:
    """Run `plain` in a child process, and send SIGKILL after optimizer step `at` (0: never)."""
    from efficient_ft.config import check
    from efficient_ft.training.callbacks import recorder
    from efficient_ft.training.run import run

    recorder.RECORD_EVERY, recorder.STEP_CHECKPOINT_SECONDS = 4, 0.0 if at else 600.0
    if at:
        after_step(at, lambda: signal.raise_signal(signal.SIGKILL))
    run(check(plain), folder)


def killed_process(
    plain: dict[str, Any], folder: Path, process: int, at: int, by: int = signal.SIGKILL
) -> subprocess.CompletedProcess[str]:
    """Run in several processes. One of them receives the signal `by` after optimizer step `at`."""
    file = folder.with_name(f"{folder.name}_killed.py")
    file.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY), "KILLED_BY": str(int(by))}
    return subprocess.run(
        [sys.executable, str(file), json.dumps(plain), str(folder), str(at), str(process)],
        capture_output=True, text=True, timeout=600, env=env,
    )  # fmt: skip


def run_in_processes(plain: dict[str, Any], folder: Path) -> None:
    """Run in the number of processes that `plain` sets."""
    prepare_environment()
    in_processes(plain["trainer"].get("devices", 1), _train, plain, folder, output=folder)


def run_by_torchrun(plain: dict[str, Any], folder: Path, nodes: int = 2) -> list[subprocess.CompletedProcess[str]]:
    """Run with `nodes` torchrun agents, each with one process. Each agent represents a machine."""
    file = folder.with_name(f"{folder.name}.py")
    file.write_text(SCRIPT)
    env = {**os.environ, "PYTHONPATH": str(REPOSITORY)}
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    agents = [
        subprocess.Popen(
            [sys.executable, "-m", "torch.distributed.run", "--nnodes", str(nodes), "--nproc-per-node", "1",
             "--node-rank", str(node), "--master-addr", "127.0.0.1", "--master-port", str(port),
             str(file), json.dumps(plain), str(folder), "0"],
            stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=env,
        )
        for node in range(nodes)
    ]  # fmt: skip
    ended = []
    for agent in agents:
        out, err = agent.communicate(timeout=600)
        ended.append(subprocess.CompletedProcess(agent.args, agent.returncode, out, err))
    return ended


def uneven_batches(task: str) -> tuple[Tensor, Tensor]:
    """Return logits and labels of 12 samples with 4 classes. With batches of 5, the last batch is smaller.

    For segmentation, the fraction of labeled pixels differs between images, and the last two images have no labels.
    """
    generator = torch.Generator().manual_seed(0)
    shape = (12,) if task == "classification" else (12, 6, 5)
    logits = 3 * torch.randn(12, 4, *shape[1:], generator=generator)
    labels = torch.randint(0, 4, shape, generator=generator)
    if task == "segmentation":
        labels[torch.rand(shape, generator=generator) < torch.linspace(0, 1, 12).view(-1, 1, 1)] = IGNORED
        labels[10:] = IGNORED
    return logits, labels
