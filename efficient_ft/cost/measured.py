"""What a training step takes on this machine: seconds and peak memory, always measured in turn with another's."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.functional import cross_entropy

from efficient_ft.core.errors import SettingError
from efficient_ft.cost.executed import AUTOCAST, Executed, Probe, positive, undisturbed
from efficient_ft.cost.meter import storages
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm

if TYPE_CHECKING:
    from efficient_ft.methods.base import Method

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


@dataclass(frozen=True)
class Measured:
    """Measured on this machine; only its ratio to another one of the same call says much.

    Attributes:
        step_seconds: median seconds of a whole step: forward, loss, backward, optimizer.
        peak_bytes: on CUDA, the most that was allocated in forward and backward, model and batch included, optimizer
            state not (torch.cuda.max_memory_allocated, less what others hold). Elsewhere the executed peak, counted in
            the same way: a process's size says little there, since allocators keep freed memory.
        seconds: of every timed step, in order.
    """

    step_seconds: float
    peak_bytes: int
    seconds: tuple[float, ...] = ()

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


@dataclass(frozen=True)
class Cost:
    """Both groups for one recipe; `measured` is None where nothing was timed, and `note` then says why."""

    executed: Executed
    measured: Measured | None
    note: str = ""

    def as_dict(self) -> dict[str, Any]:
        groups: dict[str, Any] = {
            "executed": self.executed.as_dict(),
            "measured": None if self.measured is None else self.measured.as_dict(),
        }
        return {**groups, "note": self.note} if self.note else groups


def time_steps(recipes: Mapping[str, Callable[[], object]], steps: int, warmup: int = 1) -> dict[str, list[float]]:
    """Seconds of each call, alternately: A B A B ..., so that a machine's moods meet all alike.

    Args:
        recipes: by name, a call that does one step. A CUDA or MPS device is waited for.
        steps: timed rounds; none is left out.
        warmup: rounds before that, not timed.
    """
    positive("steps", steps)
    wait = _nothing
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        wait = torch.cuda.synchronize
    elif torch.backends.mps.is_available():
        wait = torch.mps.synchronize
    seconds: dict[str, list[float]] = {name: [] for name in recipes}
    for round_ in range(warmup + steps):
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


class TrainingStep:
    """Plain training steps of a model on one random batch: what is timed, and what a bare loop does.

    The model is trained (changed) by it; give it a copy. Attributes `forward`, `backward`, `update` are the parts of a
    step, to be called in this order; calling the object does all of them.

    Args:
        methods: applied to `model`; told of each step, the first of which is number `first_step`.
        clip: largest norm of the whole gradient.
        build_optimizer: optimizer over the model's trainable parameters; None: AdamW.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[Method] = (),
        *,
        batch_size: int,
        input_size: Sequence[int],
        precision: str = "fp32",
        label_smoothing: float = 0.0,
        in_chans: int = 3,
        frozen_bn: bool = True,
        device: torch.device | str = "cpu",
        first_step: int = 0,
        clip: float | None = None,
        build_optimizer: BuildOptimizer | None = None,
    ) -> None:
        if precision not in AUTOCAST:
            raise SettingError("precision", precision, list(AUTOCAST))
        self.device = torch.device(device)
        self.model = model.to(self.device).train()
        if frozen_bn:
            freeze_batch_norm(self.model)
        self.methods = list(methods)
        self.dtype = AUTOCAST[precision]
        self.label_smoothing = label_smoothing
        generator = torch.Generator().manual_seed(0)
        self.images = torch.randn(batch_size, in_chans, *input_size, generator=generator).to(self.device)
        self.labels = torch.zeros(batch_size, dtype=torch.long, device=self.device)
        self.steps, self.clip = first_step, clip
        self.loss: torch.Tensor | None = None
        self._build_optimizer = build_optimizer
        self._optimizer: torch.optim.Optimizer | None = None

    def forward(self) -> None:
        if self._optimizer is None:  # before a method that selects per step freezes what does not train in the first
            trainable = [p for p in self.model.parameters() if p.requires_grad]
            build = self._build_optimizer
            self._optimizer = torch.optim.AdamW(trainable, lr=1e-5) if build is None else build(self.model)
        for method in self.methods:
            method.step_begin(self.steps)
        with torch.autocast(self.device.type, dtype=self.dtype, enabled=self.dtype is not None):
            logits = self.model(self.images)
            loss = cross_entropy(logits, self.labels, label_smoothing=self.label_smoothing)
            for method in self.methods:
                loss = method.total_loss(loss)
            self.loss = loss

    def backward(self) -> None:
        assert self.loss is not None
        self.loss.backward()
        self.loss = None

    def update(self) -> None:
        assert self._optimizer is not None
        if self.clip is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        self._optimizer.step()
        for method in self.methods:
            method.step_end()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def __call__(self) -> None:
        self.forward()
        self.backward()
        self.update()

    def cuda_peak(self) -> int:
        """Bytes at the peak of one forward and backward on CUDA, as `Measured.peak_bytes` defines them."""
        own = sum(storages([*self.model.parameters(), *self.model.buffers(), self.images, self.labels]).values())
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.forward()
        self.backward()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.model.zero_grad(set_to_none=True)
        return peak - before + own


def compare(
    model: nn.Module,
    methods: Sequence[Method],
    full: Callable[[], nn.Module] | None,
    *,
    batch_size: int,
    input_size: Sequence[int],
    steps: int = 5,
    precision: str = "fp32",
    label_smoothing: float = 0.0,
    in_chans: int = 3,
    frozen_bn: bool = True,
    device: torch.device | str = "cpu",
    clip: float | None = None,
    build_optimizer: BuildOptimizer | None = None,
) -> dict[str, Cost]:
    """The cost of a run's step, beside plain full fine-tuning: ``{"method": Cost, "full": Cost}``.

    Probes are copies on random images; the run's model, methods and random states are left as they are. The full model
    is built only here, as it comes from timm, and all that timm leaves trainable trains. Where the machine has not the
    memory, the counts are given without times, and the note says so.

    Args:
        model, methods: of the run.
        full: makes the plain model (its weights play no part); None: only the method's cost.
        steps: timed steps of each, alternately; 0: only counted.
        clip, build_optimizer: of the run (gradient norm; model → optimizer, None: AdamW).
    """
    shape: dict[str, Any] = {
        "input_size": input_size,
        "precision": precision,
        "label_smoothing": label_smoothing,
        "in_chans": in_chans,
        "frozen_bn": frozen_bn,
    }
    device = torch.device(device)
    cuda = [device] if device.type == "cuda" else []
    with undisturbed(cuda):
        watched: dict[str, Probe] = {"method": Probe(model, methods, **shape)}
        if full is not None:
            watched["full"] = Probe(full(), (), **shape)
        counts, training, notes = {}, {}, {}
        free, held = _free_bytes(device), 0
        for name, probe in watched.items():
            probe.warm_up()
            count = counts[name] = probe.executed(batch_size)
            if not steps:
                continue
            # Weights and two moments stay while both recipes take turns; activations and gradients do not.
            needed = held + 2 * count.model_bytes + count.peak_bytes
            if free is not None and needed > free:
                notes[name] = f"not timed: needs about {needed / 2**30:.1f} GiB of memory, {free / 2**30:.1f} are free"
                continue
            step = TrainingStep(
                *probe.copy(None),
                batch_size=batch_size,
                device=device,
                first_step=probe.steps_before,
                clip=clip,
                build_optimizer=build_optimizer,
                **shape,
            )
            try:
                step()  # a trial, which also makes the optimizer's state
            except torch.OutOfMemoryError as error:
                notes[name] = f"not timed: {str(error).splitlines()[0]}"
                continue
            training[name] = step
            held += 3 * count.model_bytes
        seconds = time_steps(training, steps) if training else {}
        measured = {
            name: Measured(
                statistics.median(seconds[name]),
                step.cuda_peak() if cuda else counts[name].peak_bytes,
                tuple(seconds[name]),
            )
            for name, step in training.items()
        }
        return {name: Cost(count, measured.get(name), notes.get(name, "")) for name, count in counts.items()}


def _free_bytes(device: torch.device) -> int | None:
    """Memory that can still be had on `device`; None where that cannot be told."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0]
    if device.type != "cpu":
        return None
    free = []
    try:
        lines = Path("/proc/meminfo").read_text().splitlines()
        free += [int(line.split()[1]) * 1024 for line in lines if line.startswith("MemAvailable:")]
        limit = Path("/sys/fs/cgroup/memory.max").read_text().strip()
        if limit != "max":
            free.append(int(limit) - int(Path("/sys/fs/cgroup/memory.current").read_text()))
    except (OSError, ValueError):  # not Linux, or no such limit
        pass
    return min(free, default=None)
