"""Description of the environment of a measurement: versions, device, threads and load."""

from __future__ import annotations

import datetime
import os
import platform
import re
import subprocess
import sys
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_ft import __version__

if TYPE_CHECKING:
    import torch

#: Maximum load average of the last minute at which measured times are reliable.
BUSY_LOAD = 0.5


def environment(
    device: torch.device | str = "cpu", packages: Iterable[str] = ("torch", "timm"), **more: Any
) -> dict[str, Any]:
    """Return a description of the current environment for a JSON record.

    Args:
        device: device of the measurement.
        packages: names of packages whose versions are recorded.
        more: additional entries, for example ``allocator="mimalloc"``.

    Returns:
        A dictionary with the versions of `packages` and the entries ``date`` (UTC), ``efficient_ft`` (version of this
        package), ``commit`` (see `commit`), ``python``, ``platform``, ``device`` (model of the GPU or CPU), ``threads``
        (number of threads in torch) and ``load`` (load average of the last minute, or None if it is unavailable).
    """
    import torch

    device = torch.device(device)
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "efficient_ft": __version__,
        "commit": commit(),
        **{package: _version(package) for package in packages},
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        "load": os.getloadavg()[0] if hasattr(os, "getloadavg") else None,
        **more,
    }


@cache
def commit() -> str | None:
    """Return the commit of the checkout that contains this package, or None if the package is not in a git checkout.

    The hash ends with ``+`` if tracked files of the package or of its configuration were changed after the commit.
    """
    root = Path(__file__).resolve().parents[2]
    if not (root / ".git").exists():
        return None

    def git(*arguments: str) -> str:
        done = subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, timeout=20, check=True)
        return done.stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", "efficient_ft", "conf")
        return git("rev-parse", "HEAD") + ("+" if changed else "")
    except (OSError, subprocess.SubprocessError):
        return None


def device_name(device: torch.device | str) -> str:
    """Return the model name of the GPU or CPU."""
    import torch

    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    return cpu_name() if device.type == "cpu" else f"{device.type} ({platform.machine()})"


def _version(package: str) -> str:
    """Return the version of a package. The version of an imported package includes the build (for example, +cu128)."""
    return str(getattr(sys.modules.get(package), "__version__", None) or version(package))


def cpu_name() -> str:
    """Return the model name of the CPU, or the architecture of the CPU if the name is unknown.

    Virtual machines often report a name without a number, for example ``AMD EPYC``. Such a name is the same for several
    generations, so the family and the model of the CPU are added.
    """
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8").partition("\n\n")[0]  # the first core
    except OSError:  # not Linux
        text = ""
    lines = (line.partition(":") for line in text.splitlines())
    about = {key.strip(): value.strip() for key, _, value in lines}
    name = about.get("model name")
    if not name:
        return platform.processor() or platform.machine()
    generic = not re.search(r"\d", name.partition("@")[0])  # "@ 2.20GHz" is the frequency
    if generic and {"cpu family", "model"} <= about.keys():
        return f"{name} (family {about['cpu family']}, model {about['model']})"
    return name


def busy_note(recorded: Mapping[str, Any]) -> str | None:
    """Return a note that times are uncertain, or None if the load in the environment `recorded` is low."""
    load = recorded.get("load")
    if load is None or load <= BUSY_LOAD:
        return None
    return (
        f"The machine was busy: the load at the start ({load:.1f}) was above {BUSY_LOAD}. Times are uncertain. Ratios"
        " of times within a round are less affected."
    )
