"""The environment of a run or a measurement: versions, platform, device."""

from __future__ import annotations

import platform
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from efficient_ft import __version__


def environment(device: torch.device | str, **more: Any) -> dict[str, Any]:
    """Versions, platform, device name and number of threads, for results.json and reports.

    Args:
        device: the device that computes.
        more: further entries, e.g. ``keep_allocator=True``.
    """
    device = torch.device(device)
    return {
        "efficient_ft": __version__,
        "torch": torch.__version__,
        "timm": version("timm"),
        "lightning": version("lightning"),
        "python": platform.python_version(),
        "platform": platform.platform(),
        "device": device_name(device),
        "threads": torch.get_num_threads(),
        **more,
    }


def device_name(device: torch.device | str) -> str:
    """The name of the GPU, or of the CPU's model where the system tells it."""
    device = torch.device(device)
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type != "cpu":
        return f"{device.type} ({platform.machine()})"
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        lines = []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
