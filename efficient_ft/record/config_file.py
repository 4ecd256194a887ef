"""Functions that read and write ``config.yaml``, which contains the validated configuration of a run as plain YAML."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from efficient_ft.config import Config, UnknownSetting, check
from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_yaml
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.formats import START_AGAIN, OtherVersionError

NAME = "config.yaml"


def write_config(run: Path, config: Config) -> None:
    """Write `config` to the run folder `run`."""
    write_text_atomically(run / NAME, yaml.safe_dump(config.model_dump(mode="json"), sort_keys=False))


def read_config(run: Path, do: str = START_AGAIN, other_version: str = START_AGAIN) -> Config:
    """Read the configuration of the run in folder `run`.

    Args:
        do: advice at the end of the error message if the file is missing or damaged.
        other_version: advice at the end of the error message if another version wrote the file.

    Raises:
        OtherVersionError: If the file has settings that this version does not know.
        UserError: If config.yaml is missing or damaged.
    """
    file = run / NAME
    try:
        plain: Any = parse_yaml(file.read_text(encoding="utf-8"))
    except OSError as error:
        what = f"contains no {NAME}" if run.is_dir() else "is not a folder"
        raise UserError(f"{run} {what}. {do}") from error
    except ValueError as error:
        raise UserError(f"The file {file} cannot be read: it is not valid YAML. {do}") from error
    if not isinstance(plain, dict):
        raise UserError(f"The file {file} cannot be read: it does not contain a mapping. {do}")
    try:
        return check(plain)
    except UnknownSetting as error:
        reason = f"it has the setting {error.setting}, which is unknown to this version"
        raise OtherVersionError(file, reason, other_version) from error
    except (UserError, TypeError, AttributeError) as error:
        missing = [name for name, field in Config.model_fields.items() if field.is_required() and name not in plain]
        if missing:
            raise UserError(f"The file {file} cannot be read: the entry {missing[0]} is missing. {do}") from error
        raise UserError(f"The file {file} cannot be read: {error} {do}") from error
