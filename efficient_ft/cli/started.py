"""Processes started by torchrun, Slurm or Lightning, identified by environment variables. Imports no library."""

from __future__ import annotations

import os

#: Variables with a rank or a number of processes, which libraries read when they are imported.
_NUMBERS = ("RANK", "LOCAL_RANK", "GROUP_RANK", "NODE_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS",
            "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID", "JSM_NAMESPACE_RANK", "MASTER_PORT")  # fmt: skip
#: Variables with a number of threads, which numba requires to be >= 1.
_THREADS = ("NUMBA_NUM_THREADS",)
#: The program (torchrun or srun) that sets a variable, and other variables that this program always sets.
_TOGETHER = {
    "TORCHELASTIC_RUN_ID": ("torchrun", ("RANK", "LOCAL_RANK", "WORLD_SIZE")),
    "SLURM_STEP_ID": ("srun", ("SLURM_NTASKS", "SLURM_PROCID", "SLURM_LOCALID", "SLURM_NODEID")),
}
#: Maximum port number.
_PORTS = 65535


def first_process() -> bool:
    """Return True in the first process that torchrun, Slurm or Lightning started."""
    names = ("RANK", "LOCAL_RANK", *(("SLURM_PROCID",) if "SLURM_STEP_ID" in os.environ else ()))
    return next((os.environ[name] for name in names if name in os.environ), "0") == "0"


def started_processes() -> int:
    """Return the number of processes that torchrun or srun started."""
    return int(os.environ.get("SLURM_NTASKS" if "SLURM_STEP_ID" in os.environ else "WORLD_SIZE", "1"))


def malformed_environment() -> str | None:
    """Return an error message for an environment variable with an invalid number; None if all are valid."""
    for name in (*_NUMBERS, *_THREADS):
        text = os.environ.get(name)
        least = int(name in _THREADS or name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"))
        if text is None or (_integer(text) and int(text) >= least and (name != "MASTER_PORT" or int(text) <= _PORTS)):
            continue
        allowed = f"from {least} to {_PORTS}" if name == "MASTER_PORT" else f">= {least}"
        shown = ascii(text) if not text.isprintable() or not text.strip() else text
        return f"{name} in the environment must be an integer {allowed}, got {shown}. Unset it, or correct it."
    for mark, (program, names) in _TOGETHER.items():
        lacking = [name for name in names if name not in os.environ] if mark in os.environ else []
        if lacking:
            missing = ", ".join(lacking)
            return f"{mark} is set in the environment without {missing}. Use {program} to start, or unset {mark}."
    return None


def _integer(text: str) -> bool:
    return text.isascii() and text.isdecimal() and len(text) < 10
