"""A small run, its plan, and a selection of candidates by name."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields

from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.config import Config
from efficient_ft.planning import Limits, Plan, make_plan
from efficient_ft.planning.candidates import candidates

#: A small network on the digits, which require no files.
SETTINGS = ("model=vit_digits", "data=digits", "data.num_workers=0", "trainer.max_steps=5", "trainer.precision=fp32")


def configure(settings: Sequence[str]) -> Config:
    register()
    (config,) = configurations(CONF, "train", settings, sweep=False)
    return config


def few(names: Sequence[str]):
    """Return a function that lists only the candidates with the given names."""
    return lambda *arguments: [one for one in candidates(*arguments) if one.name in names]


def a_plan(memory: int = 10**12, **settings: object) -> Plan:
    """Plan the small run. `settings` are arguments of `Limits` and `make_plan`."""
    limits = {field.name: settings.pop(field.name) for field in fields(Limits) if field.name in settings}
    return make_plan(SETTINGS, configure, Limits(memory, **limits), **settings)  # type: ignore[arg-type]
