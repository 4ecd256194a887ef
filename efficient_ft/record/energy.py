"""Energy measurement with the counters of NVIDIA GPUs, and with the counters of processors on Linux (RAPL)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

#: Folder of the energy counters of processors on Linux, in µJ. On many machines, only root may read the counters.
POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Meter for the energy that the whole machine has used since `start`, including other programs.

    Args:
        gpu: index of the CUDA device that the run uses, or None if the run does not use a GPU.

    Attributes:
        source: names of the counters, such as ``"processor packages and GPU"``, or None if no counter is readable.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self._counters: list[Callable[[], float]] = []
        sources = []
        if packages := _packages():
            self._counters += packages
            sources.append("processor packages")
        if gpu is not None and (counter := _gpu_counter(gpu)) is not None:
            self._counters.append(counter)
            sources.append("GPU")
        self.source = " and ".join(sources) or None
        self._joules = 0.0
        self._last: list[float] = []

    def start(self) -> None:
        """Start counting."""
        self._last = [read() for read in self._counters]

    @property
    def joules(self) -> float | None:
        """Energy that has been used since `start`, in joules, or None if no counter is readable.

        Read this property every few minutes, because the counters wrap around.
        """
        if self.source is None:
            return None
        now = [read() for read in self._counters]
        # If a counter wrapped around or could not be read, the interval is not counted.
        self._joules += sum(max(0.0, new - old) for new, old in zip(now, self._last, strict=False))
        self._last = now
        return self._joules


def _packages() -> list[Callable[[], float]]:
    counters: list[Callable[[], float]] = []
    for folder in sorted(POWERCAP.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:  # The energy of a package includes the energy of its parts.
            continue
        file = folder / "energy_uj"
        with contextlib.suppress(OSError, ValueError):
            int(file.read_text())
            counters.append(partial(_joules, file))
    return counters


def _joules(file: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text()) / 1e6
    return math.nan  # NaN: `EnergyMeter.joules` skips intervals that begin or end with NaN.


def _gpu_counter(index: int) -> Callable[[], float] | None:
    """Return the energy counter of a CUDA device, or None if it is unavailable (no pynvml, or a GPU before Volta)."""
    try:
        import pynvml
        import torch

        pynvml.nvmlInit()
        # NVML ignores CUDA_VISIBLE_DEVICES, so its indices differ from those of CUDA.
        uuid = f"GPU-{torch.cuda.get_device_properties(index).uuid}"
        handle: Any = pynvml.nvmlDeviceGetHandleByUUID(uuid)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # different exceptions are raised if pynvml, the driver or the counter is missing
        return None

    def joules() -> float:
        with contextlib.suppress(pynvml.NVMLError):
            return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3
        return math.nan

    return joules
