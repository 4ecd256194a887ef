"""Benchmark of the framework: its time per step on top of a bare PyTorch loop."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from efficient_ft.bench.recipes import Configure
from efficient_ft.bench.timing import quartiles, waiter
from efficient_ft.config import Config
from efficient_ft.cost import StepSpec, TrainingStep
from efficient_ft.data import ImageData
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.training.module import build_optimizer
from efficient_ft.training.run import run

#: The job of conf/train.yaml as it is.
DEFAULT_JOB = "default"

#: Classes of the digits, on which all jobs train.
_CLASSES = 10


class PacedLoader:
    """A loader that takes one bare step before each batch it returns, and times the framework between two batches.

    Both alternate in one process, on the same batches. From the return of a batch until the next one is asked for, the
    time is the framework's: hooks, callbacks, progress, the step itself. Loading is in neither time.

    Args:
        loader: of the run.
        bare: the bare step.
        wait: waits for the device.
        steps: after these many the run is ended.
        seconds: filled with pairs (bare, framework).
    """

    def __init__(
        self,
        loader: Any,
        bare: TrainingStep,
        wait: Callable[[], None],
        steps: int,
        seconds: list[tuple[float, float]],
    ) -> None:
        self._loader, self._bare, self._wait = loader, bare, wait
        self._steps, self._seconds = steps, seconds

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        for batch in self._loader:
            images, labels = (t.to(self._bare.device) for t in batch)
            self._bare.images, self._bare.labels = images, labels
            self._wait()
            start = time.perf_counter()
            self._bare()
            self._wait()
            middle = time.perf_counter()
            yield batch
            self._wait()
            self._seconds.append((middle - start, time.perf_counter() - middle))
            if len(self._seconds) >= self._steps:
                raise _EnoughSteps


class _EnoughSteps(Exception):
    """Ends the run when enough steps are measured."""


def measure_loops(
    jobs: Sequence[str],
    configure: Configure,
    *,
    batch_size: int | None = None,
    precision: str = "fp32",
    device: torch.device | str = "cpu",
    rounds: int = 60,
    warmup: int = 2,
) -> dict[str, Any]:
    """Time a step of the framework and of a bare loop, for each job.

    Args:
        jobs: `DEFAULT_JOB`, or models of conf/model, trained whole.
        configure: makes configurations.
        batch_size: None: the default job's own; 8 for a model.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        device: cpu or cuda.
        rounds: timed.
        warmup: rounds before these, not timed.

    Returns:
        The report, for JSON and `tables.report_text`.

    Raises:
        UserError: a job that is unknown.
    """
    configs = {}
    for job in jobs:
        default = job == DEFAULT_JOB
        batch = batch_size or (None if default else 8)
        accelerator = "cpu" if torch.device(device).type == "cpu" else "gpu"
        overrides = ["data.num_workers=0", "data=digits", "trainer.epochs=1000", "trainer.limit_eval_batches=1"]
        overrides += [] if default else ["method=full"]
        overrides += [] if batch is None else [f"data.batch_size={batch}"]
        overrides += [f"trainer.accelerator={accelerator}", f"trainer.precision={precision}"]
        configs[job] = configure(None if default else job, overrides)
    measured = {job: _measure_job(config, device, rounds, warmup) for job, config in configs.items()}
    return {"kind": "loop", "baseline": "bare loop", "jobs": measured}


def _measure_job(config: Config, device: torch.device | str, rounds: int, warmup: int) -> dict[str, Any]:
    """Run `config` as the command line does, until enough steps are measured."""
    model, methods = factory.random_model(config.model, _CLASSES), build_methods(config)
    apply_methods(model, methods)
    if torch.device(device).type == "cpu":  # as the framework does: the loop is compared, not the memory format
        model.to(memory_format=torch.channels_last)
    spec = StepSpec(
        config.data.batch_size,
        factory.input_of(config.model).size,
        config.trainer.precision,
        label_smoothing=config.optim.label_smoothing,
        frozen_bn=config.model.frozen_bn,
        grad_clip_norm=config.optim.grad_clip_norm,
    )
    bare = TrainingStep(
        model,
        methods,
        spec,
        device=device,
        build_optimizer=lambda network: build_optimizer(network, config.optim, config.trainer.precision),
    )
    pairs: list[tuple[float, float]] = []
    train_loader = ImageData.train_loader

    def paced(images: Any, *arguments: Any) -> PacedLoader:
        return PacedLoader(train_loader(images, *arguments), bare, waiter(device), warmup + rounds, pairs)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ImageData, "train_loader", paced),
        suppress(_EnoughSteps),
    ):
        run(config, Path(folder) / "run")
    pairs = pairs[warmup:]
    return {
        "model": config.model.name,
        "size": list(spec.input_size),
        "dtype": config.trainer.precision,
        "batch": spec.batch_size,
        "bare loop": {**quartiles([b for b, _ in pairs]), "seconds": [b for b, _ in pairs]},
        "framework": {**quartiles([f for _, f in pairs]), "seconds": [f for _, f in pairs]},
        "overhead_percent": quartiles([100 * (f / b - 1) for b, f in pairs]),
    }
