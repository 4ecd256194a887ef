"""Networks of ``efficient-ft auto``: several options of the group ``model``, or ``model=auto``."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.conf import CONF
from efficient_ft.cli.hydra.rows import key_of
from efficient_ft.config.kinds import rules_of
from efficient_ft.config.schema import ModelConfig
from efficient_ft.core.errors import SettingError, UserError, first_line
from efficient_ft.core.network import each_host_once, local_files_only
from efficient_ft.core.parsing import parse_yaml
from efficient_ft.search.networks import examined, preferred

#: Settings of ``model`` that are allowed with several networks, because they do not depend on the network. The other
#: settings, for example ``model.weights`` and ``model.mean``, belong to one network.
SAME = ("image_size", "max_length", "zero_head", "drop_path_rate", "drop_rate", "frozen_bn", "select", "pretrained")
AUTO = "auto"


@dataclass(frozen=True)
class Networks:
    """Options of the group ``model`` that a search uses. `automatic` is True for ``model=auto``."""

    names: tuple[str, ...]
    automatic: bool

    @property
    def folder(self) -> str:
        """Name of a folder for these networks."""
        return AUTO if self.automatic else "+".join(self.names)[:60]


def several_networks(settings: Sequence[str]) -> Networks | None:
    """Return the networks of a search, or None if the settings name one network.

    Raises:
        SettingError: If the networks or other settings of ``model`` cannot be used.
    """
    value = next((word.partition("=")[2] for word in settings if key_of(word) == "model"), "")
    names = [name.strip() for name in value.split(",")]
    if value != AUTO and not re.search(r"[,(]|^\[", value):
        return None
    if value.startswith("{"):
        return None  # the settings of one network
    allowed = "an option, several options separated by commas, or auto"
    if not all(re.fullmatch(r"[\w.+-]+", name) for name in names) or (AUTO in names and value != AUTO):
        raise SettingError("model", value, allowed, "Example: model=deit_tiny,resnet50.")
    if len(set(names)) < len(names):
        raise SettingError("model", value, allowed, "Name each option only once.")
    _check_settings(settings, value)
    if value != AUTO:
        return Networks(tuple(names), False)
    task = next((word.partition("=")[2] for word in settings if key_of(word) == "task"), "classification")
    found = tuple(_options(rules_of(task).family))
    if not found:
        raise SettingError("model", AUTO, f"an option with task={task}", "No pretrained option has this task.")
    return Networks(found, True)


def _check_settings(settings: Sequence[str], model: str) -> None:
    """Raise a SettingError for settings of ``model`` that are not allowed with several networks."""
    for word in settings:
        section, _, name = key_of(word).partition(".")
        value = word.partition("=")[2]
        if section != "model" or not name:
            continue
        if model == AUTO and name == "pretrained":
            raise SettingError("model.pretrained", value, "left out with model=auto, which uses pretrained networks")
        if name not in SAME:
            do = "The setting belongs to one network. Name one network: model=NAME."
            raise SettingError(f"model.{name}", value, f"left out with model={model}", do)


def _options(family: str) -> list[str]:
    """Return the pretrained options of the group ``model`` for a family of networks, in the order of preference."""
    found = {}
    for file in (CONF / "model").glob("*.yaml"):
        settings = parse_yaml(file.read_text(encoding="utf-8"))
        if settings["pretrained"] and "???" not in (settings["name"], settings.get("encoder")):
            model = ModelConfig(**settings)
            if model.family == family:
                found[file.stem] = model.name
    return preferred(found)


def available_networks(runs: Sequence[str], names: Sequence[str], limit: int | None) -> tuple[list[str], list[str]]:
    """Return the networks whose weights are available, and the networks whose weights are missing.

    This function imports torch. Networks whose weights are in a local cache come first. Hosts are asked only if fewer
    than `limit` networks have local weights. With a `limit`, the result contains the networks that the search examines.

    Args:
        runs: settings of the runs without ``model``.
        names: options of the group ``model``.
        limit: number of networks of ``model=auto``, or None if all networks are required.

    Raises:
        UserError: If the data or required weights are missing.
    """
    from efficient_ft.models.factory import missing_weights
    from efficient_ft.training.kinds.registry import kind_of

    configs = {name: configured([*runs, f"model={name}"]) for name in names}
    first = configs[names[0]]
    absent = [text for text in kind_of(first).missing(first) if text is not None]
    if absent:
        raise UserError(absent[0])
    with local_files_only():
        local = [name for name in names if missing_weights(configs[name].model) is None]
    others = [name for name in names if name not in local]
    models = {name: configs[name].model.name for name in names}
    if limit is not None and len(local) >= limit:
        return examined(_preferred(models, local), models, limit), []
    with each_host_once():
        reasons = {name: missing_weights(configs[name].model) for name in others}
    missing = {name: reason for name, reason in reasons.items() if reason is not None}
    if limit is None:
        if missing:
            name, reason = next(iter(missing.items()))
            do = "Remove this network, or start a search with this network alone and model.weights=FILE."
            raise UserError(f"model={name}: {first_line(UserError(reason))} {do}")
        return list(names), []
    remote = [name for name in others if name not in missing]
    if not local and not remote:
        reason = first_line(UserError(missing[names[0]]))
        raise UserError(
            f"model=auto must find the weights of at least one network. The options are {', '.join(names)}. {reason}"
            " Pass one network and a local file instead: model=NAME model.weights=FILE."
        )
    return examined([*_preferred(models, local), *_preferred(models, remote)], models, limit), list(missing)


def _preferred(models: Mapping[str, str], names: Sequence[str]) -> list[str]:
    return preferred({name: models[name] for name in names})
