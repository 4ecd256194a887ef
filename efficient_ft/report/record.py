"""Functions that read the recorded steps of a run."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from efficient_ft.config import Config
from efficient_ft.config.identity import OWN_FOLDERS
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_metric
from efficient_ft.core.text import spelled
from efficient_ft.data.inspection import spread
from efficient_ft.record.config_file import NAME as CONFIG
from efficient_ft.record.config_file import read_config
from efficient_ft.record.formats import PASS_A_RUN, USE_ITS_VERSION
from efficient_ft.record.results import NAME as RESULTS
from efficient_ft.record.results import read_results
from efficient_ft.record.rows import Rows
from efficient_ft.record.step_stats import NAME

#: Maximum number of steps in figures. For longer records, evenly spaced steps are shown.
MAX_STEPS = 600


@dataclass(frozen=True)
class Record:
    """The rows of step_stats.jsonl for T recorded steps and B blocks (see `efficient_ft.record.step_stats`).

    `steps` (T,) contains the numbers of the optimizer steps, counted from 1. `blocks` contains the full names of the
    blocks, and `labels` contains their short names (`block_labels`). The other arrays have the shape (T, B). Values
    that were not recorded are NaN. `budgets` is None if the run has no budgets.
    """

    steps: np.ndarray
    blocks: list[str]
    labels: list[str]
    trained: np.ndarray
    budgets: np.ndarray | None
    tokens: np.ndarray
    magnitudes: np.ndarray
    compared: np.ndarray

    @property
    def ends(self) -> tuple[slice, slice, str]:
        """Slices for the first and the last tenth of the record, and a description of the length of a slice."""
        share = max(1, len(self.steps) // 10)
        called = "record" if share == 1 else f"{share} records"
        return slice(0, share), slice(-share, None), called

    @property
    def thinned(self) -> np.ndarray:
        """Indices of at most `MAX_STEPS` evenly spaced steps."""
        return spread(len(self.steps), MAX_STEPS)


def read(run: Path) -> Record:
    """Read the record of `run`. Raise a `UserError` if the record does not exist or cannot be read."""
    if not run.is_dir():
        raise UserError(f"The folder {run} does not exist. {PASS_A_RUN}")
    rows = Rows(run / NAME).read()
    if not rows:
        if (run / CONFIG).is_file():
            read_config(run, PASS_A_RUN, USE_ITS_VERSION)
        raise UserError(
            f"The folder {run} contains no record ({NAME}). Train with step_stats.interval=n to record every n-th"
            " optimizer step. To repeat a finished run, also set resume=never."
        )
    if not all({"step", "blocks", "trained"} <= row.keys() for row in rows):
        raise UserError(f"The file {run / NAME} is incomplete: a row has no step, blocks or trained. {USE_ITS_VERSION}")
    try:
        return _record(rows)
    except (TypeError, ValueError, IndexError) as error:  # a value has a wrong type, or rows have different lengths
        raise UserError(f"The file {run / NAME} is damaged ({error}). Train again with resume=never.") from error


def _record(rows: Sequence[dict[str, Any]]) -> Record:
    blocks = list(rows[0]["blocks"])
    if not blocks:
        raise ValueError("a row contains no block")

    def numbers(name: str) -> np.ndarray:
        empty = [None] * len(blocks)
        return np.array([row.get(name) or empty for row in rows], dtype=float)

    budgets = numbers("budgets")
    return Record(
        steps=np.array([row["step"] for row in rows]),
        blocks=blocks,
        labels=block_labels(blocks),
        trained=np.array([[block in row["trained"] for block in blocks] for row in rows]),
        budgets=None if np.isnan(budgets).all() else budgets,
        tokens=numbers("tokens"),
        magnitudes=numbers("magnitudes"),
        compared=numbers("compared"),
    )


def block_labels(blocks: Sequence[str]) -> list[str]:
    """Return short names of blocks, which consist of the numbers in the full names.

    If the short names are not unique, return the full names.
    """
    short = [".".join(re.findall(r"\d+", name)) for name in blocks]
    return short if all(short) and len(set(short)) == len(short) else list(blocks)


def describe(run: Path, record: Record | None) -> tuple[dict[str, str], Config]:
    """Return a dictionary from titles to facts about a run, and the configuration of the run.

    `record` contains the step statistics of the run, or is None if they were not recorded.

    Raises:
        UserError: If a file is damaged.
    """
    config = read_config(run, PASS_A_RUN, USE_ITS_VERSION)
    data: str = config.data.name
    if data in OWN_FOLDERS:
        data = os.path.basename(os.path.normpath(config.data.root))
    if config.tasks:
        data = ", ".join(config.tasks) + " in turn"
    started = "" if config.model.pretrained or config.model.weights else " (from random weights)"
    methods = []
    for name, settings in config.method.items():
        given = ", ".join(f"{key}={value}" for key, value in settings.items())
        methods.append(f"{name} ({given})" if given else name)
    facts = {
        "Method": " + ".join(methods),
        "Model": config.model.name + started,
        "Data": data,
    }
    if (run / RESULTS).is_file():
        found = read_results(run, USE_ITS_VERSION)
        accuracy = found["accuracy"]
        mean = "mean of the tasks: " if config.tasks else ""
        metric = accuracy.get("metric", "accuracy")
        best, last = (format_metric(accuracy[key], metric) for key in ("best", "last"))
        what = spelled(metric)
        title = f"{what[0].upper()}{what[1:]}" if what.islower() else what
        facts[title] = f"{mean}{best} ({accuracy['split']}, best), {last} (last)"
        tested = found["data"]["accuracy"].get("test")
        if accuracy["split"] != "test" and tested is not None:
            facts[title] += f", {format_metric(tested, metric)} (test, best)"
    else:
        facts["Accuracy"] = "the run has not finished"
    if record is not None:
        steps = record.steps
        span = f"{len(steps)} optimizer steps (from {steps[0]} to {steps[-1]})"
        facts["Step statistics"] = f"{span}, batch size {config.data.batch_size}"
    return facts, config
