"""Registry of the kinds of task.

The modules in this folder register the kinds of this package. Other packages call `register` with their own kinds, and
refer to these kinds in entry points (see `config.kinds`). Training, evaluation, prediction and reports obtain the kind
from `kind_of` and never depend on the name of the kind.
"""

from __future__ import annotations

import importlib

import timm

from efficient_ft.config import Config
from efficient_ft.config.kinds import OWN_CLASSIFIERS, RULES, rules_of
from efficient_ft.config.schema import NETWORKS
from efficient_ft.core.errors import UserError
from efficient_ft.data.sources import SOURCES
from efficient_ft.models.factory import FAMILIES
from efficient_ft.models.segmentation import SEGFORMERS
from efficient_ft.models.text import TEXT_MODELS
from efficient_ft.task import TASKS
from efficient_ft.training.kinds.base import Kind

#: The modules of this package that register a kind.
_OWN = ("classification", "segmentation", "text", "multilabel", "regression")

_registered: dict[str, Kind] = {}


def register(kind: Kind) -> Kind:
    """Register a kind of task under the name in `kind.rules`, and return the kind.

    An entry point can refer to the returned kind.

    Raises:
        UserError: If the name of the kind, of its network family, or of one of its data sets or networks is already
            registered.
    """
    name = kind.rules.name
    taken = [one for one in kind.sources for rules in RULES.values() if one in rules.data and rules is not kind.rules]
    if name in _registered or RULES.get(name, kind.rules) is not kind.rules or taken:
        what = f"data set {taken[0]}" if taken else f"kind of task {name}"
        raise UserError(f"The {what} of {type(kind).__module__} already exists. Choose a different name.")
    _check_family(kind)
    _registered[name] = kind
    RULES[name], TASKS[name] = kind.rules, kind.task
    SOURCES.update(kind.sources)
    if kind.family is not None:
        FAMILIES[kind.rules.family] = kind.family
        NETWORKS.update(dict.fromkeys(kind.rules.networks, kind.rules.family))
    return kind


def _check_family(kind: Kind) -> None:
    rules, where = kind.rules, type(kind).__module__
    if kind.family is None and rules.networks:
        raise UserError(f"{where} lists networks without a family. Set Kind.family, or remove KindRules.networks.")
    if kind.family is None:
        return
    if rules.family != rules.name or rules.family in FAMILIES:
        raise UserError(
            f"KindRules.family of {where} must be the name of the kind, and must not exist yet, got"
            f" {rules.family!r}. Set KindRules.family to {rules.name!r}, or rename the kind."
        )
    known = {*NETWORKS, *OWN_CLASSIFIERS, *TEXT_MODELS, *SEGFORMERS, *timm.list_models()}
    if taken := [network for network in rules.networks if network in known]:
        raise UserError(f"The network {taken[0]} of {where} already exists. Change the name in KindRules.networks.")


def kind_named(name: str) -> Kind:
    """Return the kind of task that is registered under `name`, which is a value of the setting ``task``.

    Raises:
        SettingError: If no kind is registered under `name`.
    """
    rules_of(name)  # this call loads the package that registers the kind
    if name in _OWN:
        importlib.import_module(f"{__package__}.{name}")
    return _registered[name]


def kind_of(config: Config) -> Kind:
    """Return the kind of task of a run. For several data sets, return a `SeveralDataSets` that wraps the kind."""
    kind = kind_named(config.task)
    if not config.tasks:
        return kind
    from efficient_ft.training.kinds.several import SeveralDataSets

    return SeveralDataSets(kind)
