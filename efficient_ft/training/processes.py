"""Number, launcher and connection of the processes of a run.

If torchrun or Slurm started the processes, all of them already exist. Otherwise, the first process starts the other
processes on its machine through Lightning. The first process prepares the run folder. The processes are connected
before they read this folder.
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
from lightning.pytorch.callbacks import LambdaCallback

from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.training.output.console import rank, say

#: Environment variables that contain the rank of a process, in the order in which Lightning reads them.
_RANKS = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "JSM_NAMESPACE_RANK")

GUIDE = "See docs/guides/several-processes.md."


def world_size(config: Config) -> int:
    """Return the number of training processes on all nodes, without building a Trainer."""
    options = config.trainer
    gpus = torch.cuda.device_count() if options.accelerator in ("auto", "gpu") else 0
    return (max(1, gpus) if options.devices == "auto" else options.devices) * options.num_nodes


def same_start() -> L.Callback:
    """Return a callback that restores the present random state before later callbacks are set up.

    Lightning sets the seed again when it connects several processes. Without this callback, adapters would be
    initialized differently in several processes than in a single process.
    """
    state = torch.get_rng_state()
    return LambdaCallback(setup=lambda *_, **__: torch.set_rng_state(state))


def environment() -> ClusterEnvironment:
    """Return the launcher of the processes: torchrun, Slurm (srun), or Lightning in the first process.

    Raises:
        UserError: If Slurm does not provide the number of processes per node.
    """
    if Torchrun.detect():
        return Torchrun()
    # Without srun, a job has only one process, regardless of the number of requested tasks.
    if SLURMEnvironment.detect() and "SLURM_STEP_ID" in os.environ:
        try:
            return SLURMEnvironment(auto_requeue=False)  # the recorder saves a checkpoint and requeues the job
        except RuntimeError as error:
            raise UserError(f"Start the Slurm job with --ntasks-per-node, not with --ntasks alone. {GUIDE}") from error
    return LightningEnvironment()


def connect(config: Config) -> None:
    """Connect the processes if torchrun or Slurm started them. Otherwise, Lightning starts and connects them.

    Raises:
        UserError: If the number of processes differs from the settings, if the processes of several nodes were not
            started by torchrun or Slurm, or if the environment assigns a rank other than 0 to the only process.
    """
    options, started_by = config.trainer, environment()
    if isinstance(started_by, LightningEnvironment):
        if options.num_nodes > 1:
            raise SettingError(
                "trainer.num_nodes", options.num_nodes, "1 unless torchrun or srun starts the command", GUIDE
            )
        if rank() > 0 and world_size(config) == 1:
            name = next(name for name in _RANKS if name in os.environ)
            raise UserError(
                f"The environment variable {name}={os.environ[name]} means that this is not the first process, but the"
                f" run has only one process (trainer.devices). Unset {name}."
            )
        return
    found, asked = started_by.world_size(), world_size(config)
    name = "torchrun" if isinstance(started_by, Torchrun) else "Slurm"
    if config.evaluate is not None or config.cost_only:
        if found > 1:
            raise UserError(f"{name} started {found} processes, but evaluations and cost reports run in one process.")
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
    # Lightning uses a process group that already exists.
    dist.init_process_group("nccl" if cuda else "gloo", rank=started_by.global_rank(), world_size=found)
    atexit.register(_disconnect)


def _disconnect() -> None:
    if dist.is_initialized():
        dist.destroy_process_group()


def is_connected() -> bool:
    """Return True if this process is connected to the other processes of the run."""
    return dist.is_available() and dist.is_initialized()


def from_first(value: Any = None) -> Any:
    """Broadcast `value` from the first process, and return it. All processes must call this function.

    If there is only one process, `value` is returned unchanged.
    """
    if not is_connected():
        return value
    held = [value]
    dist.broadcast_object_list(held, src=0)
    return held[0]


def requeue() -> None:
    """Ask Slurm to run this job again. Call this function in the first process after the checkpoint was written."""
    array = os.environ.get("SLURM_ARRAY_JOB_ID")
    job = os.environ["SLURM_JOB_ID"] if array is None else f"{array}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        done = subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60)
        failed = done.stderr.strip() if done.returncode else None
    except (OSError, subprocess.SubprocessError) as error:
        failed = str(error)
    if failed is None:
        say(f"Slurm was asked to run job {job} again. The job will continue from this checkpoint.")
    else:
        say(f"warning: Slurm did not requeue job {job} ({failed}). Run the same command again to continue the run.")
