"""Tables of many runs, with one row for each run or with the means of runs that differ only in their seed."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from efficient_ft.config import Config, check, fingerprint
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import NOT_IN_PERCENT
from efficient_ft.core.sheet import Cell, render
from efficient_ft.core.text import markdown_text, spelled
from efficient_ft.record import config_file, results
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.formats import USE_ITS_VERSION
from efficient_ft.record.results import Results, flatten, images_digest, read_results

#: Settings and prefixes of settings that `varying` omits, because they have other columns or do not affect results.
_OWN = ("seed", "model.name", "data.name", "resume", "jobs", "job_timeout", "table", "rows", "evaluate", "cost_only",
        "published")  # fmt: skip
_PLACES = ("logger.", "cost.", "step_stats.", "data.num_workers", "data.download", "trainer.progress",
           "trainer.accelerator", "allocator")  # fmt: skip


@dataclass(frozen=True)
class Run:
    """A finished run.

    Attributes:
        folder: path of the run folder relative to the collected folder. Tables and messages use this path as the name
            of the run.
        path: path of the run folder.
        group: key that is equal for runs that differ only in their seed. Runs on different images have different keys,
            even if only the resolution of a data set differs. Runs with ``trainer.precision=auto`` that used different
            precisions also have different keys.
    """

    folder: str
    path: Path
    results: Results
    config: Config
    group: str

    @cached_property
    def settings(self) -> dict[str, Any]:
        """Return a dict from the full names of the settings to their values, with the precision that the run used."""
        return flatten(self.config.model_dump(mode="json")) | {"trainer.precision": self.config.trainer.precision}

    @property
    def method(self) -> str:
        """Return the names of the methods, joined by "+"."""
        return "+".join(self.config.method)

    @property
    def data(self) -> str:
        """Return the name of the data set or of the user's image folder, or the names of all tasks, joined by "+"."""
        if self.config.tasks:
            return "+".join(self.config.tasks)
        return Path(self.config.data.root).name if self.config.data.name == "folder" else self.config.data.name


@dataclass(frozen=True)
class Collection:
    """Collection of finished runs, sorted by their folders.

    `ignored` maps each ignored folder to the reason, and `copies` maps each copied folder to the original folder.
    """

    runs: tuple[Run, ...]
    ignored: Mapping[str, str]
    copies: Mapping[str, str]


def collect(folder: Path, read: Callable[[int, int], None] = lambda done, of: None) -> Collection:
    """Read all runs in `folder` and its subfolders. `Collection.ignored` lists runs that cannot be read.

    After each run folder, `read` is called with the number of folders read so far and the total number.

    Raises:
        UserError: If the folder does not exist or contains no readable run.
    """
    if not folder.is_dir():
        raise UserError(f"The folder {folder} does not exist. Pass a folder with run folders, for example outputs.")
    marks = (results.NAME, config_file.NAME)
    found = sorted({file.parent for mark in marks for file in folder.rglob(mark) if ".hydra" not in file.parts})
    collection = collect_runs(folder, found, read)
    if not collection.runs:
        first = next(iter(collection.ignored.values()), "it contains no run folder")
        raise UserError(f"The folder {folder} contains no finished run of this version: {first}")
    return collection


def collect_runs(
    folder: Path, runs: Sequence[Path], read: Callable[[int, int], None] = lambda done, of: None
) -> Collection:
    """Read the run folders `runs`, and name each run by its path relative to `folder`. Unreadable runs are ignored."""
    found, ignored = [], {}
    for number, run in enumerate(runs, start=1):
        name = run.relative_to(folder).as_posix()
        try:
            found.append(_run(name, run, read_results(run, USE_ITS_VERSION)))
        except UserError as error:
            ignored[name] = str(error).replace(f"{run}{os.sep}", "").replace(str(run), name)
        read(number, len(runs))
    kept, copies = without_copies(found)
    return Collection(tuple(kept), ignored, copies)


def without_copies(runs: Iterable[Run]) -> tuple[list[Run], dict[str, str]]:
    """Return the runs that are not copies of other runs, and a dict from copied folders to their originals."""
    first: dict[str, Run] = {}
    copies = {}
    for run in runs:
        original = first.setdefault(json.dumps(run.results), run)
        if original is not run:
            copies[run.folder] = original.folder
    return list(first.values()), copies


def write_tables(collection: Collection, path: Path) -> list[Path]:
    """Write one row for each run to ``PATH.csv`` and ``PATH.json``, and means over the seeds to ``PATH.md``."""
    header, rows = run_rows(collection)
    means, mean_rows = group_rows(collection)
    table = render(means, mean_rows, "markdown", left=means.index("seeds") + 1)
    texts = {
        ".csv": render(header, rows, "csv"),
        ".json": render(header, rows, "json"),
        ".md": "\n\n".join([table, *map(markdown_text, notes(collection, means=True))]),
    }
    files = [path.with_name(path.name + suffix) for suffix in texts]
    for file, text in zip(files, texts.values(), strict=True):
        write_text_atomically(file, f"{text}\n")
    return files


def _run(name: str, path: Path, found: Results) -> Run:
    config = check(found["config"])
    if config.trainer.precision == "auto":
        config = config.with_precision(found["environment"].get("precision", "auto"))
    settings = fingerprint(config.model_copy(update={"seed": 0}))
    group = f"{settings},{config.trainer.precision} {images_digest(found['data'])}"
    return Run(name, path, found, config, group)


#: Functions that return the value of a column for the results of a run: costs per image, totals.
NUMBERS: dict[str, Any] = {
    "forward MFLOPs/sample": lambda r: r["cost"]["executed"]["forward_flops"] / 1e6,
    "backward MFLOPs/sample": lambda r: r["cost"]["executed"]["backward_flops"] / 1e6,
    "saved MiB/sample": lambda r: r["cost"]["executed"]["saved_bytes"] / 2**20,
    "peak MiB": lambda r: r["cost"]["measured"]["peak_bytes"] / 2**20,
    "process growth MiB": lambda r: r["memory"]["growth_bytes"] / 2**20 if "memory" in r else None,
    "TFLOPs of the run": lambda r: r["totals"]["flops"] / 1e12,
    "seconds": lambda r: r["totals"]["seconds"],
    "joules": lambda r: r["totals"]["joules"],
    "trainable M": lambda r: r["trainable_parameters"] / 1e6,
    "published accuracy %": lambda r: None if (one := r["config"].get("published")) is None else 100 * one,
}
#: Values of the metric that have a column.
SCORES = ("test", "best", "last")


def metric_of(results: Mapping[str, Any]) -> str:
    """Return the name of the metric of a run."""
    return str(results["accuracy"].get("metric", "accuracy"))


def metrics_of(runs: Sequence[Run]) -> list[str]:
    """Return the names of the metrics of the runs."""
    return list(dict.fromkeys(metric_of(run.results) for run in runs))


def in_plain_numbers(results: Mapping[str, Any]) -> bool:
    """Return True if the metric of a run is not a fraction, and is therefore not converted to a percentage."""
    return metric_of(results) in NOT_IN_PERCENT


def heading(metric: str) -> str:
    """Return the display name of a metric with its unit: ``accuracy %``, ``mAP %`` or ``R²``."""
    return spelled(metric) if metric in NOT_IN_PERCENT else f"{spelled(metric)} %"


def _score(results: Mapping[str, Any], key: str, metric: str) -> float | None:
    value = results["accuracy"].get(key)
    if value is None or metric_of(results) != metric:
        return None
    return float(value if metric in NOT_IN_PERCENT else 100 * value)


def _columns(runs: Sequence[Run]) -> dict[str, Any]:
    pairs = [(metric, key) for metric in metrics_of(runs) for key in SCORES]
    return {f"{key} {heading(metric)}": partial(_score, key=key, metric=metric) for metric, key in pairs} | NUMBERS


def varying(runs: Sequence[Run]) -> list[str]:
    """Return the names of the settings that differ between `runs`, except for the seed, model, data and paths."""
    flat = [run.settings for run in runs]
    names = dict.fromkeys(name for settings in flat for name in settings)
    given = {argument.partition("=")[0].lstrip("+") for run in runs for argument in run.results["arguments"]}

    def differs(name: str) -> bool:
        # Runs do not have settings of unused methods. Such a setting differs only if a user has set it in another run.
        return len({str(one.get(name, "")) for one in flat if name in one or name in given}) > 1

    return [n for n in names if n not in _OWN and not n.startswith((*_PLACES, "tasks.")) and differs(n)]


def run_rows(collection: Collection) -> tuple[list[str], list[list[Cell]]]:
    """Return the header, and one row for each run with settings, accuracy, cost and totals."""
    settings = varying(collection.runs)
    numbers = _columns(collection.runs)
    header = ["run", "method", "model", "data", "seed", *settings, "split", *numbers]
    rows: list[list[Cell]] = []
    for run in collection.runs:
        flat = run.settings
        what: list[Cell] = [run.folder, run.method, run.config.model.name, run.data, run.config.seed]
        values: list[Cell] = [str(flat[name]) if name in flat else None for name in settings]
        split = run.results["accuracy"]["split"]
        rows.append([*what, *values, split, *(_rounded(of(run.results)) for of in numbers.values())])
    return header, rows


def group_rows(collection: Collection) -> tuple[list[str], list[list[Cell]]]:
    """Return the header, and one row for each group of runs that differ only in their seed.

    Each row contains the means over the runs and the standard deviation of the metric on test data.
    """
    settings = varying(collection.runs)
    numbers = _columns(collection.runs)
    metrics = metrics_of(collection.runs)
    spreads = [f"test {heading(metric)} ±" for metric in metrics]
    header = ["method", "model", "data", *settings, "seeds", *spreads, *numbers]
    rows: list[list[Cell]] = []
    for group in groups(collection.runs):
        first = group[0]
        flat = first.settings
        what: list[Cell] = [first.method, first.config.model.name, first.data]
        values: list[Cell] = [str(flat[name]) if name in flat else None for name in settings]
        deviations = [_deviation([_score(run.results, "test", metric) for run in group]) for metric in metrics]
        means = [_mean(of(run.results) for run in group) for of in numbers.values()]
        rows.append([*what, *values, " ".join(str(run.config.seed) for run in group), *deviations, *means])
    return header, rows


def groups(runs: Iterable[Run]) -> list[list[Run]]:
    """Return groups of runs that differ only in their seed. The runs of a group are sorted by seed.

    For each seed, only the latest run is included.
    """
    found: dict[str, dict[int, Run]] = {}
    for run in sorted(runs, key=lambda run: str(run.results["environment"].get("date") or "")):
        found.setdefault(run.group, {})[run.config.seed] = run
    return [[by_seed[seed] for seed in sorted(by_seed)] for by_seed in found.values()]


def notes(collection: Collection, means: bool) -> list[str]:
    """Return sentences about excluded runs and missing seeds. `means` must be True for a table of means over seeds."""
    unfinished = [name for name, reason in collection.ignored.items() if "has not finished" in reason]
    said = [f"{name} is excluded: {reason}" for name, reason in collection.ignored.items() if name not in unfinished]
    if collection.copies:
        copies = ", ".join(f"{copy} (of {run})" for copy, run in collection.copies.items())
        said.insert(0, f"Copies of other runs are not included: {copies}.")
    if unfinished:
        said.insert(0, f"Running, interrupted and failed runs are not included: {', '.join(unfinished)}.")
    names = [run.folder for run in collection.runs if run.config.trainer.limit_eval_batches is not None]
    if names:
        said.append(f"Only some images were used for evaluation (trainer.limit_eval_batches): {', '.join(names)}.")
    first: dict[str, Run] = {}
    for group in groups(collection.runs):
        settings = group[0].group.partition(" ")[0]
        if (other := first.setdefault(settings, group[0])) is not group[0]:
            said.append(
                f"The runs {group[0].folder} and {other.folder} have the same settings but different images"
                " (data.root), so the runs are not averaged."
            )
    return [*said, *(repeated(collection) if means else []), *missing_seeds(collection)]


def repeated(collection: Collection) -> list[str]:
    """Return a sentence about runs that `groups` excludes because a later run has the same settings and seed."""
    kept = {(run.group, run.config.seed): run for group in groups(collection.runs) for run in group}
    pairs = [(run, kept[run.group, run.config.seed]) for run in collection.runs]
    names = [f"{run.folder} (replaced by {later.folder})" for run, later in pairs if run is not later]
    return [f"Runs are excluded if a later run has the same settings and seed: {', '.join(names)}."] if names else []


def missing_seeds(collection: Collection) -> list[str]:
    """Return messages about missing seeds.

    A seed is missing from a group if another group with the same model and data has this seed.
    """
    every: dict[tuple[str, str], set[int]] = {}
    for run in collection.runs:
        every.setdefault((run.config.model.name, run.data), set()).add(run.config.seed)
    lacking: dict[str, list[str]] = {}
    for group in groups(collection.runs):
        seeds = every[group[0].config.model.name, group[0].data] - {run.config.seed for run in group}
        if absent := [str(seed) for seed in sorted(seeds)]:
            lacking.setdefault(", ".join(absent), []).append(f"{group[0].folder} ({group[0].method})")
    return [f"These runs were not repeated with seed {seeds}: {', '.join(names)}." for seeds, names in lacking.items()]


def _mean(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(sum(known) / len(known)) if known else None


def _deviation(values: Iterable[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return _rounded(statistics.stdev(known)) if len(known) > 1 else None


def _rounded(value: float | None) -> float | None:
    return None if value is None else float(f"{value:.6g}")
