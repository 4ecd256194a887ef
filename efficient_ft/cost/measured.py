"""Measure the time and peak memory of training steps on this machine, alternating with steps of a baseline."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Unpack

import psutil
import torch
from torch import nn

from efficient_ft.core.allocator import allocator_in_use
from efficient_ft.core.format import format_bytes, format_seconds
from efficient_ft.core.process_memory import memory_limit_bytes
from efficient_ft.cost.executed import Executed, count
from efficient_ft.cost.predict import bounded_growth
from efficient_ft.cost.probe import Probe, undisturbed
from efficient_ft.cost.step import BuildOptimizer, StepOptions, StepSpec, TrainingStep, require_positive


@dataclass(frozen=True)
class Measured:
    """Measured cost of a step on this machine. Compare the cost only with other results of the same call.

    Attributes:
        step_seconds: median time of a step (forward, loss, backward, optimizer) in seconds.
        peak_bytes: on CUDA, the maximum number of bytes allocated in the forward and backward passes
            (torch.cuda.max_memory_allocated). The number includes the model and the batch, but not the optimizer's
            state or other tensors. On other devices, `peak_bytes` is the executed peak, which counts the same tensors.
        seconds: times of all timed steps in seconds, in the order of the steps.
    """

    step_seconds: float
    peak_bytes: int
    seconds: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """Return the attributes as a JSON-serializable dict."""
        return asdict(self)


@dataclass(frozen=True)
class Cost:
    """Executed and measured cost of one recipe. If `measured` is None, `note` states the reason."""

    executed: Executed
    measured: Measured | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Return both costs, and the note if it is not empty, as a JSON-serializable dict."""
        measured = None if self.measured is None else self.measured.as_dict()
        note = {"note": self.note} if self.note else {}
        return {"executed": self.executed.as_dict(), "measured": measured, **note}


def time_steps(
    recipes: Mapping[str, Callable[[], object]], steps: int, warmup: int = 1, max_seconds: float | None = None
) -> dict[str, list[float]]:
    """Time the steps of several recipes alternately (A B A B ...), so that machine drift affects all recipes equally.

    Args:
        recipes: a dict from the name of each recipe to a function that runs one step. A CUDA or MPS device is
            synchronized before and after each call.
        steps: number of timed rounds.
        warmup: number of rounds before the timed rounds.
        max_seconds: time limit in seconds, after which no further round begins. At least one round is timed. If None,
            there is no limit.

    Returns:
        A dict from the name of each recipe to the times of its timed steps in seconds.

    Raises:
        SettingError: If `steps` is less than 1.
    """
    require_positive("steps", steps)
    wait: Callable[[], object] = lambda: None  # noqa: E731
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        wait = torch.cuda.synchronize
    elif torch.backends.mps.is_available():
        wait = torch.mps.synchronize
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    began = time.perf_counter()
    for round_ in range(warmup + steps):
        if max_seconds is not None and round_ > warmup and time.perf_counter() - began > max_seconds:
            break
        for name, step in recipes.items():
            wait()
            start = time.perf_counter()
            step()
            wait()
            if round_ >= warmup:
                seconds[name].append(time.perf_counter() - start)
    return seconds


def compare(
    model: nn.Module,
    methods: Iterable[Any],
    baseline: Callable[[], nn.Module] | None,
    *,
    baseline_methods: Iterable[Any] = (),
    batch_size: int,
    input_size: Sequence[int],
    steps: int = 5,
    max_seconds: float | None = None,
    device: torch.device | str = "cpu",
    build_optimizer: BuildOptimizer | None = None,
    baseline_optimizer: BuildOptimizer | None = None,
    room: Callable[[], int] | None = None,
    **options: Unpack[StepOptions],
) -> dict[str, Cost]:
    """Count a training step of a run and of a baseline (usually full fine-tuning), and time both steps alternately.

    The steps run on copies of the models, with random images. The run's model, methods and random states are not
    changed. If there is not enough memory or time, the result contains counts and a note, but no times.

    Args:
        model: model of the run.
        methods: methods of the run (see `StepMethods`).
        baseline: function that builds the model of the baseline. The weights of this model do not matter. If None,
            there is no baseline.
        baseline_methods: methods of the baseline, usually a method that selects parameters. Without such a method, the
            parameters that require gradients are trained.
        batch_size: number of images in the batch.
        input_size: (H, W) of the images in pixels.
        steps: number of timed steps of each recipe. If 0, steps are counted but not timed.
        max_seconds: time limit in seconds, after which no further round of steps begins. If None, there is no limit.
        device: device of the timed steps.
        build_optimizer: function that builds the run's optimizer for a model. If None, AdamW is used.
        baseline_optimizer: function that builds the baseline's optimizer. If None, `build_optimizer` is used.
        room: function that returns the number of bytes by which the process may grow on a CPU. If None, the free memory
            of the machine is used.
        options: ``precision``, ``label_smoothing``, ``in_chans``, ``frozen_bn``, ``grad_clip_norm`` (see `StepSpec`).

    Returns:
        ``{"method": Cost, "baseline": Cost}``, or ``{"method": Cost}`` if `baseline` is None.

    Raises:
        SettingError: If a setting is out of range.
    """
    spec = StepSpec(batch_size, input_size, **options)
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    with undisturbed(cuda):
        probes: dict[str, Probe] = {"method": Probe(model, methods, spec, build_optimizer)}
        if baseline is not None:
            of_baseline = baseline_optimizer or build_optimizer
            probes["baseline"] = Probe(baseline(), baseline_methods, spec, of_baseline)
        counts, notes = {}, {}
        training: dict[str, TrainingStep] = {}
        free, held, started = _free_bytes(device), 0, time.perf_counter()
        for name, probe in probes.items():
            probe.warm_up()
            counted = counts[name] = count(probe)
            if not steps:
                continue
            late = max_seconds is not None and time.perf_counter() - started > max_seconds
            note = _lack_of_memory(counted, held, free, room if device.type == "cpu" else None)
            if note is None and late and training:
                note = f"the time limit of {format_seconds(max_seconds or 0)} was reached"
            step = _started(probe, device) if note is None else note
            if isinstance(step, str):
                notes[name] = f"not timed: {step}"
                continue
            training[name] = step
            held += 3 * counted.model_bytes
        left = None if max_seconds is None else max_seconds - (time.perf_counter() - started)
        seconds = time_steps(training, steps, warmup=0, max_seconds=left) if training else {}
        measured = {
            name: Measured(
                statistics.median(seconds[name]),
                step.cuda_peak() if cuda else counts[name].peak_bytes,
                tuple(seconds[name]),
            )
            for name, step in training.items()
        }
        return {name: Cost(counted, measured.get(name), notes.get(name, "")) for name, counted in counts.items()}


def _lack_of_memory(counted: Executed, held: int, free: int | None, room: Callable[[], int] | None) -> str | None:
    """Return the reason why a step does not fit in memory, or None if the step fits.

    `held` is the number of bytes that the other recipes occupy, and `free` is the number of bytes that were free before
    the first recipe.
    """
    # The weights and moments of a recipe stay allocated while other recipes run. Activations and gradients are freed.
    needed = held + 2 * counted.model_bytes + counted.peak_bytes
    if room is not None:
        step_bytes = counted.step_peak_bytes + (counted.optimizer_bytes or 0)
        growth = bounded_growth(step_bytes, counted.largest_bytes, allocator_in_use())
        needed, free = counted.model_bytes + counted.batch_bytes + growth, room()
    if free is None or needed <= free:
        return None
    return f"the step needs about {format_bytes(needed)} of memory, but only {format_bytes(free)} is free"


def _started(probe: Probe, device: torch.device) -> TrainingStep | str:
    """Build a training step, run the step once and return it. If memory runs out, return the error message instead."""
    step = TrainingStep(
        *probe.copy(None),
        probe.spec,
        device=device,
        first_step=probe.steps_before,
        build_optimizer=probe.build_optimizer,
    )
    try:
        step()
    except torch.OutOfMemoryError as error:
        return str(error).splitlines()[0]
    return step


def _free_bytes(device: torch.device) -> int | None:
    """Return the number of bytes that can still be allocated on `device`, or None if the number is unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    used = psutil.Process().memory_info().rss
    return min(psutil.virtual_memory().available, memory_limit_bytes() - used)
