"""Tests that YAML files have the defaults of the constructors and of the schema."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import yaml

from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.config.schema import Config, LoggerConfig, OptimConfig, Section, TrainerConfig
from efficient_ft.core.packages import method_of, option_settings
from efficient_ft.methods import METHODS

#: Files of methods and variants. A file with the name of a method lists all settings of the method.
METHOD_FILES = sorted((CONF / "method").glob("*.yaml"))


def plain(value: Any) -> Any:
    return list(value) if isinstance(value, tuple) else value


@pytest.mark.parametrize("file", METHOD_FILES, ids=lambda file: file.stem)
def test_a_method_s_file_has_the_defaults_of_its_constructor(file: Any) -> None:
    name = method_of(file)
    assert name is not None
    constructor = inspect.signature(METHODS[name]).parameters
    own = yaml.safe_load(file.read_text(encoding="utf-8")) or {}
    if file.stem == name:
        own.pop("select", None)
        # The file contains ??? for a setting without a default, and may refer to another setting.
        defaults = {key: "???" if p.default is p.empty else plain(p.default) for key, p in constructor.items()}
        defaults |= {key: value for key, value in own.items() if key in defaults and str(value).startswith("${")}
        assert own == defaults
        return
    assert own.pop("defaults") == [name, "_self_"]
    assert own, "a variant differs from the method"
    for key, value in own.items():
        assert value != option_settings(CONF / "method" / f"{name}.yaml")[key], f"{key} is the default; leave it out"


def values(file: str) -> dict[str, Any]:
    return dict(yaml.safe_load((CONF / file).read_text(encoding="utf-8")))


@pytest.mark.parametrize(
    ("file", "section", "differs"),
    [
        ("optim/adamw.yaml", OptimConfig, {"name", "lr"}),
        ("optim/adam.yaml", OptimConfig, {"name", "lr", "weight_decay"}),
        ("optim/sgd.yaml", OptimConfig, {"name", "lr", "weight_decay"}),
        ("trainer/default.yaml", TrainerConfig, {"epochs"}),
        ("logger/none.yaml", LoggerConfig, set()),
    ],
)
def test_a_file_of_a_section_has_the_defaults_of_the_schema(
    file: str, section: type[Section], differs: set[str]
) -> None:
    given = values(file)
    defaults = section.model_construct().model_dump()
    assert {key for key, value in given.items() if plain(defaults.get(key)) != value} == differs
    owned = {"sgd": {"momentum"}, "adam": {"betas", "state_bits"}, "adamw": {"betas", "state_bits"}}
    of_others = {key for keys in owned.values() for key in keys} - owned.get(given.get("name", ""), set())
    optional = of_others | {"entity", "run_name", "tags", "job_type"}
    assert set(section.model_fields) - set(given) <= optional


def test_the_single_settings_of_a_run_have_the_defaults_of_the_schema() -> None:
    given = values("train.yaml")
    fields = {key: field.default for key, field in Config.model_fields.items() if not field.is_required()}
    for key in set(given) & set(fields):
        default = fields[key]
        assert given[key] == (default.model_dump() if isinstance(default, Section) else default), key
