"""efficient-ft: fine-tune pretrained vision models with little memory, compute and time."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("efficient-ft")
except PackageNotFoundError:  # a checkout that is not installed
    __version__ = "0+unknown"


#: Public names and the modules that define them. A module is loaded when its name is first used. `__init__.pyi`
#: declares the types of the names.
_LAZY = {"MethodSession": "efficient_ft.integrations.session", "plan": "efficient_ft.cli.commands.plan"}


def __getattr__(name: str) -> Any:
    """Load a public name on first use, so that importing the package stays fast."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
