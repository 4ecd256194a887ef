"""Measure the memory of the training process during optimizer steps of a run.

Training steps are measured instead of steps of the cost report. The cost report follows training, and memory that the
allocator keeps after training would hide the growth. The measured steps precede the first evaluation. Otherwise, memory
that the allocator keeps after evaluation would be attributed to a step.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any, cast

import lightning.pytorch as L
from torch import nn

from efficient_ft.cost import StepMemory, optimizer_state_bytes
from efficient_ft.methods.base import Method
from efficient_ft.record.results import MemoryReport
from efficient_ft.training.trainer import ends_step

#: Number of steps before the measurement. These steps load kernels and create optimizer states. Methods may require
#: additional steps (`warmup_steps`).
WARMUP = 2
#: Number of measured optimizer steps.
STEPS = 3


class MemoryMeter(L.Callback):
    """Callback that measures the memory of some early optimizer steps, each from its first to its last micro-batch.

    If the first evaluation starts before all steps are measured, the last steps before the evaluation are measured.
    Place this callback before callbacks that write checkpoints. A resumed run keeps its previous measurement.

    Args:
        methods: the methods of the run.
        before_model_bytes: resident memory before the model was built, in bytes.
    """

    def __init__(self, methods: Sequence[Method], before_model_bytes: int) -> None:
        self._methods, self._before_model = methods, before_model_bytes
        self._memory: StepMemory | None = None
        self._warmup, self._running = WARMUP, False
        self._measured: dict[str, Any] = {}

    def report(self, step_peak_bytes: int, accumulated_bytes: int) -> MemoryReport | None:
        """Return the record for results.json, or None if no step was measured.

        Args:
            step_peak_bytes: counted peak memory of a step in bytes, excluding the model and the batch
                (`cost.Executed.step_peak_bytes`).
            accumulated_bytes: size of the gradients that are kept between micro-batches. See `accumulated_gradients`.
        """
        if not self._measured:
            return None
        counted = int(step_peak_bytes) + self._measured["optimizer_bytes"] + accumulated_bytes
        return cast(MemoryReport, {**self._measured, "counted_bytes": counted})

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._measured:
            return
        loaded = sum(map(optimizer_state_bytes, trainer.optimizers))  # nonzero only in a resumed run
        self._memory = StepMemory(trainer.strategy.root_device, loaded)
        self._warmup = WARMUP + max((method.warmup_steps for method in self._methods), default=0)

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        if self._memory is not None and not self._running:
            self._memory.start()
            self._running = True

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._memory is not None and ends_step(trainer, batch_idx):
            self._memory.stop()
            self._running = False
            if self._memory.steps >= self._warmup + STEPS:
                self._finish(trainer)

    def on_validation_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        if self._memory is not None:
            self._finish(trainer)

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        if self._memory is not None and self._running:
            self._memory.stop()
        self._memory, self._running = None, False

    def _finish(self, trainer: L.Trainer) -> None:
        assert self._memory is not None
        process, self._memory = self._memory.measured(self._warmup), None
        if process is None:
            return
        self._measured = {
            "before_model_bytes": self._before_model,
            "before_steps_bytes": process.before_bytes,
            "peak_bytes": process.peak_bytes,
            "step_peak_bytes": process.peak_bytes,
            "growth_bytes": process.growth_bytes,
            "optimizer_bytes": sum(map(optimizer_state_bytes, trainer.optimizers)),
            "source": process.source,
            "first_step": process.first_step,
            "steps": process.steps,
            "device": None if process.device is None else asdict(process.device),
        }

    def state_dict(self) -> dict[str, Any]:
        return dict(self._measured)

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        self._measured = dict(state_dict)


def accumulated_gradients(network: nn.Module, grad_accum_steps: int) -> int:
    """Return the size of the gradients kept between micro-batches in bytes, or 0 without gradient accumulation."""
    if grad_accum_steps == 1:
        return 0
    return sum(p.numel() * p.element_size() for p in network.parameters() if p.requires_grad)
