"""Measure the framework's overhead per step compared with a plain PyTorch loop, and the time a step waits for data."""

from __future__ import annotations

import itertools
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import torch

from efficient_ft.bench.recipes import Configure, in_precision, precisions_of
from efficient_ft.bench.step import build_step
from efficient_ft.bench.timing import quartiles, waiter
from efficient_ft.config import Config
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost import TrainingStep
from efficient_ft.data import ImageData, class_count, missing_data
from efficient_ft.models import factory
from efficient_ft.models.weight_dtype import store_weights
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.run import run

#: Name of the job that conf/train.yaml describes without overrides.
DEFAULT_JOB = "default"
#: Times in seconds of each step in the plain loop (``bare loop``) and in the framework (``framework``), and of loading
#: each batch (``data wait``).
Times = dict[str, list[float]]


class PacedLoader:
    """Loader that runs one step of the plain loop before each batch, and times the framework between two batches.

    The plain loop and the framework alternate in one process, on the same batches. The framework's time starts when a
    batch is returned and ends when the next batch is requested. This time covers hooks, callbacks, progress output and
    the step, but not the loading of data. `loader` must not use worker processes. The run ends after `steps` steps.
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
            seconds = {"data wait": time.perf_counter() - asked}
            if self._bare is not None:
                self._bare.inputs, self._bare.labels = (t.to(self._bare.device) for t in batch)
                self._wait()
                start = time.perf_counter()
                self._bare()
                self._wait()
                seconds["bare loop"] = time.perf_counter() - start
            start = time.perf_counter()
            yield batch
            self._wait()
            asked = time.perf_counter()  # this line is not reached for the last batch of an epoch
            seconds["framework"] = asked - start
            for name, value in seconds.items():
                self._times[name].append(value)
            if len(self._times["framework"]) >= self._steps:
                raise _EnoughSteps


class _EnoughSteps(Exception):
    """Exception that stops the run after the measured steps."""


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
    """For each job, time a step of the framework, a step of a plain loop, and the loading of a batch.

    A job is `DEFAULT_JOB`, or the name of a model in conf/model. If a job is the name of a model, all parameters are
    trained. If `precision` is ``both``, each job runs in fp32 and in bf16. A job is not compared with a plain loop if
    `trainer.cache_features` or `trainer.prefix` changes how its frozen part is computed. The parameters are the options
    of the command. The result is a JSON-serializable report, which `tables.report_text` formats.

    Raises:
        UserError: If a job is unknown, or images or settings cannot be used.
    """
    configs = {}
    precisions = precisions_of(precision)
    for job, dtype in itertools.product(jobs, precisions):
        default = job == DEFAULT_JOB
        batch = batch_size or (None if default else 8)
        accelerator = "cpu" if torch.device(device).type == "cpu" else "gpu"
        overrides = ["data=digits"] if images is None else ["data=folder", f"data.root={images}"]
        overrides += ["data.num_workers=0", "trainer.epochs=1000", "trainer.limit_eval_batches=1"]
        overrides += [] if default else ["method=full"]
        overrides += [] if batch is None else [f"data.batch_size={batch}"]
        overrides += [f"trainer.accelerator={accelerator}", f"trainer.precision={dtype}"]
        if not any(one.startswith("trainer.prefix=") for one in settings):
            overrides.append("trainer.prefix=fp32")  # the plain loop computes a frozen prefix in this form
        overrides += settings
        configs[in_precision(job, dtype, precisions)] = configure(None if default else job, overrides)
    for config in configs.values():
        if not kind_of(config).fixed_batches:
            raise UserError(f"task={config.task}: bench loop can only time image classifiers. Use bench step.")
        if missing := missing_data(config.data):
            raise UserError(missing)
    measured = {job: _measure_job(config, device, rounds, warmup) for job, config in configs.items()}
    return {"kind": "loop", "baseline": "bare loop", "jobs": measured}


def _measure_job(config: Config, device: torch.device | str, rounds: int, warmup: int) -> dict[str, Any]:
    """Run `config` as the command line does, until enough steps are measured."""
    if config.data.num_workers:
        raise SettingError("data.num_workers", config.data.num_workers, "0", "Loading is timed in one process.")
    size = factory.input_of(config.model).size
    as_it_is = config.trainer.cache_features == "off" and config.trainer.frozen_prefix == "fp32"
    bare = None
    if as_it_is:
        classes = class_count(config.data)
        assert classes is not None, "missing images were reported before"
        network = store_weights(factory.random_model(config.model, classes), config.trainer.weight_dtype)
        on_cpu = torch.device(device).type == "cpu"
        # On a CPU, both loops use channels-last memory, so that the memory format does not affect the comparison.
        bare = build_step(config, network, device, config.data.batch_size, channels_last=on_cpu)
    measured: Times = defaultdict(list)
    train_loader = ImageData.train_loader

    def paced(images: Any, *arguments: Any, **options: Any) -> PacedLoader:
        return PacedLoader(train_loader(images, *arguments, **options), bare, waiter(device), warmup + rounds, measured)

    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.object(ImageData, "train_loader", paced),
        suppress(_EnoughSteps),
    ):
        run(config, Path(folder) / "run")
    times = {name: seconds[warmup:] for name, seconds in measured.items()}
    summaries = {name: {**quartiles(seconds), "seconds": seconds} for name, seconds in times.items()}
    share = [100 * data / step for data, step in zip(times["data wait"], times["framework"], strict=True)]
    report = {
        "model": config.model.name,
        "size": list(size),
        "dtype": config.trainer.precision,
        "batch": config.data.batch_size,
        "framework": summaries["framework"],
        "data wait": summaries["data wait"],
        "data_wait_percent": quartiles(share),
    }
    if bare is None:
        return report
    overhead = [100 * (f / b - 1) for b, f in zip(times["bare loop"], times["framework"], strict=True)]
    return {**report, "bare loop": summaries["bare loop"], "overhead_percent": quartiles(overhead)}
