"""Count the steps, images and FLOPs of the training, and measure its time and energy."""

from __future__ import annotations

import statistics
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import lightning.pytorch as L
import torch

from efficient_ft.core.distributed import all_reduce_sum
from efficient_ft.cost.run_flops import RunFlops
from efficient_ft.methods.base import Method
from efficient_ft.record.energy import EnergyMeter
from efficient_ft.record.results import RunTotals
from efficient_ft.task import tensors_of

#: Maximum number of recent optimizer steps whose median time is reported as the step time.
LAST_STEPS = 1000


def same_each_step(methods: Sequence[Method]) -> bool:
    """Return True if all steps have the same cost.

    The costs differ if a method makes a choice in each step or profiles the network in its first steps.
    """
    return not any(
        method.warmup_steps or method.cost_steps > 1 or type(method).step_begin is not Method.step_begin
        for method in methods
    )


class Totals(L.Callback):
    """A callback that accumulates the cost of training.

    FLOPs are counted for forward and backward passes, as in `cost.executed` (`RunFlops`). The time and the energy
    include evaluation, but the FLOPs do not. With several processes, the FLOPs of the first process are multiplied by
    the number of processes. Place this callback after `MethodCallback` and before callbacks that read `values`.

    Args:
        methods: the methods of the run.
        batches: number of training batches of one process in the whole run.
    """

    def __init__(self, methods: Sequence[Method], batches: int) -> None:
        self._flops = RunFlops(batches, same_each_step(methods))
        self._energy = EnergyMeter()
        self._images = self._batches = self._steps = 0
        #: Number of images of this process since the last call of `gather`.
        self._own_images = 0
        self._world = 1
        self._started: float | None = None
        #: Time in seconds and energy in joules that were spent before the run was resumed.
        self._seconds_before = 0.0
        self._joules_before: float | None = 0.0
        self._step_seconds: deque[float] = deque(maxlen=LAST_STEPS)
        #: Time in seconds spent on micro-batches of the current step, and start time of the current micro-batch.
        self._step, self._batch_started = 0.0, 0.0
        self._waits = True

    @property
    def counts_every(self) -> int | None:
        """Return n if the FLOPs of every n-th batch are counted, or None if one batch of each kind is counted."""
        return self._flops.interval

    def values(self) -> RunTotals:
        """Return the totals since the start of the run."""
        elapsed = 0.0 if self._started is None else time.monotonic() - self._started
        joules = self._energy.joules
        if joules is not None and self._joules_before is not None:
            joules = round(joules + self._joules_before, 1)
        return {
            "steps": self._steps,
            "images": self._images + self._own_images * self._world,
            "flops": float(self._flops.total * self._world),
            "batches": self._batches,
            "counted_batches": self._flops.counted,
            "seconds": round(self._seconds_before + elapsed, 3),
            "step_seconds": statistics.median(self._step_seconds) if self._step_seconds else None,
            "joules": None if self._joules_before is None else joules,
            "energy_source": self._energy.source,
        }

    def gather(self) -> None:
        """Add the numbers of images of the other processes.

        Before this call, `values` only estimates these numbers. All processes must call this function.
        """
        self._images += int(all_reduce_sum(torch.tensor(self._own_images)))
        self._own_images = 0

    def on_train_start(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        device = trainer.strategy.root_device
        self._world, self._started = trainer.world_size, time.monotonic()
        self._waits = device.type == "cpu"
        self._energy = EnergyMeter(device.index or 0 if device.type == "cuda" else None)
        self._energy.start()

    def on_train_batch_start(
        self, trainer: L.Trainer, pl_module: L.LightningModule, batch: Any, batch_idx: int
    ) -> None:
        inputs, targets, *task = batch
        self._own_images += len(targets)
        shape = tensors_of(inputs)[0].shape
        self._flops.begin(self._batches, " ".join([*map(str, shape), *map(str, task)]))
        self._batch_started = time.perf_counter()

    def on_after_backward(self, trainer: L.Trainer, pl_module: L.LightningModule) -> None:
        self._flops.end()
        self._batches += 1

    def on_train_batch_end(
        self, trainer: L.Trainer, pl_module: L.LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._step += time.perf_counter() - self._batch_started
        if trainer.global_step > self._steps:  # this micro-batch was the last one of the step
            if self._waits:
                self._step_seconds.append(self._step)
            self._steps, self._step = trainer.global_step, 0.0

    def on_exception(self, trainer: L.Trainer, pl_module: L.LightningModule, exception: BaseException) -> None:
        self._flops.close()

    def state_dict(self) -> dict[str, Any]:
        return {**self.values(), "run_flops": self._flops.state_dict()}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._images, self._batches, self._steps = (state_dict[key] for key in ("images", "batches", "steps"))
        self._seconds_before = state_dict["seconds"]
        self._flops.load_state_dict(state_dict["run_flops"])
        # If the energy used before resuming is unknown (None), no energy is reported, because the total would be wrong.
        self._joules_before = state_dict["joules"]
