"""A small run, its plan, and the candidates of some names."""

from __future__ import annotations

from collections.abc import Sequence

from efficient_ft.cli.hydra.compose import configurations
from efficient_ft.cli.hydra.groups import CONF, register
from efficient_ft.config import Config
from efficient_ft.planning import Plan, make_plan
from efficient_ft.planning.candidates import candidates

#: A small network on the digits, which need no files.
SETTINGS = ("model=vit_digits", "data=digits", "data.num_workers=0", "trainer.max_steps=5")


def configure(settings: Sequence[str]) -> Config:
    register()
    (config,) = configurations(CONF, "train", settings, sweep=False)
    return config


def few(names: Sequence[str]):
    """Examine only the candidates of these names."""
    return lambda *arguments: [one for one in candidates(*arguments) if one.name in names]


def a_plan(memory: int = 10**12, **settings: object) -> Plan:
    return make_plan(SETTINGS, configure, memory_bytes=memory, **settings)  # type: ignore[arg-type]
