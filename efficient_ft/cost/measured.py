"""Time and peak memory of a training step on this machine, always measured in turn with another step's."""

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
    """A step as measured on this machine. Only its ratio to another one of the same call means much.

    Attributes:
        step_seconds: median seconds of a whole step: forward, loss, backward, optimizer.
        peak_bytes: on CUDA, the most that was allocated in forward and backward, model and batch included, optimizer
            state not (torch.cuda.max_memory_allocated, minus what others hold). Elsewhere the executed peak, counted
            in the same way: the memory of a process that has taken other steps means little (see `cost.felt`).
        seconds: of every timed step, in order.
    """

    step_seconds: float
    peak_bytes: int
    seconds: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        """The attributes, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Cost:
    """The executed and the measured cost of one recipe; if `measured` is None, `note` says why."""

    executed: Executed
    measured: Measured | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        """Both groups by name, and the note if there is one, for JSON."""
        groups: dict[str, Any] = {
            "executed": self.executed.as_dict(),
            "measured": None if self.measured is None else self.measured.as_dict(),
        }
        return {**groups, "note": self.note} if self.note else groups


def time_steps(
    recipes: Mapping[str, Callable[[], object]], steps: int, warmup: int = 1, max_seconds: float | None = None
) -> dict[str, list[float]]:
    """Time calls alternately (A B A B ...), so that machine drift affects all recipes equally.

    Args:
        recipes: by name, a call that takes one step. A CUDA or MPS device is synchronized.
        steps: timed rounds; none is left out.
        warmup: rounds before these, not timed.
        max_seconds: no further round begins after this time, but one is always timed; None: all are.

    Returns:
        Seconds of each call, by name.

    Raises:
        SettingError: `steps` is below 1.
    """
    require_positive("steps", steps)
    wait = _nothing
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


def _nothing() -> None:
    pass


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
    """Count and time a run's step, and that of a baseline in turn with it: by default plain full fine-tuning.

    Probes are copies on random images; the run's model, methods and random states are not changed. The baseline's model
    is built only here, as it comes from timm; without methods all that timm leaves trainable trains. If the machine has
    too little memory or time, the counts are given without times, and a note says so.

    Args:
        model: of the run.
        methods: of the run, see `StepMethods`.
        baseline: makes the plain model (its weights play no part); None: only the method's cost.
        baseline_methods: of the baseline, usually a selection.
        batch_size: images in the batch.
        input_size: (H, W) of the images in pixels.
        steps: timed steps of each, alternately; 0: count only.
        max_seconds: no further round of steps is timed after this time; None: all are.
        device: where steps are timed.
        build_optimizer: the run's optimizer over a model's trainable parameters; None: AdamW.
        baseline_optimizer: the baseline's; None: the run's.
        room: returns the bytes by which the process may grow, for steps on a CPU; None: what the machine has.
        options: ``precision``, ``label_smoothing``, ``in_chans``, ``frozen_bn``, ``grad_clip_norm``, with meaning
            and defaults of `StepSpec`.

    Returns:
        ``{"method": Cost, "baseline": Cost}``, or the first alone.

    Raises:
        SettingError: a setting that is out of range.
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
            # Weights and two moments stay while both recipes take turns; activations and gradients do not.
            needed = held + 2 * counted.model_bytes + counted.peak_bytes
            if room is not None and device.type == "cpu":
                step_bytes = counted.step_peak_bytes + (counted.optimizer_bytes or 0)
                growth = bounded_growth(step_bytes, counted.largest_bytes, allocator_in_use())
                needed, free = counted.model_bytes + counted.batch_bytes + growth, room()
            if free is not None and needed > free:
                notes[name] = f"not timed: needs about {format_bytes(needed)} of memory, {format_bytes(free)} are free"
                continue
            if max_seconds is not None and training and time.perf_counter() - started > max_seconds:
                notes[name] = f"not timed: timing it would exceed {format_seconds(max_seconds)} in all"
                continue
            first_step = probe.steps_before
            step = TrainingStep(
                *probe.copy(None), spec, device=device, first_step=first_step, build_optimizer=probe.build_optimizer
            )
            try:
                step()  # a trial, which also makes the optimizer's state
            except torch.OutOfMemoryError as error:
                notes[name] = f"not timed: {str(error).splitlines()[0]}"
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


def _free_bytes(device: torch.device) -> int | None:
    """Memory that can still be allocated on `device`; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    used = psutil.Process().memory_info().rss
    return min(psutil.virtual_memory().available, memory_limit_bytes() - used)
