"""Time a recipe's training step on this machine, on random weights and images."""

from __future__ import annotations

import statistics
import time

import torch

from efficient_ft.bench.timing import waiter
from efficient_ft.config import Config
from efficient_ft.cost import TrainingStep
from efficient_ft.cost.probe import undisturbed
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.planning.counting import Counter, step_spec
from efficient_ft.training.optimizer import build_optimizer
from efficient_ft.training.trainer import use_channels_last

#: Steps timed, at most.
STEPS = 3


def step_seconds(config: Config, counter: Counter, device: torch.device, images: int, max_seconds: float) -> float:
    """Return the seconds of one optimizer step, micro-batches included.

    Steps of fewer images are scaled to the whole batch: their forward and backward passes, not their update.

    Args:
        config: of the run.
        counter: has the network.
        device: where the step runs.
        images: of the steps timed, at most those of the batch.
        max_seconds: no further step begins after this time.

    Raises:
        UserError: the methods cannot be built, or applied to the network.
    """
    network, methods, spec = counter.network(), build_methods(config), step_spec(config)
    apply_methods(network, methods)
    if use_channels_last(config, device):
        network.to(memory_format=torch.channels_last)
    of_few = type(spec)(**{**vars(spec), "batch_size": min(images, spec.batch_size)})
    with undisturbed([device] if device.type == "cuda" else []):
        step = TrainingStep(
            network,
            methods,
            of_few,
            device=device,
            build_optimizer=lambda model: build_optimizer(model, config.optim, config.trainer.precision),
        )
        wait = waiter(device)
        for _ in range(step.methods.warmup_steps):
            step()
        passes, updates = [], []
        start = time.perf_counter()
        for number in range(STEPS + 1):  # the first is slower: memory is allocated, kernels are compiled
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
    scale = spec.batch_size / of_few.batch_size * config.trainer.grad_accum_steps
    return statistics.median(passes) * scale + statistics.median(updates)
