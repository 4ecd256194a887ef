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

The value of every row is searched in the same way, with the seed of ``tune``: the two values in the middle run first,
then the neighbors of the best one and of those within a point of it (`NEAR`), until all of them have been run. Best is
the accuracy on the split that chooses epochs. The value found is then run with every seed. ``records.json`` holds a
record of every finished run, without paths, so that a study continues where it stopped, even on another machine.

``tune`` may name settings to ``ignore``: records that differ from the study in these alone count in the search, and
nowhere else. With ``ignore: [trainer.precision]`` a study in fp32 takes values that were found in bf16, and every run
that it reports is in fp32.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, NotRequired

import yaml
from filelock import FileLock
from pydantic import (
    BaseModel,
    ConfigDict,
    Discriminator,
    Field,
    StrictInt,
    Tag,
    TypeAdapter,
    ValidationError,
    field_validator,
    model_validator,
)
from typing_extensions import TypedDict  # pydantic needs this one below Python 3.12

from efficient_ft.config.explain import mistake
from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.parsing import parse_json, parse_yaml
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import FORMAT, check_format
from efficient_ft.record.results import ExecutedCost, MeasuredCost, Results, RunTotals, final_accuracy, images_digest

DEFINITION, RECORDS = "study.yaml", "records.json"

#: Accuracy below the best within which a value is as good as the best: its neighbors are searched as well.
NEAR = 0.01

_DO = "Restore it from a backup or from version control, or rename it to begin again."


class _UniqueKeys(yaml.SafeLoader):
    """Refuses a key that stands twice in a mapping, of which YAML's own loader keeps the last."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """The mapping of `node`."""
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} is there twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class _Run(TypedDict):
    row: str
    value: float
    seed: int
    settings: list[str]


class _Diverged(_Run):
    diverged: str


class _Accuracy(TypedDict):
    best: float
    test: NotRequired[float | None]
    metric: NotRequired[str]


class _Finished(_Run):
    accuracy: _Accuracy
    executed: ExecutedCost
    measured: MeasuredCost
    totals: RunTotals
    growth_bytes: NotRequired[int]


#: What is read of records.json: what was run, and what it found or why it diverged.
_RECORDS: TypeAdapter[Any] = TypeAdapter(
    list[
        Annotated[
            Annotated[_Diverged, Tag("_Diverged")] | Annotated[_Finished, Tag("_Finished")],
            Discriminator(lambda run: "_Diverged" if isinstance(run, dict) and "diverged" in run else "_Finished"),
        ]
    ]
)


class Tune(_Strict):
    """The setting that is tuned for every row: the values that are searched, with `seed`.

    Records that differ in the settings of `ignore` alone count in the search.
    """

    setting: str
    values: list[float] = Field(min_length=1)
    seed: StrictInt
    ignore: list[str] = []

    @field_validator("values", mode="before")
    @classmethod
    def _numbers(cls, values: Any) -> Any:
        if isinstance(values, list) and any(isinstance(value, bool) for value in values):
            raise ValueError("must be numbers, got a truth value")
        if isinstance(values, list) and any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise ValueError("must be finite numbers")
        return values

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
    seeds: list[StrictInt] = Field(min_length=1)
    rows: dict[str, list[str]] = Field(min_length=1)

    @property
    def sample(self) -> str:
        """A sample in a word: image or text."""
        return "text" if "task=text" in self.settings else "image"

    @field_validator("seeds")
    @classmethod
    def _once(cls, seeds: list[int]) -> list[int]:
        return list(dict.fromkeys(seeds))

    @model_validator(mode="after")
    def _no_clash(self) -> Study:
        for where, arguments in {
            "settings": self.settings,
            **{f"row {name}": own for name, own in self.rows.items()},
        }.items():
            keys = [_key(argument) for argument in arguments]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"{where} sets {twice} twice; leave one of them out")
            for argument in arguments:
                # Settings of Hydra name functions that it calls, and options of the program folders with such settings.
                if _key(argument).startswith(("hydra", "-")):
                    raise ValueError(f"{where} sets {argument}: a study has settings of runs only; leave it out")
                if _key(argument) in ("seed", self.tune.setting):
                    raise ValueError(f"{where} sets {argument}, which the study sets for each run; leave it out")
        if _key(self.tune.setting).startswith(("hydra", "-")):
            raise ValueError(f"tune.setting is {self.tune.setting}: a study has settings of runs only")
        if same := sorted({"seed", self.tune.setting} & set(self.tune.ignore)):
            raise ValueError(f"tune.ignore names {same[0]}, which the study sets for each run; leave it out")
        rows = list(self.rows)
        for i, name in enumerate(rows):
            for other in rows[:i]:
                if self.rows[name] == self.rows[other]:
                    raise ValueError(f"rows {other} and {name} have the same settings")
        return self


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
    file, plain = folder / DEFINITION, None
    try:
        plain = parse_yaml(file.read_text(encoding="utf-8"), _UniqueKeys)  # a SafeLoader
        return Study.model_validate(plain)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"{folder} holds no {DEFINITION}. Pass the folder of a study.") from None
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        raise UserError(f"{file} cannot be used: {_said(plain, error)}") from error
    except ValueError as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from error


def _said(plain: Any, error: ValidationError) -> str:
    """The sentence for the first mistake in the contents `plain` of a study.yaml."""
    first = error.errors(include_url=False)[0]
    if not isinstance(plain, dict):
        return "it must be a mapping."
    where = ".".join(str(part) for part in first["loc"] if part != "[key]")
    match first["type"]:
        case "value_error":
            return f"{where + ': ' if where else ''}{first['msg'].removeprefix('Value error, ')}."
        case "missing":
            return f"{where} is missing."
        case "extra_forbidden":
            known = Tune.model_fields if first["loc"][0] == "tune" else Study.model_fields
            return f"{where} is not an entry of a study.{did_you_mean(str(first['loc'][-1]), known)}"
        case "string_type" if first["loc"][-1] == "[key]":
            return f"{where}: a name must be a string; quote it."
    return str(mistake(Study, plain, "", first["loc"], first["type"]))


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
            held = parse_json(self.path.read_text(encoding="utf-8"))
            version = held.get("format")
        except (ValueError, AttributeError) as error:
            raise UserError(f"{self.path} is damaged ({error}). {_DO}") from error
        check_format(self.path, version, "Rename it to begin again.")
        runs = held.get("runs")
        try:
            _RECORDS.validate_python(runs)
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            where = ".".join(str(part) for part in first["loc"] if part not in ("_Finished", "_Diverged"))
            raise UserError(f"{self.path} is damaged (runs.{where}: {first['msg']}). {_DO}") from error
        assert isinstance(runs, list)
        return runs

    def add(self, run: StudyRun, results: Results) -> None:
        """Add the record of a finished run, and write the file.

        Raises:
            UserError: its images are not those of the other records.
        """
        self._add(run, record_of(run, results))

    def refuse_unwritable(self) -> None:
        """Refuse a folder in which no record can be written, before anything is trained.

        Raises:
            UserError: the folder cannot be written to.
        """
        if not os.access(self.path.parent, os.W_OK):
            raise UserError(
                f"{self.path.parent} cannot be written to, so that no run can be recorded. Copy {DEFINITION} to a"
                " separate folder."
            )

    def refuse_other_images(self, run: StudyRun, digest: str) -> None:
        """Refuse a run on other images than the records of the same data set have.

        Args:
            run: the run.
            digest: of its images (`record.results.images_digest`); empty: unknown.

        Raises:
            UserError: the digests differ.
        """
        others = [one for one in self.runs if _data_of(one["settings"]) == _data_of(run.arguments)]
        different = [one for one in others if digest and one.get("images") not in (None, "", digest)]
        if different:
            raise UserError(
                f"The images of {run.row} {self.study.tune.setting}={shown(run.value)} seed={run.seed} (data.root) are"
                f" not those of {len(different)} records in {self.path}. Use the same images, or a separate folder"
                f" with a copy of {DEFINITION}."
            )

    def add_diverged(self, run: StudyRun, reason: str) -> None:
        """Add the record of a run whose loss was not finite, and write the file."""
        self._add(run, {**_what(run), "diverged": reason})

    def _add(self, run: StudyRun, record: dict[str, Any]) -> None:
        key = _what(run)
        # Another process may work on other rows of the same study.
        with FileLock(self.path.with_name(f".{RECORDS}.lock")):
            self.runs = [one for one in self._read() if {name: one[name] for name in key} != key]
            self.refuse_other_images(run, record.get("images", ""))
            self.runs.append(record)
            order = {name: place for place, name in enumerate(self.study.rows)}
            self.runs.sort(key=lambda one: (order.get(one["row"], len(order)), one["value"], one["seed"]))
            lines = ",\n".join(json_text(one) for one in self.runs)
            write_text_atomically(self.path, f'{{"format": {FORMAT}, "runs": [\n{lines}\n]}}\n')

    def find(self, run: StudyRun) -> dict[str, Any] | None:
        """The record of `run`; None: it has not finished, or not with the settings that the study now has."""
        key = _what(run)
        return next((one for one in self.runs if {name: one[name] for name in key} == key), None)

    def of_the_search(self, run: StudyRun) -> dict[str, Any] | None:
        """The record that counts for `run` in the search: its own, or one that differs in ignored settings alone."""
        if (own := self.find(run)) is not None:
            return own
        ignore = self.study.tune.ignore
        wanted = (run.row, run.value, run.seed, _without(run.arguments, ignore))
        return next(
            (one for one in self.runs
             if (one["row"], one["value"], one["seed"], _without(one["settings"], ignore)) == wanted), None
        )  # fmt: skip

    def of_the_search_alone(self) -> int:
        """The number of records that count in the search and differ in ignored settings."""
        searched = [run for row in self.study.rows for run in self._searched(row)]
        return sum(self.find(run) is None and self.of_the_search(run) is not None for run in searched)

    def of_other_settings(self) -> int:
        """The number of records of settings that the study has no more; they are kept, and do not count."""
        tune = self.study.tune
        counted = [self.of_the_search(run) for row in self.study.rows for run in self._searched(row)]
        counted += [self.find(self.run(row, value, seed)) for row in self.study.rows for value in tune.values
                    for seed in self.study.seeds if seed != tune.seed]  # fmt: skip
        return len(self.runs) - sum(one is not None for one in counted)

    def tuning_runs(self, rows: Iterable[str]) -> list[StudyRun]:
        """Return the next runs of the search of each row; none for tuned rows."""
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
        values, runs = self.study.tune.values, self._searched(row)
        records = [self.of_the_search(run) for run in runs]
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

    def _searched(self, row: str) -> list[StudyRun]:
        return [self.run(row, value, self.study.tune.seed) for value in self.study.tune.values]

    def finished(self, row: str) -> list[dict[str, Any]]:
        """The records of `row` at its best value, one per seed; [] while it is not tuned."""
        runs = self.seed_runs([row])
        found = [self.find(run) for run in runs]
        return [record for record in found if record is not None and "accuracy" in record]

    def run(self, row: str, value: float, seed: int) -> StudyRun:
        """The run of a row at a value of the tuned setting, with the settings that the study now has."""
        tuned = f"{self.study.tune.setting}={shown(value)}"
        arguments = (*self.study.settings, *self.study.rows[row], tuned, f"seed={seed}")
        return StudyRun(row, value, seed, arguments)


def shown(value: float) -> str:
    """A value as on the command line: all its digits, and no fraction for an integer."""
    return str(int(value)) if value.is_integer() else repr(value)


def _without(arguments: Iterable[str], ignored: Sequence[str]) -> tuple[str, ...]:
    """The arguments that set none of the `ignored` settings."""
    return tuple(one for one in arguments if _key(one) not in ignored)


def _key(argument: str) -> str:
    """The setting that an argument of the command line sets."""
    return argument.partition("=")[0].lstrip("+~")


def _data_of(arguments: Iterable[str]) -> list[str]:
    """The arguments that say which images a run trains on."""
    return [one for one in arguments if one.lstrip("+").startswith(("data", "tasks"))]


def record_of(run: StudyRun, results: Results) -> dict[str, Any]:
    """The record of a finished run: what was set, accuracy, cost, totals, and where it ran; no paths."""
    environment: Mapping[str, Any] = results["environment"]
    cost = results["cost"]
    metric = {"metric": results["accuracy"]["metric"]} if "metric" in results["accuracy"] else {}
    growth = {"growth_bytes": results["memory"]["growth_bytes"]} if "memory" in results else {}
    return {
        **_what(run),
        "accuracy": {**{key: results["accuracy"].get(key) for key in ("best", "last", "split", "test")}, **metric},
        "executed": dict(cost["executed"]),
        "measured": dict(cost["measured"]),
        "totals": dict(results["totals"]),
        **growth,
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
