"""``efficient-ft collect DIR``: one table of many runs."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.core.sheet import FORMS, render

DESCRIPTION = """\
Make one table of all runs below DIR: accuracy, executed cost, totals of the whole run, and the settings in which the
runs differ. Runs with the same settings but for the seed are one row with means; --runs gives a row for each. Nothing
is averaged over different settings. What cannot be read is left out and named.

    efficient-ft collect outputs                      the means over the seeds, for this terminal
    efficient-ft collect outputs --runs --form csv > runs.csv
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the runs that `arguments` (default: the command line's) name.

    Raises:
        UserError: there is no such folder, or no finished run in it.
    """
    parser = argparse.ArgumentParser(
        prog="efficient-ft collect", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("folder", type=Path, metavar="DIR", help="contains run folders, at any depth")
    parser.add_argument("--runs", action="store_true", help="a row for every run, not for every setting")
    parser.add_argument("--form", choices=list(FORMS), default="text", help="output format (default: text)")
    options = parser.parse_args(arguments)

    from efficient_ft.record.collection import collect, group_rows, notes, run_rows

    found = collect(options.folder)
    header, rows = run_rows(found) if options.runs else group_rows(found)
    print(render(header, rows, options.form, left=header.index("split" if options.runs else "seeds") + 1))
    for sentence in notes(found, means=not options.runs):
        print(f"note: {sentence}", file=sys.stderr)
