"""Detect from environment variables whether torchrun, Slurm or Lightning started this process.

This module imports only the standard library.
"""

from __future__ import annotations

import os

#: Variables that contain a rank, a number of processes or a port. Libraries read these variables on import.
_NUMBERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS",
            "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "JSM_NAMESPACE_RANK", "MASTER_PORT")  # fmt: skip
#: Variables that contain a number of threads. numba requires a number >= 1.
_THREADS = ("NUMBA_NUM_THREADS",)
#: Maps a variable to the program (torchrun or srun) that sets the variable, and to other variables of this program.
_TOGETHER = {
    "TORCHELASTIC_RUN_ID": ("torchrun", ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
    "SLURM_STEP_ID": ("srun", ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")),
}
#: Maximum port number.
_PORTS = 65535


def first_process() -> bool:
    """Return True in the first process that torchrun, Slurm or Lightning started.

    The function also returns True if none of these programs started this process.
    """
    names = ("RANK", "LOCAL_RANK", *(("SLURM_PROCID",) if "SLURM_STEP_ID" in os.environ else ()))
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def started_processes() -> int:
    """Return the number of processes that torchrun or srun started, or 1 if neither program started this process."""
    return int(os.environ.get("SLURM_NTASKS" if "SLURM_STEP_ID" in os.environ else "WORLD_SIZE", "1"))


def malformed_environment() -> str | None:
    """Return an error message if an environment variable has an invalid number, or if a related variable is missing.

    Return None if there is no error.
    """
    for name in (*_NUMBERS, *_THREADS):
        text = os.environ.get(name)
        least = int(name in _THREADS or name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"))
        if text is None or (_integer(text) and int(text) >= least and (name != "MASTER_PORT" or int(text) <= _PORTS)):
            continue
        allowed = f"from {least} to {_PORTS}" if name == "MASTER_PORT" else f">= {least}"
        shown = ascii(text) if not text.isprintable() or not text.strip() else text
        return f"The environment variable {name} must be an integer {allowed}, got {shown}. Correct or unset {name}."
    for mark, (program, names) in _TOGETHER.items():
        lacking = [name for name in names if name not in os.environ] if mark in os.environ else []
        if lacking:
            missing = ", ".join(lacking)
            return f"The environment variable {mark} is set without {missing}. Use {program}, or unset {mark}."
    return None


def _integer(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
