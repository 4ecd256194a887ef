"""efficient-ft: fine-tuning of pretrained vision models with little memory, compute and time."""

import importlib
from importlib.metadata import PackageNotFoundError, version
from typing import Any

try:
    __version__ = version("efficient-ft")
except PackageNotFoundError:  # the package is not installed, for example in a checkout
    __version__ = "0+unknown"


#: Public names and the modules that define them. A module is imported when its name is first used. `__init__.pyi`
#: declares the types of these names.
_LAZY = {
    "MethodSession": "efficient_ft.integrations.session",
    "auto": "efficient_ft.cli.commands.auto",
    "plan": "efficient_ft.cli.commands.plan",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used, so that the import of the package remains fast."""
    if name in _LAZY:
        return getattr(importlib.import_module(_LAZY[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_LAZY])
