"""Definition of a study, which is read from ``study.yaml``. `record.study` describes the file and the search."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any, Literal

import pydantic
import yaml
from pydantic import BaseModel, ConfigDict, Field, StrictInt, ValidationError

from efficient_ft.config.explain import mistake
from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.parsing import parse_yaml

DEFINITION = "study.yaml"


class _UniqueKeys(yaml.SafeLoader):
    """YAML loader that raises an error for a duplicate key in a mapping. By default, PyYAML keeps the last value."""

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        seen: set[Any] = set()
        for key_node, _ in node.value:
            key = self.construct_object(key_node, deep=True)
            if key in seen:
                raise yaml.constructor.ConstructorError(None, None, f"{key} occurs twice", key_node.start_mark)
            seen.add(key)
        return super().construct_mapping(node, deep)


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Tune(_Strict):
    """The tuned setting and the values to search. The runs of the search use the seed `seed`.

    The search ignores differences in the settings listed in `ignore`. It starts at the middle values, or at the
    suggestion of a learning rate range test. If `steps` is given, each run of the search is paused after this number of
    optimizer steps. Values in `finalists` are compared over all seeds.
    """

    setting: str
    values: Annotated[list[float], Field(min_length=1), pydantic.AfterValidator(lambda values: sorted(set(values)))]
    seed: StrictInt
    ignore: list[str] = []
    start: Literal["middle", "lr_test"] = "middle"
    steps: Annotated[StrictInt, Field(ge=1)] | None = None
    finalists: dict[str, Annotated[list[float], Field(min_length=1)]] = {}

    @pydantic.field_validator("values", mode="before")
    @classmethod
    def _numbers(cls, values: Any) -> Any:
        if isinstance(values, list) and any(isinstance(value, bool) for value in values):
            raise ValueError("all values must be numbers, got a Boolean")
        if isinstance(values, list) and any(isinstance(value, float) and not math.isfinite(value) for value in values):
            raise ValueError("all values must be finite numbers")
        return values


class Study(_Strict):
    """Contents of study.yaml. Rows may differ in their methods, and in the settings that are listed in `vary`."""

    title: str
    about: str = ""
    vary: list[str] = []
    settings: list[str]
    tune: Tune
    seeds: Annotated[
        list[StrictInt], Field(min_length=1), pydantic.AfterValidator(lambda seeds: list(dict.fromkeys(seeds)))
    ]
    rows: dict[str, list[str]] = Field(min_length=1)

    @property
    def sample(self) -> str:
        """Return the noun for a sample of the data set, which is ``image`` or ``text``."""
        return "text" if "task=text" in self.settings else "image"

    @pydantic.model_validator(mode="after")
    def _no_clash(self) -> Study:
        groups = {"settings": self.settings, **{f"row {name}": own for name, own in self.rows.items()}}
        for where, arguments in groups.items():
            keys = [setting_of(argument) for argument in arguments]
            if twice := next((key for key in keys if keys.count(key) > 1), None):
                raise ValueError(f"{where} sets {twice} twice. Remove one of the two values")
            for argument in arguments:
                # Hydra settings can name functions to call, and command-line options can name folders of such settings.
                if setting_of(argument).startswith(("hydra", "-")):
                    raise ValueError(f"{where} sets {argument}, but a study may contain only settings of runs")
                if setting_of(argument) in ("seed", self.tune.setting):
                    raise ValueError(
                        f"{where} sets {argument}. Remove this setting, because the study sets its value for each run"
                    )
        for where, arguments in groups.items():
            for key in map(setting_of, arguments) if where != "settings" else ():
                if not (key == "method" or key.startswith("method.") or key in self.vary):
                    raise ValueError(
                        f"{where} sets {key}, but the rows of a study differ only in their methods. Set {key} for all"
                        f" rows in settings, or list {key} in vary if the study compares values of {key}"
                    )
        for other, name in itertools.combinations(self.rows, 2):
            if self.rows[name] == self.rows[other]:
                raise ValueError(f"the rows {other} and {name} have the same settings")
        return self

    @pydantic.model_validator(mode="after")
    def _consistent_search(self) -> Study:
        if setting_of(self.tune.setting).startswith(("hydra", "-")):
            raise ValueError(f"tune.setting is {self.tune.setting}, but a study may contain only settings of runs")
        if self.tune.start == "lr_test" and (self.tune.setting != "optim.lr" or self.tune.values[0] <= 0):
            raise ValueError("tune.start: lr_test requires setting: optim.lr and positive values")
        if same := sorted({"seed", self.tune.setting} & set(self.tune.ignore)):
            raise ValueError(f"tune.ignore names {same[0]}, which the study sets for each run. Remove this entry")
        for row, values in self.tune.finalists.items():
            if row not in self.rows:
                raise ValueError(f"tune.finalists names {row}, but the rows are {', '.join(self.rows)}")
            if unknown := [value for value in values if value not in self.tune.values]:
                raise ValueError(f"tune.finalists.{row} contains {unknown[0]:g}, which is not one of tune.values")
        return self


def setting_of(argument: str) -> str:
    """Return the name of the setting in a command-line argument, for example ``optim.lr`` for ``+optim.lr=0.1``."""
    return argument.partition("=")[0].lstrip("+~")


def read_study(folder: Path) -> Study:
    """Read study.yaml in `folder`. Raise a `UserError` if the file does not exist or cannot be read."""
    file, plain = folder / DEFINITION, None
    try:
        plain = parse_yaml(file.read_text(encoding="utf-8"), _UniqueKeys)  # _UniqueKeys is a SafeLoader.
        return Study.model_validate(plain)
    except (FileNotFoundError, NotADirectoryError):
        raise UserError(f"The folder {folder} contains no {DEFINITION}. Pass the folder of a study.") from None
    except OSError as error:
        raise UserError(f"The file {file} cannot be read: {error.strerror}.") from error
    except ValidationError as error:
        raise UserError(f"The file {file} cannot be used: {_said(plain, error)}") from error
    except ValueError as error:
        raise UserError(f"The file {file} cannot be read: {' '.join(str(error).split())}") from error


def _said(plain: Any, error: ValidationError) -> str:
    """Return a sentence about the first mistake in the contents `plain` of a study.yaml."""
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
            return f"{where}: a name must be a string. Put the name in quotes."
    return str(mistake(Study, plain, "", first["loc"], first["type"]))


def chosen_rows(study: Study, names: Sequence[str]) -> list[str]:
    """Return the selected rows (default: all) in the order of the study. Raise a `UserError` for unknown names."""
    for name in names:
        if name not in study.rows:
            known = ", ".join(study.rows)
            raise UserError(f"row must be one of {known}, got {name}.{did_you_mean(name, study.rows)}")
    return [name for name in study.rows if not names or name in names]
