"""Measurements of a data set of a million files, a folder of a thousand runs, and a run of a hundred thousand steps.

Each function runs the command in a separate process and returns its measurements.
"""

from __future__ import annotations

import json
import os
import shutil
import statistics
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, NamedTuple

import psutil

from efficient_ft.core.errors import UserError

#: Settings of the smallest run: a network with random weights on a CPU, without a baseline cost.
_SMALL = (
    "model=vit_digits", "+model.kwargs.depth=1", "+model.kwargs.embed_dim=16", "+model.kwargs.num_heads=2",
    "model.frozen_bn=false", "data.batch_size=2", "trainer.precision=fp32", "trainer.accelerator=cpu",
    "trainer.progress=false", "trainer.epochs=1000000", "trainer.limit_eval_batches=1", "cost.baseline=none",
    "cost.steps=1",
)  # fmt: skip
#: Number of classes of the data set of many files.
_CLASSES = 1000
#: Seconds between two samples of a process.
_INTERVAL = 0.25


class _Look(NamedTuple):
    """A sample of a run: step, resident bytes, open files or handles, and child processes."""

    step: int
    bytes: int
    handles: int
    processes: int


def million_files(folder: Path, files: int = 1_000_000) -> dict[str, float]:
    """Start a run on a class folder of many small images, and measure it up to the first step.

    The images of a class are hard links to one file if the file system supports hard links. The function removes all
    files at the end.

    Args:
        folder: An existing folder on a disk with space for `files` directory entries.
        files: Number of images in 1,000 classes, at least four images per class.

    Returns:
        dict: ``seconds`` from the start of the command to the end of the first optimizer step, and ``peak_bytes``, the
            highest resident memory of the process until then.

    Raises:
        UserError: If the run fails.
    """
    images, run = folder / "images", folder / "run_on_files"
    try:
        _write_images(images, files)
        began = time.monotonic()
        # Each step writes a row, so the first step is detected immediately.
        arguments = [*_SMALL, "method=full", "data=folder", f"data.root={images}", "step_stats.interval=1"]
        with _started([*arguments, f"hydra.run.dir={run}"], folder) as process:
            peak = 0
            while process.poll() is None and _last_step(run / "step_stats.jsonl") < 1:
                with suppress(psutil.Error):
                    peak = max(peak, psutil.Process(process.pid).memory_info().rss)
                time.sleep(_INTERVAL / 5)
            seconds = time.monotonic() - began
            if process.poll() is not None:
                raise UserError(f"The run on {files} files ended with status {process.poll()}: {_printed(folder)}")
        return {"seconds": seconds, "peak_bytes": peak}
    finally:
        shutil.rmtree(images, ignore_errors=True)
        shutil.rmtree(run, ignore_errors=True)


def collect_many(folder: Path, run: Path, runs: int = 1000) -> dict[str, float]:
    """Run ``efficient-ft collect`` on many copies of a finished run with different seeds, and remove the copies.

    Args:
        folder: An existing folder.
        run: The folder of a finished run.
        runs: Number of copies.

    Returns:
        dict: ``seconds`` of the command.

    Raises:
        UserError: If the command fails or does not read every run.
    """
    copies = folder / "runs"
    try:
        results = json.loads((run / "results.json").read_text(encoding="utf-8"))
        settings = (run / "config.yaml").read_text(encoding="utf-8")
        for seed in range(runs):
            results["seed"] = results["config"]["seed"] = seed
            copy = copies / f"run_{seed:06d}"
            copy.mkdir(parents=True)
            (copy / "results.json").write_text(json.dumps(results), encoding="utf-8")
            (copy / "config.yaml").write_text(settings, encoding="utf-8")
        began = time.monotonic()
        with _started(["collect", str(copies), "--runs", "--form", "csv"], folder) as process:
            status = process.wait()
        seconds = time.monotonic() - began
        rows = (folder / "printed").read_text(encoding="utf-8", errors="replace").count("\nrun_")
        if status or rows != runs:
            raise UserError(f"collect read {rows} of {runs} runs, with status {status}: {_printed(folder)}")
        return {"seconds": seconds}
    finally:
        shutil.rmtree(copies, ignore_errors=True)


def many_steps(folder: Path, steps: int = 100_000, arguments: Sequence[str] = ("method=full",)) -> dict[str, float]:
    """Train the smallest network for many steps, and measure the growth of the process.

    The growth is the difference between the medians of the samples in the last tenth and in the second tenth of the
    steps. The first tenth is excluded because kernels are loaded and memory usage stabilizes.

    Args:
        folder: An existing folder. The run replaces FOLDER/run_of_steps.
        steps: Number of optimizer steps, at least 1,000, because a run records every fiftieth step.
        arguments: Further settings of the run.

    Returns:
        dict: ``bytes``, ``handles`` and ``processes``, the growth of resident memory, open files and child processes,
            and the ``seconds`` of the command.

    Raises:
        UserError: If the run fails or is too short for samples.
    """
    run, looks = folder / "run_of_steps", list[_Look]()
    shutil.rmtree(run, ignore_errors=True)
    began = time.monotonic()
    settings = [*_SMALL, "data=digits", *arguments, f"trainer.max_steps={steps}", f"hydra.run.dir={run}"]
    with _started(settings, folder) as process:
        while process.poll() is None:
            with suppress(psutil.Error):
                looks.append(_look(psutil.Process(process.pid), _last_step(run / "metrics.jsonl")))
            time.sleep(_INTERVAL)
    if process.returncode:
        raise UserError(f"The run of {steps} steps ended with status {process.returncode}: {_printed(folder)}")
    early = [look for look in looks if 0.1 * steps <= look.step < 0.2 * steps]
    # The evaluation on the test images and the cost count follow the last step.
    late = [look for look in looks if 0.9 * steps <= look.step < steps]
    if not early or not late:
        raise UserError(f"{steps} steps were too few to look at the process. Choose more.")

    def growth(of: Callable[[_Look], int]) -> float:
        return statistics.median(map(of, late)) - statistics.median(map(of, early))

    return {
        "bytes": growth(lambda look: look.bytes),
        "handles": growth(lambda look: look.handles),
        "processes": growth(lambda look: look.processes),
        "seconds": time.monotonic() - began,
    }


def _write_images(folder: Path, files: int) -> None:
    """Write small images of different colors into class folders, as hard links to few files."""
    from PIL import Image

    classes = max(2, min(_CLASSES, files // 4))
    for label in range(classes):
        place = folder / f"class_{label:04d}"
        place.mkdir(parents=True)
        first = place / "image_0000000.png"
        Image.new("RGB", (8, 8), (label % 256, label // 256, 128)).save(first)
        for number in range(1, len(range(label, files, classes))):
            other = place / f"image_{number:07d}.png"
            try:
                os.link(first, other)
            except OSError:  # no hard links, or too many links to one file
                shutil.copyfile(first, other)


@contextmanager
def _started(arguments: Sequence[str], folder: Path) -> Iterator[subprocess.Popen[bytes]]:
    """Start ``efficient-ft`` in `folder` with its output in a file, and end the process after the block."""
    with open(folder / "printed", "wb") as printed:
        process = subprocess.Popen(
            [sys.executable, "-m", "efficient_ft", *arguments], cwd=folder, stdout=printed, stderr=subprocess.STDOUT
        )
        try:
            yield process
        finally:
            if process.poll() is None:
                with suppress(psutil.Error):
                    for child in psutil.Process(process.pid).children(recursive=True):
                        child.kill()
                process.kill()
            process.wait()


def _printed(folder: Path) -> str:
    """Return the end of the printed text."""
    return (folder / "printed").read_text(encoding="utf-8", errors="replace")[-1000:].strip()


def _look(process: psutil.Process, step: int) -> _Look:
    handles = process.num_handles() if sys.platform == "win32" else process.num_fds()
    return _Look(step, process.memory_info().rss, handles, len(process.children(recursive=True)))


def _last_step(file: Path) -> int:
    """Return the step of the last complete row of a JSON lines file, or 0 if there is no row."""
    try:
        with open(file, "rb") as rows:
            rows.seek(max(0, rows.seek(0, os.SEEK_END) - 65536))
            lines = rows.read().split(b"\n")
    except OSError:
        return 0
    for line in reversed(lines):
        with suppress(ValueError, KeyError, TypeError):
            step: Any = json.loads(line)["step"]
            return int(step)
    return 0
