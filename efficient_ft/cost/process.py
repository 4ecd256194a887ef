"""Process memory (RSS) of training steps, for comparison with counted bytes.

Growth is the highest resident memory during a step minus the resident memory before the *first* step. Later steps may
begin with more resident memory, because an allocator may keep freed memory. Growth includes activations, gradients,
temporaries, the optimizer's state, and memory that the allocator cannot reuse. Growth does not include the model and
the batch, which exist before the first step. The counted equivalent is ``Executed.step_peak_bytes`` plus the
optimizer's state.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from efficient_ft.core.process_memory import HighWaterMark, resident_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a CUDA device, measured by PyTorch's allocator.

    Attributes:
        before_bytes: number of bytes allocated before the first step (model and batch).
        allocated_bytes: largest number of bytes allocated to tensors during a step.
        reserved_bytes: largest number of bytes that the allocator reserved during a step.
    """

    before_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class ProcessMemory:
    """Memory of the process over several training steps.

    Attributes:
        before_bytes: resident memory before the first step, in bytes.
        peak_bytes: highest resident memory during the measured steps, in bytes.
        source: method of measurement (see `core.process_memory.HighWaterMark`).
        first_step: number of the first measured step, counted from 0. Earlier steps are warm-up steps.
        steps: number of measured steps.
        device: memory of the CUDA device, or None on other devices.
    """

    before_bytes: int
    peak_bytes: int
    source: str
    first_step: int
    steps: int
    device: DeviceMemory | None = None

    @property
    def growth_bytes(self) -> int:
        """Growth of the process memory or, on CUDA, of the memory reserved on the device, in bytes."""
        if self.device is not None:
            return self.device.reserved_bytes - self.device.before_bytes
        return self.peak_bytes - self.before_bytes


class StepMemory:
    """Measure the memory of training steps.

    Create the object before the first step, then run each step inside ``with memory:``.

    Args:
        device: device of the steps. On CUDA, the peak statistics of the device are reset in each step.
        present_bytes: size of memory that the steps use but that is already allocated, for example optimizer state.
    """

    def __init__(self, device: torch.device | str = "cpu", present_bytes: int = 0) -> None:
        self._device = torch.device(device)
        self._cuda = self._device.type == "cuda"
        self._mark = HighWaterMark()
        self._before = resident_bytes() - (0 if self._cuda else present_bytes)
        self._device_before = torch.cuda.memory_allocated(self._device) - present_bytes if self._cuda else 0
        self._peaks: list[int] = []
        self._on_device: list[tuple[int, int]] = []

    @property
    def steps(self) -> int:
        """Number of measured steps so far."""
        return len(self._peaks)

    def start(self) -> None:
        """Begin a step."""
        self._mark.start()
        if self._cuda:
            torch.cuda.reset_peak_memory_stats(self._device)

    def stop(self) -> None:
        """End a step."""
        self._mark.stop()
        self._peaks.append(self._mark.peak_bytes)
        if self._cuda:
            peaks = torch.cuda.max_memory_allocated(self._device), torch.cuda.max_memory_reserved(self._device)
            self._on_device.append(peaks)

    def __enter__(self) -> StepMemory:
        self.start()
        return self

    def __exit__(self, *exc: Any) -> None:
        self.stop()

    def measured(self, warmup: int) -> ProcessMemory | None:
        """Return the memory of the steps after the first `warmup` steps, or None if there are no steps.

        If there are at most `warmup` steps, return the memory of the last step.
        """
        if not self._peaks:
            return None
        first = min(warmup, self.steps - 1)
        device = None
        if self._cuda:
            allocated, reserved = (max(values) for values in zip(*self._on_device[first:], strict=True))
            device = DeviceMemory(self._device_before, allocated, reserved)
        peak = max(self._peaks[first:])
        return ProcessMemory(self._before, peak, self._mark.source, first, self.steps - first, device)
