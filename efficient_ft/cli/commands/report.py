"""``efficient-ft report RUN|DIR...``: write a page about one run or several runs."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.cli.terminal import Help, count_or_zero, run_folders
from efficient_ft.cli.terminal import note as say_note
from efficient_ft.core.errors import UserError
from efficient_ft.core.files import refuse_link
from efficient_ft.core.text import plain_line

DESCRIPTION = """\
Write report.html, a page that works without internet access.

For several runs, or a folder of runs, the page contains a sortable table, training curves, and plots of accuracy
against FLOPs, memory, time and energy. The plots mark the Pareto front.

For the folder of a search (efficient-ft auto), the page shows the chosen recipe and all recipes that were tried.

For one run, the page shows the final metric with its uncertainty, training curves, costs, the results of each class
with the confusion matrix and the calibration, the worst and the least certain predictions, and the kept tokens. The
page contains thumbnails of evaluated images. Nothing is uploaded. With step_stats.interval=1, the page and PNG files
also show how the budgets change, how often each block was trained, the number of tokens after each block, and the
relative change of the tokens in each block.
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Write the page of one run or several runs, and print the paths of the written files."""
    parser = argparse.ArgumentParser(prog="efficient-ft report", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("runs", type=Path, nargs="*", metavar="RUN|DIR", help="run folders, or folders of runs")
    images = "number of images in the figure of kept tokens (default 6)"
    parser.add_argument("--images", type=count_or_zero, default=6, metavar="N", help=images)
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="output folder (default: report in the first RUN)")
    options = parser.parse_args(arguments)
    if not options.runs:
        print(run_folders("report", "RUN|DIR..."))
        return
    from efficient_ft.record import config_file
    from efficient_ft.report.page import write_report
    from efficient_ft.report.runs import write_runs_page
    from efficient_ft.report.search_page import write_search_page
    from efficient_ft.search.state import NAME as SEARCH

    first = options.runs[0]
    below = first.is_dir() and not (first / config_file.NAME).is_file() and any(first.rglob(config_file.NAME))
    out = options.out or first / "report"
    if options.out is None:
        refuse_link(out)  # A run folder from another person may contain a link.
    try:
        if len(options.runs) == 1 and (first / SEARCH).is_file():
            print("\n".join(plain_line(str(file)) for file in write_search_page(first, out)))
            return
        if len(options.runs) > 1 or below:
            print(plain_line(str(write_runs_page(options.runs, out))))
            return
        written, notes = write_report(first, out, options.images)
    except OSError as error:
        if error.filename is None or not Path(os.fsdecode(error.filename)).is_relative_to(out):
            raise
        reason = (error.strerror or str(error)).lower()
        raise UserError(f"The file {error.filename} cannot be written ({reason}). Change --out.") from error
    for note in notes:
        say_note(note, file=sys.stdout)
    print("\n".join(plain_line(str(file)) for file in written))
