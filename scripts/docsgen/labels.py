"""Labels of the recipes in the records, from ``labels.yaml``."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

LABELS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("labels.yaml").read_text(encoding="utf-8"))


def command(arguments: Sequence[str]) -> str:
    """Return arguments of a command line in a short form: the methods, and the settings without the method names."""
    methods, *settings = arguments
    short = [f"`{re.sub('^method.[a-z_]+.', '', setting)}`" for setting in settings]
    return ", ".join([f"`{methods.removeprefix('method=')}`", *short])
