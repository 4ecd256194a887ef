"""Compose the configuration of ``evaluate=RUN``: the settings of RUN with the changes on the command line.

Hydra never composes the configuration in a run folder, because another person may have created the folder. The file
config.yaml is read as plain settings and checked against the schema. Hydra keys are rejected, and interpolations and
targets remain plain text. Hydra only parses the arguments and composes the groups that the arguments select
(``data=folder``).
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hydra import compose
from hydra.core.config_loader import ConfigLoader
from hydra.core.override_parser.types import Override
from omegaconf import OmegaConf

from efficient_ft.cli.hydra.mistakes import check_option, known_here, refuse_data, unknown
from efficient_ft.config import Config, UnknownSetting, check, setting_names
from efficient_ft.config.plain import plain
from efficient_ft.core.errors import UserError
from efficient_ft.record.config_file import read_config
from efficient_ft.record.formats import PASS_A_RUN, USE_ITS_VERSION


def evaluation(loader: ConfigLoader, name: str, parsed: Sequence[Override]) -> Config | None:
    """Return the configuration of a job with ``evaluate=RUN`` and the changes in `parsed`, or None for other jobs."""
    runs = [override.value() for override in parsed if override.key_or_group == "evaluate"]
    if not runs or runs[-1] is None:
        return None
    run = Path(str(runs[-1]))
    if not (run / "model.safetensors").is_file():
        reason = "the folder contains no model.safetensors" if run.is_dir() else "the folder does not exist"
        raise UserError(f"{run}: {reason}. {PASS_A_RUN}")
    settings = read_config(run, PASS_A_RUN, USE_ITS_VERSION).model_dump(mode="json")
    groups = [override for override in parsed if loader.get_group_options(override.key_or_group)]
    for override in groups:
        check_option(loader, override)
        group = override.key_or_group
        if group not in Config.model_fields or override.package not in (None, group) or override.is_delete():
            raise UserError(
                f"{override.input_line}: an evaluation uses the settings of the run. You can only replace a section"
                " (data=NAME) or change single settings (data.root=DIR)."
            )
    if groups:
        composed = plain(compose(name, [str(override.input_line) for override in groups]))
        settings.update({override.key_or_group: composed[override.key_or_group] for override in groups})
    for override in parsed:
        if override not in groups:
            _apply(loader, settings, override)
    settings["evaluate"] = str(run)
    try:
        config = check(settings)
    except UnknownSetting as error:
        raise known_here(loader, error) from None
    refuse_data(parsed, config)
    return config


def _apply(loader: ConfigLoader, settings: dict[str, Any], override: Override) -> None:
    """Apply an argument (``KEY=VALUE``, ``+KEY=VALUE`` or ``~KEY``) to `settings`. Only the new value is resolved."""
    full = override.key_or_group
    if full.startswith(("hydra.", "hydra/")):
        raise UserError(f"{override.input_line}: an evaluation does not use Hydra. Remove this argument.")
    value = plain(OmegaConf.create({"value": override.value()}))["value"]
    addable = override.is_add() or override.is_force_add() or full in setting_names()
    *groups, key = parts = full.split(".")
    node = settings
    for depth, part in enumerate(parts):
        within = depth < len(groups)
        if part not in node and not addable:
            raise unknown(loader, ".".join(parts[: depth + 1]), value, node)
        if within and not isinstance(node.get(part, {}), dict):
            raise unknown(loader, ".".join(parts[: depth + 2]), value, ())
        if within:
            node = node.setdefault(part, {})
    if override.is_delete():
        node.pop(key, None)
    else:
        node[key] = value
