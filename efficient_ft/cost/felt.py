"""Memory that training steps take of the process: felt, next to what is counted.

Felt is the highest resident memory during a step, above the size before the *first* step: an allocator that keeps freed
memory holds it already when a later step begins. Model and batch are there before, so felt are activations, gradients,
temporaries, the optimizer's state, and what the allocator cannot reuse. The count of the same things is
``Executed.step_peak_bytes`` (without model and batch) plus the optimizer's state, which lives throughout a steady step.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from efficient_ft.core.process_memory import HighWaterMark, resident_bytes


@dataclass(frozen=True)
class DeviceMemory:
    """Memory of a CUDA device, in PyTorch's allocator.

    Attributes:
        before_bytes: allocated before the first step: model and batch.
        allocated_bytes: the most that was allocated to tensors during a step.
        reserved_bytes: the most that the allocator held of the device during a step.
    """

    before_bytes: int
    allocated_bytes: int
    reserved_bytes: int


@dataclass(frozen=True)
class Felt:
    """Memory of the process over several training steps.

    Attributes:
        before_bytes: resident before the first step.
        peak_bytes: the highest resident size during the steps measured.
        source: how the peak was measured, see `core.process_memory.HighWaterMark`.
        first_step: the first of the steps measured, counted from 0; those before warm up.
        steps: how many were measured.
        device: on CUDA, the memory of the device; else None.
    """

    before_bytes: int
    peak_bytes: int
    source: str
    first_step: int
    steps: int
    device: DeviceMemory | None = None

    @property
    def growth_bytes(self) -> int:
        """The growth over a step: of the process; on CUDA, of what is reserved on the device."""
        if self.device is not None:
            return self.device.reserved_bytes - self.device.before_bytes
        return self.peak_bytes - self.before_bytes


class StepMemory:
    """Measure the memory of training steps; make it before the first step, then ``with memory: step()``.

    Args:
        device: of the steps; on CUDA its peak statistics are reset in each step.
        present_bytes: bytes that are resident now and belong to the steps (an optimizer's state that was loaded).
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
        """Steps taken so far."""
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

    def felt(self, warmup: int) -> Felt | None:
        """The memory of the steps after the first `warmup`; of the last step if there were no more; None: no step."""
        if not self._peaks:
            return None
        first = min(warmup, self.steps - 1)
        device = None
        if self._cuda:
            allocated, reserved = (max(values) for values in zip(*self._on_device[first:], strict=True))
            device = DeviceMemory(self._device_before, allocated, reserved)
        peak = max(self._peaks[first:])
        return Felt(self._before, peak, self._mark.source, first, self.steps - first, device)
