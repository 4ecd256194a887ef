"""``efficient-ft selftest``: check what runs promise. The trials are in tests/promises of a checkout."""

from __future__ import annotations

import argparse
import importlib
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from efficient_ft.cli.terminal import Help, count
from efficient_ft.core.errors import UserError

DESCRIPTION = """\
Check the promises of docs/promises.md on this machine. Runs are killed, resumed, given damaged files, and swept over.

    efficient-ft selftest                     every promise in its short form, some minutes
    efficient-ft selftest 1 2 10              some of them
    efficient-ft selftest --long --json FILE  all trials, some hours

The trials are part of the repository, not of the installed package. They run in temporary folders, several at a time.
A failed trial is reported with its reason, and the exit status is 1.
"""

_ROOT = Path(__file__).resolve().parents[3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that `arguments` (default: the command line's) select; return 1 if one fails.

    Raises:
        UserError: if the system is Windows, the package is not used from a checkout, or the arguments do not fit.
    """
    options = _parser().parse_args(arguments)
    if sys.platform == "win32":
        raise UserError("selftest needs signals and forked processes, which are unavailable on Windows.")
    status: int = _trials().run(options)
    return status


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="efficient-ft selftest", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("promise", nargs="*", type=int, metavar="NUMBER", help="default: all of them")
    parser.add_argument("--long", action="store_true", help="all trials, not a selection")
    parser.add_argument("--only", default="", metavar="TEXT", help="only trials with TEXT in their name")
    parser.add_argument("--jobs", type=count, default=2, help="trials at a time, each with one thread (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a record to FILE, or into it")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed trials")
    return parser


def _trials() -> Any:
    """Import the module that runs the trials from the checkout that contains this package."""
    if not (_ROOT / "tests" / "promises" / "command.py").is_file():
        raise UserError(
            "The trials of selftest are not part of the installed package. They are in tests/promises of the"
            " repository: clone it, install it with `pip install -e .`, and run `efficient-ft selftest` again."
        )
    if str(_ROOT) not in sys.path[:1]:
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module("tests.promises.command")
