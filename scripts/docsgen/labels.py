"""How the recipes of the records are shown: ``labels.yaml``, and today's names of settings."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path

import yaml

LABELS: dict[str, dict[str, str]] = yaml.safe_load(Path(__file__).with_name("labels.yaml").read_text(encoding="utf-8"))

_RENAMED = (
    ("checkpointing:inputs=", "checkpointing:input_dtype="),
    ("derive=false", "recompute_inputs=false"),
    ("values=", "value_dtype="),
    ("=input", "=same"),
)


def current(recipe: str) -> str:
    """Return a recipe of a record, ``METHOD:KEY=VALUE+METHOD``, with today's names."""
    if recipe == "full in bf16":
        return LABELS["memory"]["bf16"]
    for old, new in _RENAMED:
        recipe = recipe.replace(old, new)
    parts, settings = [], []
    for part in recipe.split("+"):
        name, _, given = part.partition(":")
        if "select=all" in given:
            name, given = f"full,{name}", given.replace("select=all", "").strip(",")
        parts.append(name)
        settings += [f"`{setting}`" for setting in given.split(",") if setting]
    method = ",".join(parts)
    return ", ".join([f"`[{method}]`" if "," in method else f"`{method}`", *settings])


def command(arguments: Sequence[str]) -> str:
    """Return arguments of the command line in short: the methods, then their settings without the methods' names."""
    methods, *settings = arguments
    short = [f"`{re.sub('^method.[a-z_]+.', '', setting)}`" for setting in settings]
    return ", ".join([f"`{methods.removeprefix('method=')}`", *short])
