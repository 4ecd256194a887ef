"""Benchmark of the framework: its time per step on top of a bare PyTorch loop, and the time a step waits for data."""

from __future__ import annotations

import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from efficient_ft.bench.recipes import Configure
from efficient_ft.bench.timing import quartiles, waiter
from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import StepSpec, TrainingStep
from efficient_ft.data import ImageData, class_count, missing_data
from efficient_ft.methods.base import apply_methods
from efficient_ft.methods.build import build_methods
from efficient_ft.models import factory
from efficient_ft.task import TASKS
from efficient_ft.training.module import build_optimizer
from efficient_ft.training.run import run

#: The job of conf/train.yaml as it is.
DEFAULT_JOB = "default"


@dataclass
class Times:
    """Seconds of each step: of a bare one, of the framework, and for its batch to be loaded."""

    bare: list[float] = field(default_factory=list)
    framework: list[float] = field(default_factory=list)
    data: list[float] = field(default_factory=list)

    def after(self, warmup: int) -> Times:
        """The times without those of the first steps."""
        return Times(self.bare[warmup:], self.framework[warmup:], self.data[warmup:])


class PacedLoader:
    """A loader that takes one bare step before each batch it returns, and times the framework between two batches.

    Both alternate in one process, on the same batches. From the return of a batch until the next one is asked for, the
    time is the framework's: hooks, callbacks, progress, the step itself. Loading is in neither time.

    Args:
        loader: of the run; it loads in this process.
        bare: the bare step; None: none is taken.
        wait: waits for the device.
        steps: after these many the run is ended.
        times: filled.
    """

    def __init__(
        self, loader: Any, bare: TrainingStep | None, wait: Callable[[], None], steps: int, times: Times
    ) -> None:
        self._loader, self._bare, self._wait = loader, bare, wait
        self._steps, self._times = steps, times

    def __len__(self) -> int:
        return len(self._loader)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._loader, name)

    def __iter__(self) -> Iterator[Any]:
        asked = time.perf_counter()
        for batch in self._loader:
            data = time.perf_counter() - asked
            bare = 0.0
            if self._bare is not None:
                self._bare.inputs, self._bare.labels = (t.to(self._bare.device) for t in batch)
                self._wait()
                start = time.perf_counter()
                self._bare()
                self._wait()
                bare = time.perf_counter() - start
            start = time.perf_counter()
            yield batch
            self._wait()
            asked = time.perf_counter()  # not reached after the last batch of an epoch, which is not timed
            self._times.data.append(data)
            self._times.bare.append(bare)
            self._times.framework.append(asked - start)
            if len(self._times.framework) >= self._steps:
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
    images: Path | None = None,
    settings: Sequence[str] = (),
) -> dict[str, Any]:
    """Time a step of the framework and of a bare loop, and the loading of its batch, for each job.

    A job that does not compute its frozen part as the network does (`trainer.cache_features`, `trainer.prefix`) is
    compared with no bare loop.

    Args:
        jobs: `DEFAULT_JOB`, or models of conf/model, trained whole.
        configure: makes configurations.
        batch_size: None: the default job's own; 8 for a model.
        precision: ``fp32``, ``bf16`` or ``fp16``.
        device: cpu or cuda.
        rounds: timed.
        warmup: rounds before these, not timed.
        images: a folder of images in folders; None: the digits.
        settings: of all jobs, KEY=VALUE.

    Returns:
        The report, for JSON and `tables.report_text`.

    Raises:
        UserError: a job that is unknown, or images or settings that cannot be used.
    """
    configs = {}
    for job in jobs:
        default = job == DEFAULT_JOB
        batch = batch_size or (None if default else 8)
        accelerator = "cpu" if torch.device(device).type == "cpu" else "gpu"
        overrides = ["data=digits"] if images is None else ["data=folder", f"data.root={images}"]
        overrides += ["data.num_workers=0", "trainer.epochs=1000", "trainer.limit_eval_batches=1"]
        overrides += [] if default else ["method=full"]
        overrides += [] if batch is None else [f"data.batch_size={batch}"]
        overrides += [f"trainer.accelerator={accelerator}", f"trainer.precision={precision}"]
        overrides += settings
        configs[job] = configure(None if default else job, overrides)
    for config in configs.values():
        if config.task != "classification":
            raise UserError(f"bench loop times classifiers of images, not task={config.task}: use bench step.")
        if missing := missing_data(config.data):
            raise UserError(missing)
    measured = {job: _measure_job(config, device, rounds, warmup) for job, config in configs.items()}
    return {"kind": "loop", "baseline": "bare loop", "jobs": measured}


def _measure_job(config: Config, device: torch.device | str, rounds: int, warmup: int) -> dict[str, Any]:
    """Run `config` as the command line does, until enough steps are measured."""
    if config.data.num_workers:
        raise SettingError("data.num_workers", config.data.num_workers, "0", "Loading is timed in one process.")
    size = factory.input_of(config.model).size
    as_it_is = config.trainer.cache_features == "off" and config.trainer.prefix == "fp32"
    bare = _bare_step(config, device) if as_it_is else None
    times = Times()
    train_loader = ImageData.train_loader

    def paced(images: Any, *arguments: Any, **options: Any) -> PacedLoader:
        return PacedLoader(train_loader(images, *arguments, **options), bare, waiter(device), warmup + rounds, times)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ImageData, "train_loader", paced),
        suppress(_EnoughSteps),
    ):
        run(config, Path(folder) / "run")
    times = times.after(warmup)
    share = [100 * data / step for data, step in zip(times.data, times.framework, strict=True)]
    report = {
        "model": config.model.name,
        "size": list(size),
        "dtype": config.trainer.precision,
        "batch": config.data.batch_size,
        "framework": {**quartiles(times.framework), "seconds": times.framework},
        "data wait": {**quartiles(times.data), "seconds": times.data},
        "data_wait_percent": quartiles(share),
    }
    if bare is None:
        return report
    return {
        **report,
        "bare loop": {**quartiles(times.bare), "seconds": times.bare},
        "overhead_percent": quartiles([100 * (f / b - 1) for b, f in zip(times.bare, times.framework, strict=True)]),
    }


def _bare_step(config: Config, device: torch.device | str) -> TrainingStep:
    classes = class_count(config.data)
    assert classes is not None, "the run refuses a folder that is not there"
    model, methods = factory.random_model(config.model, classes), build_methods(config)
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
        task=TASKS[config.task],
    )
    return TrainingStep(
        model,
        methods,
        spec,
        device=device,
        build_optimizer=lambda network: build_optimizer(network, config.optim, config.trainer.precision),
    )
