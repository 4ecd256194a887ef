"""The configuration that a run wrote into its folder, read back as plain data."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

from efficient_ft.config.check import check
from efficient_ft.config.renamed import RenamedSetting
from efficient_ft.config.schema import Config
from efficient_ft.core.errors import UserError

#: The file in a run folder that holds every setting of the run.
CONFIG_FILE = "config.yaml"


def stored_config(run: Path) -> Config:
    """Read and check the configuration of the run in the folder `run`.

    A run folder is data, possibly someone else's: its YAML is read without tags, nothing in it is composed,
    interpolated, imported or called, and only keys of the schema are accepted.

    Raises:
        UserError: there is no such file, it cannot be read, or it is not a configuration of this version.
    """
    file = run / CONFIG_FILE
    if not file.is_file():
        what = "holds no config.yaml" if run.is_dir() else "no such folder"
        raise UserError(f"{run}: {what}. Pass the run folder printed when training ended.")
    try:
        settings: Any = yaml.safe_load(file.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{file} cannot be read: {' '.join(str(error).split())}") from None
    if not isinstance(settings, dict):
        raise UserError(f"{file} cannot be read: it must hold a mapping from settings to values.")
    try:
        return check({str(key): value for key, value in settings.items()})
    except RenamedSetting as error:
        raise UserError(
            f"{run} was written by an earlier version: its setting {error.old} is now {error.now}. Use another folder,"
            " or resume=never to train again; to read it, use the version that wrote it."
        ) from None
    except UserError as error:
        raise UserError(f"{file}: {error}") from None
