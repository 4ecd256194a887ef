"""Energy that the machine used, from the counters it has: NVIDIA's GPUs, and the processors of Linux (RAPL)."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

#: Linux's counters of processor packages, in µJ; on many machines only root may read them.
POWERCAP = Path("/sys/class/powercap")


class EnergyMeter:
    """Joules used since `start`, by the whole machine's counters: other programs count too.

    Args:
        gpu: index of the CUDA device that trains; None: none does.

    Attributes:
        source: what is counted, e.g. ``"processor packages and GPU"``; None: there is no counter that may be read.
    """

    def __init__(self, gpu: int | None = None) -> None:
        self._counters: list[Callable[[], float]] = []
        sources = []
        packages = _packages()
        if packages:
            self._counters += packages
            sources.append("processor packages")
        if gpu is not None and (counter := _gpu_counter(gpu)) is not None:
            self._counters.append(counter)
            sources.append("GPU")
        self.source = " and ".join(sources) or None
        self._joules = 0.0
        self._last: list[float] = []

    def start(self) -> None:
        """Begin to count."""
        self._last = [read() for read in self._counters]

    @property
    def joules(self) -> float | None:
        """Joules since `start`; None without a counter. Read at least every few minutes: counters wrap around."""
        if self.source is None:
            return None
        now = [read() for read in self._counters]
        # A counter that has wrapped around (or that failed) adds nothing for this interval.
        self._joules += sum(max(0.0, new - old) for new, old in zip(now, self._last, strict=False))
        self._last = now
        return self._joules


def _packages() -> list[Callable[[], float]]:
    counters: list[Callable[[], float]] = []
    for folder in sorted(POWERCAP.glob("intel-rapl:*")):
        if folder.name.count(":") != 1:  # parts of a package
            continue
        file = folder / "energy_uj"
        with contextlib.suppress(OSError, ValueError):
            int(file.read_text())
            counters.append(partial(_joules, file))
    return counters


def _joules(file: Path) -> float:
    with contextlib.suppress(OSError, ValueError):
        return int(file.read_text()) / 1e6
    return math.nan  # the intervals before and after it add nothing


def _gpu_counter(index: int) -> Callable[[], float] | None:
    """The energy counter of a GPU, if pynvml is installed and the GPU has one (Volta and later)."""
    try:
        import pynvml

        pynvml.nvmlInit()
        handle: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
        pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except Exception:  # not installed, no driver, or no counter: each has its own error
        return None

    def joules() -> float:
        return float(pynvml.nvmlDeviceGetTotalEnergyConsumption(handle)) / 1e3

    return joules
