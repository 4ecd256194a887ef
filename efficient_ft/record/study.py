"""Definition and records of a study.

A study compares methods on one network and data set over several seeds. Each method uses the best value of one tuned
setting. A study is a folder with two files. ``study.yaml`` defines the runs:

.. code-block:: yaml

    title: DeiT-Tiny on Caltech-101
    settings: [model=deit_tiny, data=folder]      # settings of all runs
    tune: {setting: optim.lr, values: [1.0e-4, 3.0e-4, 1.0e-3, 3.0e-3], seed: 0}
    seeds: [1, 2, 3]
    rows:                                         # name and settings of each row
      full: [method=full]
      head: [method=head]

Rows may differ only in their methods, and in the settings that are listed under ``vary``.

Every row is tuned in the same way, with the seed of ``tune``. First, the two middle values are run. Then, the search
runs the neighbors of the best value and of every value whose accuracy is at most one percentage point lower (`NEAR`).
The search ends if no neighbor is missing. The best value is the value with the highest accuracy on the split on which
the best epoch is selected. The row is then run at this value with every seed. ``records.json`` contains a record of
every finished run. The records contain no paths, so an interrupted study can be continued on another machine.

With ``start: lr_test`` in ``tune``, the search starts at the value that is closest to the suggestion of a learning rate
range test of the row (``efficient-ft lr``), instead of the two middle values. The suggestions are stored in
``lr_tests.json``.

With ``steps: N`` in ``tune``, each run of the search is paused after N optimizer steps. It uses the learning rate
schedule of the whole run, and its accuracy is that of the best epoch so far. A finished run counts in the search with
its epochs up to this step.

The search compares single runs. With ``finalists: {full: [1.0e-4, 3.0e-4]}`` in ``tune``, the row ``full`` is run with
every seed at these values and at the best value of the search. The value with the highest mean accuracy is reported.
This is useful for the row with which all other rows are compared.

The search also uses records that differ from the study only in the settings that are listed under ``ignore`` in
``tune``. For example, with ``ignore: [trainer.precision]``, a study in fp32 can use a search in bf16, but reports only
runs in fp32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, Any, NotRequired

from filelock import FileLock
from pydantic import Discriminator, Tag, TypeAdapter, ValidationError
from typing_extensions import TypedDict  # Before Python 3.12, pydantic rejects typing.TypedDict.

from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import FORMAT, check_format
from efficient_ft.record.results import (
    CorrectSamples,
    ExecutedCost,
    MeasuredCost,
    Results,
    RunTotals,
    final_accuracy,
    images_digest,
)
from efficient_ft.record.rows import MetricsFile
from efficient_ft.record.study_definition import DEFINITION, read_study, setting_of
from efficient_ft.record.study_start import SearchStarts

RECORDS = "records.json"

#: Maximum difference from the best accuracy (as a fraction) for values whose neighbors are also run.
NEAR = 0.01

#: Entries of `record.environment` in the record of a run.
_ENVIRONMENT = ("date", "efficient_ft", "commit", "torch", "device", "threads")

_DO = "Restore the file from a backup or from version control, or rename the file to start again."


class _Run(TypedDict):
    row: str
    value: float
    seed: int
    settings: list[str]


class _Diverged(_Run):
    diverged: str


class EpochPoint(TypedDict):
    """Mean training loss of an epoch, and the accuracy after the epoch on the split that selects the best epoch."""

    epoch: int
    loss: float
    accuracy: float


class _Accuracy(TypedDict):
    best: float
    test: NotRequired[float | None]
    metric: NotRequired[str]


class _Paused(_Run):
    paused_at: int
    accuracy: _Accuracy
    curve: NotRequired[list[EpochPoint]]


class _Finished(_Run):
    accuracy: _Accuracy
    executed: ExecutedCost
    measured: MeasuredCost
    totals: RunTotals
    growth_bytes: NotRequired[int]
    correct: NotRequired[CorrectSamples]
    curve: NotRequired[list[EpochPoint]]


def _kind(run: Any) -> str:
    keys = run if isinstance(run, dict) else ()
    return "_Diverged" if "diverged" in keys else "_Paused" if "paused_at" in keys else "_Finished"


#: Schema of the runs in records.json: settings, and the results, the accuracy of a paused run of the search, or the
#: reason why a run diverged.
_RECORDS: TypeAdapter[Any] = TypeAdapter(
    list[
        Annotated[
            Annotated[_Diverged, Tag("_Diverged")]
            | Annotated[_Paused, Tag("_Paused")]
            | Annotated[_Finished, Tag("_Finished")],
            Discriminator(_kind),
        ]
    ]
)


@dataclass(frozen=True)
class StudyRun:
    """A run of a study: row, value of the tuned setting, seed, and arguments without machine-specific settings.

    The run is paused after `steps` optimizer steps, unless `steps` is None.
    """

    row: str
    value: float
    seed: int
    arguments: tuple[str, ...]
    steps: int | None = None


class Records:
    """Records of the finished runs of the study in `folder`. A `UserError` is raised if a file is damaged."""

    def __init__(self, folder: Path) -> None:
        self.study, self.path = read_study(folder), folder / RECORDS
        self.runs = self._read()
        self.starts = SearchStarts(folder)

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        try:
            held = parse_json(self.path.read_text(encoding="utf-8"))
            version = held.get("format")
        except (ValueError, AttributeError) as error:
            raise UserError(f"The file {self.path} is damaged ({error}). {_DO}") from error
        check_format(self.path, version, "Rename the file to start again.")
        runs = held.get("runs")
        try:
            _RECORDS.validate_python(runs)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"] if part not in ("_Finished", "_Paused", "_Diverged"))
            raise UserError(f"The file {self.path} is damaged (runs.{where}: {first['msg']}). {_DO}") from error
        assert isinstance(runs, list)
        return runs

    def add(self, run: StudyRun, results: Results, curve: Sequence[EpochPoint] = ()) -> None:
        """Add the record of a finished run with its learning curve `curve`, and write the file.

        Raise a `UserError` if the run used different images.
        """
        self._add(run, {**record_of(run, results), **({"curve": list(curve)} if curve else {})})

    def add_paused(self, run: StudyRun, value: float, curve: Sequence[EpochPoint]) -> None:
        """Add the record of a run that was paused after ``run.steps`` steps, and write the file.

        `value` is the accuracy at the pause, and `curve` contains the finished epochs.
        """
        assert run.steps is not None
        best = max([value, *(point["accuracy"] for point in curve)])
        self._add(run, {**_what(run), "paused_at": run.steps, "accuracy": {"best": best}, "curve": list(curve)})

    def refuse_unwritable(self) -> None:
        """Raise a `UserError` if the folder is not writable. Call this method before training."""
        if not os.access(self.path.parent, os.W_OK):
            raise UserError(
                f"No run can be recorded, because {self.path.parent} is not writable. Copy {DEFINITION} to another"
                " folder."
            )

    def refuse_other_images(self, run: StudyRun, digest: str) -> None:
        """Raise a `UserError` if the images of a run differ from the images of records with the same data settings.

        `digest` is the image digest of the run (`record.results.images_digest`), or "" if the digest is unknown.
        """
        others = [one for one in self.runs if _data_of(one["settings"]) == _data_of(run.arguments)]
        different = [one for one in others if digest and one.get("images") not in (None, "", digest)]
        if different:
            raise UserError(
                f"The images of {run.row} {self.study.tune.setting}={shown(run.value)} seed={run.seed} (data.root)"
                f" differ from the images of {len(different)} of the records in {self.path}. Use the same images, or"
                f" copy {DEFINITION} to another folder."
            )

    def add_diverged(self, run: StudyRun, reason: str) -> None:
        """Add the record of a run whose loss was not finite, and write the file."""
        self._add(run, {**_what(run), "diverged": reason})

    def _add(self, run: StudyRun, record: dict[str, Any]) -> None:
        # The file is locked, because another process may run other rows of the same study.
        with FileLock(self.path.with_name(f".{RECORDS}.lock")):
            self.runs = [one for one in self._read() if not _describes(one, run)]
            self.refuse_other_images(run, record.get("images", ""))
            self.runs.append(record)
            order = {name: place for place, name in enumerate(self.study.rows)}
            self.runs.sort(key=lambda one: (order.get(one["row"], len(order)), one["value"], one["seed"]))
            lines = ",\n".join(json_text(one) for one in self.runs)
            write_text_atomically(self.path, f'{{"format": {FORMAT}, "runs": [\n{lines}\n]}}\n')

    def find(self, run: StudyRun) -> dict[str, Any] | None:
        """Return the record of `run`, or None if no run with exactly the same settings has finished."""
        return next((one for one in self.runs if _describes(one, run)), None)

    def of_the_search(self, run: StudyRun) -> dict[str, Any] | None:
        """Return the record that the search uses for `run`, or None if there is no such record.

        The record may differ from `run` in ignored settings.
        """
        for ignored in ((), self.study.tune.ignore):
            for same in (run, replace(run, steps=None)):
                if (record := next((one for one in self.runs if _describes(one, same, ignored)), None)) is not None:
                    return record
        return None

    def of_the_search_alone(self) -> int:
        """Return the number of records that are used only by the search, because they differ in ignored settings."""
        searched = [run for row in self.study.rows for run in self._searched(row)]
        found = [(run, self.of_the_search(run)) for run in searched]
        return sum(record is not None and record["settings"] != list(run.arguments) for run, record in found)

    def of_other_settings(self) -> int:
        """Return the number of records that are not used, because the study no longer contains their settings."""
        rows, values = self.study.rows, self.study.tune.values
        used = [self.of_the_search(run) for row in rows for run in self._searched(row)]
        used += [self.find(self.run(row, value, seed)) for row in rows for value in values for seed in self.study.seeds]
        return len(self.runs) - len({id(record) for record in used if record is not None})

    def tuning_runs(self, rows: Iterable[str]) -> list[StudyRun]:
        """Return the next runs of the search for all rows that are not tuned yet."""
        return [run for row in rows for run in self._search(row)[1]]

    def tested(self, row: str) -> tuple[str, ...]:
        """Return the settings of the learning rate range test of a row."""
        return (*self.study.settings, *self.study.rows[row], f"seed={self.study.tune.seed}")

    def untested(self, rows: Iterable[str]) -> list[str]:
        """Return the rows that require a learning rate range test, because their search has not started yet."""
        if self.study.tune.start != "lr_test":
            return []
        new = [row for row in rows if not any(map(self.of_the_search, self._searched(row)))]
        return [row for row in new if not self.starts.has(row, self.tested(row))]

    def seed_runs(self, rows: Iterable[str]) -> list[StudyRun]:
        """Return the runs of each tuned row at the best value of the search and at the finalists, one for each seed."""
        values = {row: self.finalists(row) for row in rows}
        # The outer loop is over seeds, so that an interrupted study compares all rows over the same seeds.
        return [self.run(row, value, seed) for seed in self.study.seeds for row in values for value in values[row]]

    def finalists(self, row: str) -> list[float]:
        """Return the values of `row` that are run with every seed.

        The list contains the best value of the search and the finalists of the study. It is empty if the row is not
        tuned yet or all of the runs diverged.
        """
        best, missing = self._search(row)
        return [] if missing or best is None else sorted({best, *self.study.tune.finalists.get(row, ())})

    def best_value(self, row: str) -> float | None:
        """Return the most accurate value of `row`, or None if the row is not tuned yet or all of the runs diverged.

        If there are several finalists and all of their runs have finished, their mean accuracies are compared.
        """
        values = self.finalists(row)
        means = {value: mean for value in values if (mean := self._mean(row, value)) is not None}
        if len(values) > 1 and len(means) == len(values):
            return max(means, key=lambda value: means[value])
        return self._search(row)[0] if values else None

    def _mean(self, row: str, value: float) -> float | None:
        """Return the mean accuracy over the seeds, or None if a run is missing.

        The accuracy is that on the split that selects the best epoch. The result is -inf if a run has diverged.
        """
        records = [self.find(self.run(row, value, seed)) for seed in self.study.seeds]
        found = [record.get("accuracy", {"best": -math.inf})["best"] for record in records if record is not None]
        return sum(found) / len(found) if len(found) == len(records) else None

    def _search(self, row: str) -> tuple[float | None, list[StudyRun]]:
        """Return the best value so far, or None if all runs diverged, and the next runs of the search.

        If several values have the same accuracy, the lowest of them is the best value.
        """
        values, runs = self.study.tune.values, self._searched(row)
        records = [self.of_the_search(run) for run in runs]
        best = [-math.inf if record is None else self._accuracy(record) for record in records]
        middle, start = len(values) // 2, None
        if self.study.tune.start == "lr_test":
            start = self.starts.index(row, self.tested(row), values)
        needed = list(range(max(middle - 1, 0), middle + 1)) if start is None else [start]
        if all(records[i] for i in needed):
            top = best.index(max(best))
            if best[top] == -math.inf:  # All runs so far diverged. Only runs at lower values may converge.
                top = min(i for i, record in enumerate(records) if record)
            near = [i for i, found in enumerate(best) if i == top or found >= max(best) - NEAR > -math.inf]
            needed = sorted({j for i in near for j in (i - 1, i, i + 1) if 0 <= j < len(values)})
        top = best.index(max(best))
        return values[top] if best[top] > -math.inf else None, [runs[i] for i in needed if records[i] is None]

    def _searched(self, row: str) -> list[StudyRun]:
        tune = self.study.tune
        return [replace(self.run(row, value, tune.seed), steps=tune.steps) for value in tune.values]

    def _accuracy(self, record: Mapping[str, Any]) -> float:
        """Return the accuracy that the search compares: that of the best epoch up to ``tune.steps``.

        If the first epoch ends later, its accuracy is used.
        """
        steps = self.study.tune.steps
        if "accuracy" not in record:
            return -math.inf
        if steps is None or "paused_at" in record or not record.get("curve"):
            return float(record["accuracy"]["best"])
        curve = record["curve"]
        epochs = max(1, steps * len(curve) // record["totals"]["steps"])
        return max(point["accuracy"] for point in curve[:epochs])

    def finished(self, row: str) -> list[dict[str, Any]]:
        """Return the records of `row` at the best value, one for each seed.

        The list is empty if the row is not tuned yet.
        """
        best = self.best_value(row)
        records = [] if best is None else [self.find(self.run(row, best, seed)) for seed in self.study.seeds]
        return [record for record in records if record is not None and "accuracy" in record]

    def run(self, row: str, value: float, seed: int) -> StudyRun:
        """Return the run of a row with a value of the tuned setting and the current settings of the study."""
        tuned = f"{self.study.tune.setting}={shown(value)}"
        arguments = (*self.study.settings, *self.study.rows[row], tuned, f"seed={seed}")
        return StudyRun(row, value, seed, arguments)


def shown(value: float) -> str:
    """Format a value for the command line at full precision. Integers are formatted without a decimal point."""
    return str(int(value)) if value.is_integer() else repr(value)


def _describes(record: Mapping[str, Any], run: StudyRun, ignored: Sequence[str] = ()) -> bool:
    """Return True if `record` is the record of `run`. The settings in `ignored` may differ."""
    if (record["row"], record["value"], record["seed"]) != (run.row, run.value, run.seed):
        return False
    if "diverged" not in record and record.get("paused_at") != run.steps:
        return False
    both = record["settings"], run.arguments
    recorded, given = ([one for one in settings if setting_of(one) not in ignored] for settings in both)
    return recorded == given


def _data_of(arguments: Iterable[str]) -> list[str]:
    return [one for one in arguments if one.lstrip("+").startswith(("data", "tasks"))]


def record_of(run: StudyRun, results: Results) -> dict[str, Any]:
    """Return the record of a finished run with settings, accuracy, cost, totals and environment, but without paths."""
    environment: Mapping[str, Any] = results["environment"]
    cost = results["cost"]
    metric = {"metric": results["accuracy"]["metric"]} if "metric" in results["accuracy"] else {}
    growth = {"growth_bytes": results["memory"]["growth_bytes"]} if "memory" in results else {}
    correct = results["data"].get("correct", {}).get("test")
    return {
        **_what(run),
        "accuracy": {**{key: results["accuracy"].get(key) for key in ("best", "last", "split", "test")}, **metric},
        "executed": dict(cost["executed"]),
        "measured": dict(cost["measured"]),
        "totals": dict(results["totals"]),
        **growth,
        **({} if correct is None else {"correct": correct}),
        "trainable_parameters": results["trainable_parameters"],
        "total_parameters": results["total_parameters"],
        "images": images_digest(results["data"]),
        "environment": {key: environment.get(key) for key in _ENVIRONMENT},
    }


def curve_of(folder: Path, accuracy: Mapping[str, Any]) -> list[EpochPoint]:
    """Return one point for each finished epoch of the run in `folder`, or [] if the run has no metrics file.

    `accuracy` contains the names of the split and of the metric, as in ``results.json``.
    """
    name = f"{accuracy['split']}_{accuracy.get('metric', 'accuracy')}"
    epochs = [row for row in MetricsFile(folder).read() if "train_loss_epoch" in row]
    return [
        EpochPoint(epoch=row["epoch"], loss=round(row["train_loss_epoch"], 5), accuracy=round(row[name], 5))
        for row in epochs
        if name in row
    ]


def test_accuracy(record: Mapping[str, Any]) -> float:
    """Return the accuracy of a record in percent (see `final_accuracy`)."""
    return 100 * final_accuracy(record["accuracy"])


def _what(run: StudyRun) -> dict[str, Any]:
    return {"row": run.row, "value": run.value, "seed": run.seed, "settings": list(run.arguments)}
