"""efficient-ft: fine-tune pretrained vision models with little memory, compute and time."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("efficient-ft")
except PackageNotFoundError:  # a checkout that was not installed
    __version__ = "0+unknown"


def __getattr__(name: str) -> Any:
    """Load `plan` when it is first asked for: importing the package alone loads nothing heavy."""
    if name == "plan":
        return importlib.import_module("efficient_ft.cli.commands.plan").plan
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
