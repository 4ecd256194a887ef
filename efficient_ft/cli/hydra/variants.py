"""Variants of methods: find the option of the group ``method`` that a run uses, and how it differs from the paper.

The options of a method share its package. ``lbp_wht_published`` has the settings of the paper if ``lbp_wht`` has not.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any

from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.config import Config, run_folder
from efficient_ft.config.explain import show
from efficient_ft.core.packages import configuration_folders, method_files, option_settings

#: Suffix of options with the settings of the paper.
PUBLISHED = "_published"

#: Suffix of the folders of other runs, if there is such an option.
OURS = "-ours"


def folder_of(config: Config) -> Path:
    """Return the run folder of `config`, named after the variants of its methods: ``lbp_wht-ours``."""
    names = []
    for name, settings in config.method.items():
        chosen = variant(name, settings)
        names.append(f"{chosen}{OURS}" if _departures(name, chosen, settings) else chosen)
    return Path(run_folder(config, names))


def variant(method: str, settings: Mapping[str, Any]) -> str:
    """Return the option whose settings are nearest to those of `method`; of several, the one of the same name."""
    options = _options().get(method, {})
    if not options:
        return method

    def distance(option: str) -> tuple[int, bool, str]:
        held = options[option]
        return sum(settings.get(key) != value for key, value in held.items()), option != method, option

    return min(options, key=distance)


def not_as_published(config: Config) -> list[str]:
    """Return a sentence for every method of `config` that differs from its published variant."""
    found = []
    for name, settings in config.method.items():
        chosen = variant(name, settings)
        if departures := _departures(name, chosen, settings):
            differs = [f"{key}={show(settings.get(key))} (published: {show(value)})" for key, value in departures]
            found.append(
                f"{chosen} is not the published method: {', '.join(differs)}. It is method={chosen}{PUBLISHED}."
            )
    return found


def _departures(method: str, chosen: str, settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the published settings that `settings` of the option `chosen` lack; [] without a published variant."""
    published = _options().get(method, {}).get(chosen + PUBLISHED, {})
    usual = _options().get(method, {}).get(chosen, {})
    # Only settings in which the variants differ: another rank or sparsity is still the same variant.
    return [(key, value) for key, value in published.items() if value not in (usual.get(key), settings.get(key))]


@cache
def _options() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the settings of each option by method, without those that refer to other settings."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for _, method, file in method_files({"": [CONF], **configuration_folders()}):
        settings = option_settings(file).items()
        found.setdefault(method, {})[file.stem] = {k: v for k, v in settings if not str(v).startswith("${")}
    return found
