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

from efficient_ft.core.allocator import KEEPING
from efficient_ft.core.process_memory import HighWaterMark, resident_bytes

#: By allocator: fixed bytes, scratch and factor of `predicted_growth`. The fixed part is code that the steps load and
#: the threads' own memory, scratch what kernels and the allocator take for a few large tensors at a time, and the
#: factor what an allocator cannot reuse. Found with `bench memory` on an EPYC, two threads, full fine-tuning and 4-bit
#: activations of DeiT-S, ViT-Ti, ViT-B, SwinV2-T, ConvNeXt-T, ResNet-50, MobileNetV2, MobileViT-S,
#: EfficientFormer-L1: with tcmalloc predictions are between 5 % below and 15 % above the growth measured, with mimalloc
#: (five of these networks) between 8 % below and 18 % above. Other networks and recipes: `benchmarks/plans_cpu.json`.
#: glibc with settings that keep freed memory splits its heap: up to four times the counted bytes.
_GROWTH = {
    "tcmalloc": (40 * 2**20, 2.0, 1.0),
    "mimalloc": (50 * 2**20, 3.0, 1.06),
    "system": (64 * 2**20, 4.0, 1.03),
    KEEPING: (64 * 2**20, 4.0, 3.0),
}


def predicted_growth(counted_bytes: int, largest_bytes: int, allocator: str) -> int:
    """Predict the growth of the process over a training step, in bytes (`Felt.growth_bytes` on a CPU).

    It is fixed + scratch · largest tensor + factor · counted bytes, with numbers of the allocator.

    Args:
        counted_bytes: ``Executed.step_peak_bytes`` and the optimizer's state.
        largest_bytes: ``Executed.largest_bytes``.
        allocator: of the process, see `core.allocator.allocator_in_use`.
    """
    fixed, scratch, factor = _GROWTH[allocator]
    return round(fixed + scratch * largest_bytes + factor * counted_bytes)


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
