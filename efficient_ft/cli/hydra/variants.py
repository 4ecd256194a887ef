"""Find the variant of each method in a run, and the settings that differ from the paper.

A variant is an option of the group ``method``. All options of a method share one package. If the settings of an option
such as ``lbp_wht`` differ from the paper, the option ``lbp_wht_published`` contains the settings of the paper.
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

#: Suffix of options with the published settings.
PUBLISHED = "_published"

#: Suffix of recipes with settings that are reported for the authors' implementation and differ from the paper.
_OF_THE_CODE = "_code"

#: Suffix of run folders whose settings differ from an existing published option.
OURS = "-ours"


def folder_of(config: Config) -> Path:
    """Return the run folder of `config`, named after the variants of its methods, e.g. ``lbp_wht-ours``."""
    names = []
    for name, settings in config.method.items():
        chosen = variant(name, settings)
        names.append(f"{chosen}{OURS}" if _departures(name, chosen, settings) else chosen)
    return Path(run_folder(config, names))


def variant(method: str, settings: Mapping[str, Any]) -> str:
    """Return the option with the fewest differences from `settings`.

    If several options have the same number of differences, the option with the name of the method is preferred.
    """
    options = _options().get(method, {})
    if not options:
        return method

    def distance(option: str) -> tuple[int, bool, str]:
        held = options[option]
        return sum(settings.get(key) != value for key, value in held.items()), option != method, option

    return min(options, key=distance)


def not_as_published(config: Config) -> list[str]:
    """Return a sentence for each method of `config` that differs from the published variant."""
    found = []
    for name, settings in config.method.items():
        chosen = variant(name, settings)
        if changed := _departures(name, chosen, settings):
            differs = [f"{key}={show(settings.get(key))} (published: {show(value)})" for key, value in changed]
            do = f"For the published settings, use method={chosen}{PUBLISHED}."
            found.append(f"{chosen} differs from the published method: {', '.join(differs)}. {do}")
    return found


def published_recipes(config: Config, recipe: str) -> str | None:
    """Return a sentence that names the recipes of published runs of the same method on the same data set.

    The result is None if the run uses a recipe, or if there is no such recipe. The recipes METHOD/DATA and
    METHOD_NETWORK/DATA belong to a method. If the name of the model contains NETWORK, recipes of other networks are not
    listed.
    """
    if recipe != "none" or config.tasks:
        return None
    files = [*(CONF / "recipe").glob(f"*/{config.data.name}.yaml")]
    names = [file.parent.name for file in files if not file.parent.name.endswith(_OF_THE_CODE)]
    names = [name for name in names if any(name == one or name.startswith(f"{one}_") for one in config.method)]
    of_method = [name for name in names if name in config.method]
    of_network = [name for name in names if name.rpartition("_")[2] in str(config.model.name)]
    found = sorted(of_method or of_network or names)
    if not found:
        return None
    listed = " and ".join(f"recipe={name}/{config.data.name}" for name in found)
    contain, runs = ("contains", "the published run") if len(found) == 1 else ("contain", "published runs")
    return f"{listed} {contain} the settings of {runs}. This run does not use a recipe."


def _departures(method: str, chosen: str, settings: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """Return the published settings that differ from both `settings` and the option `chosen`."""
    published = _options().get(method, {}).get(chosen + PUBLISHED, {})
    usual = _options().get(method, {}).get(chosen, {})
    # Settings with the same value in both options, such as a rank or a sparsity, do not define a variant.
    return [(key, value) for key, value in published.items() if value not in (usual.get(key), settings.get(key))]


@cache
def _options() -> dict[str, dict[str, dict[str, Any]]]:
    """Return the settings of each option of each method. Settings that refer to other settings are omitted."""
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for _, method, file in method_files({"": [CONF], **configuration_folders()}):
        settings = option_settings(file).items()
        found.setdefault(method, {})[file.stem] = {k: v for k, v in settings if not str(v).startswith("${")}
    return found
