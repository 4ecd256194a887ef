"""The memory budget of a run (the setting ``memory``): refused before the first step, or stopped before it is passed.

On a CPU the budget is the resident memory of the training process, interpreter and libraries included; workers that
load images have memory of their own. On CUDA it is what PyTorch's allocator reserves on the device, which the
allocator itself enforces.
"""

from __future__ import annotations

import _thread
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import psutil
import torch
from torch import nn

from efficient_ft.config import Config
from efficient_ft.core.allocator import allocator_in_use
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_bytes
from efficient_ft.core.process_memory import memory_limit_bytes, release_freed_memory
from efficient_ft.core.units import parse_bytes
from efficient_ft.cost import executed, predicted_growth
from efficient_ft.methods.base import Method
from efficient_ft.models import factory
from efficient_ft.training.console import say
from efficient_ft.training.libraries import LibrarySizes, libraries
from efficient_ft.training.memory import accumulated_gradients
from efficient_ft.training.optimizer import build_optimizer
from efficient_ft.training.processes import world_size

#: Seconds between two looks at the size of the process.
INTERVAL = 0.02
#: From this share of the budget on freed memory is given back, and after these seconds again.
_NEAR, _RELEASE_INTERVAL = 0.97, 1.0
#: What wakes the main thread; nothing else in a run uses it.
_SIGNAL: signal.Signals = getattr(signal, "SIGUSR2", None) or getattr(signal, "SIGBREAK")  # noqa: B009 (Windows)


def budget_of(config: Config) -> int | None:
    """The budget in bytes; None: the run has none."""
    return None if config.memory is None else parse_bytes("memory", config.memory)


def refuse_over_budget(
    config: Config, network: nn.Module, methods: Sequence[Method], before_model: int, device: torch.device
) -> int | None:
    """Refuse a run whose predicted peak is above its budget, before its first step.

    Args:
        config: of the run.
        network: its model, on the CPU or not yet moved; methods are applied to a copy.
        methods: of the run.
        before_model: resident memory before the model was built, in bytes. On a CPU the libraries of the methods are
            loaded, and added to it.
        device: where it trains.

    Returns:
        The predicted peak in bytes; None: the run has no budget.

    Raises:
        UserError: the prediction is above the budget; names what would fit.
    """
    budget = budget_of(config)
    if budget is None:
        return None
    if device.type == "cpu":
        before_model += LibrarySizes()(libraries(config.optim.state_bits, methods))
    predicted = _predicted(config, network, methods, before_model, device, 1)
    limit = memory_limit_bytes()
    if device.type == "cpu" and budget > limit:
        say(
            f"memory={config.memory} ({format_bytes(budget)}) is more than this machine or its container has:"
            f" {format_bytes(limit)}, which counts."
        )
        budget = limit
    if predicted > budget:
        for_libraries = f", {format_bytes(before_model)} of them for the interpreter and its libraries"
        raise UserError(
            f"memory={config.memory} ({format_bytes(budget)}): the run would take about {format_bytes(predicted)}"
            f"{'' if device.type == 'cuda' else for_libraries}."
            f" {_what_fits(config, network, methods, before_model, device, budget)}"
        )
    return predicted


def predicted_peak(
    config: Config, network: nn.Module, methods: Sequence[Method], before_model: int, device: torch.device
) -> int:
    """Predict the peak of a run: of its process, or on CUDA of what is reserved on the device, in bytes.

    Args: as of `refuse_over_budget`; `network` may be on the meta device.
    """
    return _predicted(config, network, methods, before_model, device, 1)


def _predicted(
    config: Config, network: nn.Module, methods: Sequence[Method], before_model: int, device: torch.device, parts: int
) -> int:
    """The predicted peak of the process, or of what is reserved on the device, with the batch in `parts`."""
    spec = factory.input_of(config.model)
    counted = executed(
        network,
        config.data.batch_size // parts,
        spec.size,
        methods=methods,
        build_optimizer=lambda model: build_optimizer(model, config.optim, config.trainer.precision),
        precision=config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        in_chans=len(spec.mean),
        frozen_bn=config.model.frozen_bn,
    )
    accumulate = config.trainer.grad_accum_steps * parts
    step = counted.step_peak_bytes + (counted.optimizer_bytes or 0) + accumulated_gradients(network, accumulate)
    resident = counted.model_bytes + counted.batch_bytes
    if device.type == "cuda":
        return round(1.1 * (resident + step))
    return before_model + resident + predicted_growth(step, counted.largest_bytes, allocator_in_use())


def _what_fits(
    config: Config,
    network: nn.Module,
    methods: Sequence[Method],
    before_model: int,
    device: torch.device,
    budget: int,
) -> str:
    """Sentences on what would fit the budget: the largest part of the batch, and the command that finds more."""
    weights = sum(p.numel() * p.element_size() for p in network.parameters())
    if weights + (0 if device.type == "cuda" else before_model) > budget:
        return "No recipe of this model fits. Pass a larger memory=, or choose a smaller model."
    batch, accumulate = config.data.batch_size, config.trainer.grad_accum_steps
    parts, fits = 2, None
    while parts <= batch and not config.optim.in_backward and not config.tasks and world_size(config) == 1:
        if batch % parts == 0 and _predicted(config, network, methods, before_model, device, parts) <= budget:
            fits = f"data.batch_size={batch // parts} trainer.grad_accum_steps={accumulate * parts}"
            break
        parts *= 2
    plan = f"efficient-ft plan with the same model, data and memory={config.memory} finds recipes that fit."
    return plan if fits is None else f"{fits} would fit; or {plan}"


@contextmanager
def within_budget(config: Config, device: torch.device) -> Iterator[None]:
    """Stop what runs inside with a UserError as soon as it passes the run's budget.

    A thread looks at the size of the process, and wakes the main thread, which stops between two operations. What the
    run has written stays; the same command with a larger budget continues from its last checkpoint.

    Raises:
        UserError: the budget was passed.
    """
    budget = budget_of(config)
    if budget is None or threading.current_thread() is not threading.main_thread():
        yield
        return
    if device.type == "cuda":
        total = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, budget / total), device)
        try:
            yield
        except torch.OutOfMemoryError:
            raise _passed(config, torch.cuda.max_memory_reserved(device), "reserved on the GPU") from None
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0, device)
        return
    watch = _Watch(budget)

    def stop(number: int, frame: Any) -> None:
        if watch.seen:
            raise _passed(config, watch.seen, "taken by the process")

    before = signal.signal(_SIGNAL, stop)
    watch.start()
    try:
        yield
    finally:
        watch.end()
        signal.signal(_SIGNAL, before)


def _passed(config: Config, size: int, how: str) -> UserError:
    return UserError(
        f"memory={config.memory} ({format_bytes(budget_of(config) or 0)}): stopped, since {format_bytes(size)} were"
        f" {how}. Pass a larger memory=, or a recipe that takes less: efficient-ft plan with the same model, data and"
        f" memory={config.memory} finds some. The same command with a larger memory= continues from the last"
        " checkpoint."
    )


class _Watch(threading.Thread):
    """Look at the resident memory of the process until it is above `budget`, then wake the main thread once.

    Near the budget, freed memory that the allocator holds is given back: from step to step it splits up, so that a
    process grows slowly although what is live does not.
    """

    def __init__(self, budget: int) -> None:
        super().__init__(name="memory budget", daemon=True)
        self._budget, self._ended = budget, threading.Event()
        #: The size above the budget; 0: it was not passed.
        self.seen = 0

    def run(self) -> None:
        """Look until the end."""
        process, released = psutil.Process(), 0.0
        while not self._ended.wait(INTERVAL):
            size = process.memory_info().rss
            near = size > _NEAR * self._budget and time.monotonic() - released > _RELEASE_INTERVAL
            if near or size > self._budget:
                release_freed_memory()
                released, size = time.monotonic(), process.memory_info().rss
            if size > self._budget:
                self.seen = size
                _thread.interrupt_main(_SIGNAL)
                return

    def end(self) -> None:
        """Stop looking."""
        self._ended.set()
        self.join()
