"""The processes that torchrun, Slurm or Lightning started, by the environment. Loads nothing."""

from __future__ import annotations

import os


def first_process() -> bool:
    """Whether this is the first of the processes that torchrun, Slurm or Lightning started."""
    names = ("RANK", "LOCAL_RANK", *(("SLURM_PROCID",) if "SLURM_STEP_ID" in os.environ else ()))
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def started_processes() -> int:
    """The number of processes that torchrun or srun started with this one."""
    return int(os.environ.get("SLURM_NTASKS" if "SLURM_STEP_ID" in os.environ else "WORLD_SIZE", "1"))
