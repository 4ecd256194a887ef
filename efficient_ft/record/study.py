"""A study: methods compared on one network and data set, each at the best value of one setting, over several seeds.

A study is a folder with two files. ``study.yaml`` says what is run:

.. code-block:: yaml

    title: DeiT-Tiny on Caltech-101
    settings: [model=deit_tiny, data=folder]      # of every run
    tune: {setting: optim.lr, values: [1.0e-4, 3.0e-4, 1.0e-3, 3.0e-3], seed: 0}
    seeds: [0, 1, 2]
    rows:                                         # a name, and the settings of the row
      full: [method=full]
      head: [method=head]

Every row's value is searched for in the same way, with the seed of ``tune``: the two values in the middle are run, then
the neighbors of the best one and of those within a point of it (`NEAR`), until all of them have been run. Best is the
accuracy on the split that chooses epochs.
The value found is then run with the other seeds. ``records.json`` holds a record of every finished run, without paths,
so that a study goes on where it stopped, also on another machine.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from filelock import FileLock
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator

from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.formats import FORMAT, check_format
from efficient_ft.record.results import Results, final_accuracy, images_digest

DEFINITION, RECORDS = "study.yaml", "records.json"

#: Accuracy below the best within which a value is as good as the best: its neighbors are searched as well.
NEAR = 0.01

#: What every record of a run has.
_KEYS = {"row", "value", "seed", "settings"}

#: What the record of a run that did not diverge has too.
_FOUND = {"accuracy", "executed", "measured", "totals"}

_DO = "Restore it from a backup or from version control, or rename it to begin again."


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tune(_Strict):
    """The setting that is tuned for every row: the values that are searched, with `seed`."""

    setting: str
    values: list[float] = Field(min_length=1)
    seed: int

    @field_validator("values")
    @classmethod
    def _ascending(cls, values: list[float]) -> list[float]:
        return sorted(set(values))


class Study(_Strict):
    """Contents of study.yaml."""

    title: str
    about: str = ""
    settings: list[str]
    tune: Tune
    seeds: list[int] = Field(min_length=1)
    rows: dict[str, list[str]] = Field(min_length=1)


@dataclass(frozen=True)
class StudyRun:
    """One run of a study.

    Attributes:
        row: name of its row.
        value: of the tuned setting.
        seed: of the run.
        arguments: of its command line, without those that only hold on this machine.
    """

    row: str
    value: float
    seed: int
    arguments: tuple[str, ...]


def read_study(folder: Path) -> Study:
    """Read study.yaml in `folder`.

    Raises:
        UserError: there is none, or it cannot be read.
    """
    file = folder / DEFINITION
    try:
        return Study.model_validate(yaml.safe_load(file.read_text(encoding="utf-8")))
    except OSError:
        raise UserError(f"{folder} holds no {DEFINITION}. Pass the folder of a study.") from None
    except yaml.YAMLError as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"])) or "it"
        said = "must be a mapping" if not first["loc"] else f"{first['msg']}"
        raise UserError(f"{file} cannot be read: {where}: {said}.") from error


def chosen_rows(study: Study, names: Sequence[str]) -> list[str]:
    """Return the rows with these names, in the study's order; all if there are none.

    Raises:
        UserError: the study has no row of one of the names.
    """
    for name in names:
        if name not in study.rows:
            known = ", ".join(study.rows)
            raise UserError(f"row must be one of {known}, got {name}.{did_you_mean(name, study.rows)}")
    return [name for name in study.rows if not names or name in names]


class Records:
    """The records of a study's finished runs.

    Args:
        folder: of the study.

    Raises:
        UserError: records.json is damaged, or of another version.
    """

    def __init__(self, folder: Path) -> None:
        self.study, self.path = read_study(folder), folder / RECORDS
        self.runs = self._read()

    def _read(self) -> list[dict[str, Any]]:
        if not self.path.is_file():
            return []
        try:
            held = json.loads(self.path.read_text(encoding="utf-8"))
            version = held.get("format")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.path} is damaged ({error}). {_DO}") from error
        check_format(self.path, version, "Rename it to begin again.")
        runs = held.get("runs")
        if not isinstance(runs, list) or not all(_complete(run) for run in runs):
            keys = ", ".join(sorted(_KEYS | _FOUND))
            raise UserError(f"{self.path} is damaged (runs without {keys}). {_DO}")
        return runs

    def add(self, run: StudyRun, results: Results) -> None:
        """Add the record of a finished run, and write the file.

        Raises:
            UserError: its images are not those of the other records.
        """
        record = record_of(run, results)
        now = self.study.settings
        others = [one["images"] for one in self.runs if one.get("images") and one["settings"][: len(now)] == now]
        if record["images"] and any(images != record["images"] for images in others):
            raise UserError(
                f"The images of {run.row} {self.study.tune.setting}={run.value:g} seed={run.seed} (data.root) are not"
                f" those of the {len(others)} records in {self.path}, so that it is not recorded there. Use the same"
                f" images, or a folder of its own with a copy of {DEFINITION}."
            )
        self._add(run, record)

    def add_diverged(self, run: StudyRun, reason: str) -> None:
        """Add the record of a run whose loss was not finite, and write the file."""
        self._add(run, {**_what(run), "diverged": reason})

    def _add(self, run: StudyRun, record: dict[str, Any]) -> None:
        key = _what(run)
        # Another process may work on other rows of the same study.
        with FileLock(self.path.with_name(f".{RECORDS}.lock")):
            self.runs = [one for one in self._read() if {name: one[name] for name in key} != key]
            self.runs.append(record)
            order = {name: place for place, name in enumerate(self.study.rows)}
            self.runs.sort(key=lambda one: (order.get(one["row"], len(order)), one["value"], one["seed"]))
            lines = ",\n".join(json.dumps(one) for one in self.runs)
            write_text_atomically(self.path, f'{{"format": {FORMAT}, "runs": [\n{lines}\n]}}\n')

    def find(self, run: StudyRun) -> dict[str, Any] | None:
        """The record of `run`; None: it has not finished, or not with the settings that the study now has."""
        key = _what(run)
        return next((one for one in self.runs if {name: one[name] for name in key} == key), None)

    def of_other_settings(self) -> int:
        """The number of records of settings that the study has no more; they are kept, and do not count."""
        study = self.study
        now = {row: {self.run(row, value, seed).arguments for value in study.tune.values
                     for seed in (study.tune.seed, *study.seeds)} for row in study.rows}  # fmt: skip
        return sum(tuple(one["settings"]) not in now.get(one["row"], ()) for one in self.runs)

    def tuning_runs(self, rows: Iterable[str]) -> list[StudyRun]:
        """The runs with which the search of each row goes on; none for the rows that are tuned."""
        return [run for row in rows for run in self._search(row)[1]]

    def seed_runs(self, rows: Iterable[str]) -> list[StudyRun]:
        """The runs of the best value with every seed, for the rows that are tuned."""
        best = {row: self.best_value(row) for row in rows}
        # Seed by seed: an interrupted study compares all rows over the same seeds.
        return [
            self.run(row, value, seed) for seed in self.study.seeds for row, value in best.items() if value is not None
        ]

    def best_value(self, row: str) -> float | None:
        """The value with which `row` is most accurate on the split that chose the epoch.

        None: it is not tuned yet, or diverged with every value.
        """
        best, missing = self._search(row)
        return None if missing else best

    def _search(self, row: str) -> tuple[float | None, list[StudyRun]]:
        """The best value so far (the lowest of equals; None: diverged with every one), and the runs to do next."""
        values, seed = self.study.tune.values, self.study.tune.seed
        runs = [self.run(row, value, seed) for value in values]
        records = [self.find(run) for run in runs]
        best = [-1.0 if r is None or "accuracy" not in r else float(r["accuracy"]["best"]) for r in records]
        middle = len(values) // 2
        needed = list(range(max(middle - 1, 0), middle + 1))
        if all(records[i] for i in needed):
            top = best.index(max(best))
            if best[top] < 0:  # Only lower values may converge.
                top = min(i for i, record in enumerate(records) if record)
            near = [i for i, found in enumerate(best) if i == top or found >= max(best) - NEAR >= 0]
            needed = sorted({j for i in near for j in (i - 1, i, i + 1) if 0 <= j < len(values)})
        top = best.index(max(best))
        return values[top] if best[top] >= 0 else None, [runs[i] for i in needed if records[i] is None]

    def finished(self, row: str) -> list[dict[str, Any]]:
        """The records of `row` at its best value, one per seed; [] while it is not tuned."""
        runs = self.seed_runs([row])
        found = [self.find(run) for run in runs]
        return [record for record in found if record is not None and "accuracy" in record]

    def run(self, row: str, value: float, seed: int) -> StudyRun:
        """The run of a row at a value of the tuned setting, with the settings that the study now has."""
        tuned = f"{self.study.tune.setting}={value:g}"
        arguments = (*self.study.settings, *self.study.rows[row], tuned, f"seed={seed}")
        return StudyRun(row, value, seed, arguments)


def _complete(run: Any) -> bool:
    return isinstance(run, dict) and run.keys() >= _KEYS and ("diverged" in run or run.keys() >= _FOUND)


def record_of(run: StudyRun, results: Results) -> dict[str, Any]:
    """The record of a finished run: what was set, accuracy, cost, totals, and where it ran; no paths."""
    environment: Mapping[str, Any] = results["environment"]
    cost = results["cost"]
    return {
        **_what(run),
        "accuracy": {key: results["accuracy"].get(key) for key in ("best", "last", "split", "test")},
        "executed": dict(cost["executed"]),
        "measured": dict(cost["measured"]),
        "totals": dict(results["totals"]),
        "trainable_parameters": results["trainable_parameters"],
        "total_parameters": results["total_parameters"],
        "images": images_digest(results["data"]),
        "environment": {key: environment.get(key) for key in ("date", "efficient_ft", "torch", "device", "threads")},
    }


def test_accuracy(record: Mapping[str, Any]) -> float:
    """Percent on the test images; without any, on the split that chose the epoch."""
    return 100 * final_accuracy(record["accuracy"])


def _what(run: StudyRun) -> dict[str, Any]:
    return {"row": run.row, "value": run.value, "seed": run.seed, "settings": list(run.arguments)}
