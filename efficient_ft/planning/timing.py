"""Measure the time and memory of a recipe's training step on this machine, with random weights and images."""

from __future__ import annotations

import statistics
import time
from dataclasses import dataclass

import torch
from torch import nn

from efficient_ft.bench.memory import settled_bytes
from efficient_ft.bench.step import build_step
from efficient_ft.bench.timing import waiter
from efficient_ft.config import Config
from efficient_ft.cost import StepMemory, TrainingStep
from efficient_ft.cost.probe import undisturbed
from efficient_ft.cost.step import forward_and_loss
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.planning.counting import Counter
from efficient_ft.training.callbacks.ema import ema_bytes
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.memory.libraries import libraries, load
from efficient_ft.training.trainer import on_device, use_channels_last

#: Maximum number of timed steps in a plan and in a trial.
STEPS, TRIAL_STEPS = 8, 60
#: A trial ends early after this time in seconds and this number of steps. Several steps are needed, because the process
#: grows during the first steps.
_ENOUGH, _FEW = 3.0, 6


def step_seconds(config: Config, counter: Counter, device: torch.device, images: int, max_seconds: float) -> float:
    """Return the time of one optimizer step in seconds, including all micro-batches.

    If a timed step has fewer images than the batch, the time of its forward and backward passes is scaled up. `counter`
    provides the network. No further step begins after `max_seconds`.

    Raises:
        UserError: If the methods cannot be built or applied to the network.
    """
    with undisturbed([device] if device.type == "cuda" else []):
        step = _training_step(config, counter.network(), device, images)
        wait = waiter(device)
        for _ in range(step.methods.warmup_steps):
            step()
        passes, updates = [], []
        start = time.perf_counter()
        for number in range(STEPS + 1):  # the first step is slower, because it allocates memory and compiles kernels
            if number > 1 and time.perf_counter() - start > max_seconds:
                break
            wait()
            times = [time.perf_counter()]
            step.forward()
            step.backward()
            wait()
            times.append(time.perf_counter())
            step.update()
            wait()
            times.append(time.perf_counter())
            if number:
                passes.append(times[1] - times[0])
                updates.append(times[2] - times[1])
    scale = config.data.batch_size / step.spec.batch_size * config.trainer.grad_accum_steps
    return statistics.median(passes) * scale + statistics.median(updates)


@dataclass(frozen=True)
class Trial:
    """Memory and time of a recipe's optimizer steps, measured in a separate process.

    Attributes:
        peak_bytes: peak memory of the process minus its memory before the model is created or, on a GPU, peak memory
            reserved on the device.
        step_seconds: median time of the measured steps in seconds.
    """

    peak_bytes: int
    step_seconds: float


def try_recipe(config: Config, num_classes: int, max_seconds: float) -> Trial:
    """Run optimizer steps with full batches, and measure their time and the memory of this process.

    The process must not have run other steps, because memory that the allocator keeps would hide the growth. After one
    measured step, no further step begins after `max_seconds`.

    Raises:
        UserError: If the methods cannot be built or applied to the network.
    """
    device = on_device(config)
    interpreter = settled_bytes()
    network = store_weights(kind_of(config).random_network(config.model, num_classes), config.trainer.weight_dtype)
    step = _training_step(config, network, device, images=config.data.batch_size)
    for library in libraries(config.optim.state_bits, step.methods):
        load(library)
    memory, wait = StepMemory(device), waiter(device)
    seconds: list[float] = []
    warmup = step.methods.warmup_steps + 1
    start = time.perf_counter()
    for number in range(warmup + TRIAL_STEPS):
        elapsed = time.perf_counter() - start
        if (number > warmup and elapsed > max_seconds) or (number >= warmup + _FEW and elapsed > _ENOUGH):
            break
        with memory:
            begin = time.perf_counter()
            step.forward()
            step.backward()
            for _ in range(1, config.trainer.grad_accum_steps):
                forward_and_loss(step.model, step.methods, step.inputs, step.labels, step.spec)[1].backward()
            step.update()
            wait()
            seconds.append(time.perf_counter() - begin)
    process = memory.measured(warmup)
    assert process is not None
    peak = process.peak_bytes - interpreter if process.device is None else process.device.reserved_bytes
    peak += ema_bytes(step.model, config.trainer.ema)  # the trial does not average weights
    return Trial(peak, statistics.median(seconds[warmup:]))


def _training_step(config: Config, network: nn.Module, device: torch.device, images: int) -> TrainingStep:
    """Return a run's training step with at most `images` images, and apply the run's methods to `network`."""
    batch_size = min(images, config.data.batch_size)
    return build_step(config, network, device, batch_size, use_channels_last(config, device))
