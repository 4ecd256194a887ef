"""Checks of Hydra's command-line flags."""

from __future__ import annotations

import os
from typing import Any

from efficient_ft.core.errors import UserError

_SHELLS = ("bash", "fish", "zsh")
_DOES = ("install", "uninstall", "query")


def check_flags(arguments: Any) -> None:
    """Refuse flags for which Hydra would print a traceback, and the flag that executes a file."""
    if arguments.experimental_rerun is not None:
        raise UserError(
            "--experimental-rerun is not supported, since it executes code from a file. Repeat the command of the run,"
            " which resumes an interrupted run."
        )
    if arguments.multirun and arguments.cfg:
        raise UserError("--cfg prints the configuration of one run. Remove -m and the comma-separated values.")
    flags = {
        "--run": arguments.run,
        "--multirun": arguments.multirun,
        "--cfg": arguments.cfg,
        "--info": arguments.info,
        "--shell-completion": arguments.shell_completion,
    }
    given = [flag for flag, value in flags.items() if value]
    if len(given) > 1:
        raise UserError(f"{' and '.join(given)} cannot be combined. Use one of them.")
    for flag, value in (("--resolve", arguments.resolve), ("--package", arguments.package)):
        if value and not (arguments.cfg or arguments.help):
            raise UserError(f"{flag} requires --cfg job. Add --cfg job, or remove {flag}.")
    if arguments.cfg == "hydra" and arguments.resolve:
        raise UserError("--cfg hydra cannot be resolved, as it refers to settings of a run. Use --cfg all --resolve.")
    if arguments.shell_completion:
        _check_completion(arguments.overrides)


def _check_completion(words: list[str]) -> None:
    """Refuse words after ``--shell-completion`` other than install, uninstall or query with a shell."""
    does, _, shell = words[0].partition("=") if len(words) == 1 else ("", "", "")
    if does not in _DOES or shell not in _SHELLS:
        forms = " or ".join(f"install={shell}" for shell in _SHELLS)
        raise UserError(f'--shell-completion requires {forms}: eval "$(efficient-ft --shell-completion install=bash)"')
    if does == "query" and "COMP_LINE" not in os.environ:
        raise UserError(f"--shell-completion {words[0]} is for the shell. Use --shell-completion install={shell}")
