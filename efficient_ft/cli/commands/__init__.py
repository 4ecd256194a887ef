"""The commands ``bench``, ``report``, ``predict``, ..., each in a separate module."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Sequence

from efficient_ft.cli.exits import clean_exits
from efficient_ft.cli.terminal import quiet_libraries
from efficient_ft.core.errors import replace_unprintable, single_values

_NAMES = ("check", "plan", "auto", "lr", "cache", "predict", "export", "report", "table", "collect", "figure",
          "dashboard", "study", "bench", "gradient-error", "selftest")  # fmt: skip
#: Names of the commands and of their modules. Each module defines ``main(arguments)`` and is imported on first use.
COMMANDS = {name: f"efficient_ft.cli.commands.{name.replace('-', '_')}" for name in _NAMES}


def run_command(name: str, arguments: Sequence[str] | None = None) -> None:
    """Run a command of `COMMANDS`, and exit with its status. The status is 2 if the command raises a `UserError`."""
    replace_unprintable()
    quiet_libraries()
    with clean_exits("Interrupted."), single_values():
        main = importlib.import_module(COMMANDS[name]).main
        status = main(list(sys.argv[1:] if arguments is None else arguments))
    if status:
        raise SystemExit(status)
