"""The processes of a run: their number, their launcher, and their connection.

The first process starts the others on its machine through Lightning, unless torchrun or Slurm has started all of them.
The processes are connected before they read the run folder, which the first process prepares.
"""

from __future__ import annotations

import atexit
import os
import subprocess
from typing import Any

import lightning.pytorch as L
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments import ClusterEnvironment, LightningEnvironment, SLURMEnvironment
from lightning.fabric.plugins.environments import TorchElasticEnvironment as Torchrun

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.training.output.console import rank, say

#: Environment variables with the rank of a process, in the order in which Lightning reads them.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

GUIDE = "See docs/guides/several-processes.md."


def world_size(config: Config) -> int:
    """Return the number of training processes on all nodes. A Trainer is not needed."""
    options = config.trainer
    gpus = torch.cuda.device_count() if options.accelerator in ("auto", "gpu") else 0
    return (max(1, gpus) if options.devices == "auto" else options.devices) * options.num_nodes


class SameStart(L.Callback):
    """Restore the random state of its creation for the `setup` of later callbacks.

    Lightning seeds again when it connects several processes. Without this callback, adapters would start from different
    weights.
    """

    def __init__(self) -> None:
        self._state = torch.get_rng_state()

    def setup(self, trainer: L.Trainer, pl_module: L.LightningModule, stage: str) -> None:
        torch.set_rng_state(self._state)


def environment() -> ClusterEnvironment:
    """Return the launcher of the processes: torchrun, Slurm (srun), or Lightning in the first process.

    Raises:
        UserError: If Slurm does not provide the number of processes per node.
    """
    if Torchrun.detect():
        return Torchrun()
    # Without srun a job has one process, regardless of the number of requested tasks.
    if SLURMEnvironment.detect() and "SLURM_STEP_ID" in os.environ:
        try:
            return SLURMEnvironment(auto_requeue=False)  # the recorder saves and requeues
        except RuntimeError as error:
            raise UserError(f"Pass --ntasks-per-node to Slurm, not --ntasks alone. {GUIDE}") from error
    return LightningEnvironment()


def connect(config: Config) -> None:
    """Connect the processes that torchrun or Slurm started. Lightning connects the processes that it starts.

    Raises:
        UserError: If the number of processes differs from the settings, if neither torchrun nor Slurm started the
            processes of several nodes, or if the environment gives the only process a rank other than 0.
    """
    options, started_by = config.trainer, environment()
    if isinstance(started_by, LightningEnvironment):
        if options.num_nodes > 1:
            raise SettingError(
                "trainer.num_nodes", options.num_nodes, "1 for a command that neither torchrun nor srun started", GUIDE
            )
        if rank() > 0 and world_size(config) == 1:
            name = next(name for name in _RANKS if name in os.environ)
            raise UserError(
                f"{name}={os.environ[name]} in the environment means that this is not the first process of the run, but"
                f" the run has one process (trainer.devices). Unset {name}."
            )
        return
    found, asked = started_by.world_size(), world_size(config)
    name = "torchrun" if isinstance(started_by, Torchrun) else "Slurm"
    if config.evaluate is not None or config.cost_only:
        if found > 1:
            raise UserError(f"{name} started {found} processes, but an evaluation or a cost report needs one.")
        return
    if found != asked:
        raise SettingError(
            "trainer.devices x trainer.num_nodes",
            f"{options.devices} x {options.num_nodes}",
            f"{found}, the number of processes that {name} started",
        )
    if found == 1:
        return
    cuda = options.accelerator in ("auto", "gpu") and torch.cuda.is_available()
    if cuda:
        torch.cuda.set_device(started_by.local_rank())
    os.environ.update(MASTER_ADDR=started_by.main_address, MASTER_PORT=str(started_by.main_port))
    # Lightning uses the existing process group.
    dist.init_process_group("nccl" if cuda else "gloo", rank=started_by.global_rank(), world_size=found)
    atexit.register(_disconnect)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def from_first(value: Any = None) -> Any:
    """Broadcast `value` from the first process, and wait for it. Collective. A single process returns `value`."""
    if not (dist.is_available() and dist.is_initialized()):
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def requeue() -> None:
    """Ask Slurm to run this job again. Call this function in the first process, after the checkpoint is written."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        failed = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        failed = str(error)
    if failed is None:
        say(f"Slurm was asked to run job {job} again; it continues from this checkpoint.")
    else:
        say(f"warning: Slurm did not requeue job {job} ({failed}). The same command continues from this checkpoint.")
