"""``efficient-ft selftest``: run the tests in tests/promises, which verify the guarantees in docs/promises.md."""

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
Check the promises of docs/promises.md on this machine. The trials kill runs, resume runs, damage files, and run sweeps.

    efficient-ft selftest                     a short test of every promise, takes minutes
    efficient-ft selftest 1 2 10              only these promises
    efficient-ft selftest --long --json FILE  all trials, takes hours

The trials are part of the repository, not of the installed package. They run in parallel in temporary folders. The
command prints the reason of each failed trial, and its exit status is then 1.
"""

_ROOT = Path(__file__).resolve().parents[3]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the selected trials.

    Return 1 if a trial fails, and 0 otherwise. Windows and installed packages are not supported.
    """
    parser = argparse.ArgumentParser(prog="efficient-ft selftest", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument(
        "promise", nargs="*", type=int, metavar="NUMBER", help="number of a promise (default: all promises)"
    )
    parser.add_argument("--long", action="store_true", help="run more trials, which also take longer")
    parser.add_argument("--only", default="", metavar="TEXT", help="run only trials whose names contain TEXT")
    parser.add_argument("--jobs", type=count, default=2, help="number of parallel, single-threaded trials (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also append a record of the trials to FILE")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed trials")
    options = parser.parse_args(arguments)
    if sys.platform == "win32":
        raise UserError("selftest requires signals and forked processes, which Windows does not support.")
    status: int = _trials().run(options)
    return status


def _trials() -> Any:
    if not (_ROOT / "tests" / "promises" / "command.py").is_file():
        raise UserError(
            "The trials of selftest are in tests/promises of the repository, not in the installed package. Clone the"
            " repository, install it with `pip install -e .`, and run `efficient-ft selftest` again."
        )
    if str(_ROOT) not in sys.path[:1]:
        sys.path.insert(0, str(_ROOT))
    return importlib.import_module("tests.promises.command")
