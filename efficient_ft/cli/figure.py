"""``efficient-ft figure PAPER/figure_N RUN|DIR...``: a figure of a paper from the records of runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

DESCRIPTION = """\
Draw a figure of a paper from finished runs, as PNG, with its data as CSV. `efficient-ft table` lists the figures.

    efficient-ft -m experiment=alast_layers model=deit_tiny data=flowers102 step_stats.interval=1
    efficient-ft figure alast/figure_8 outputs/flowers102
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw the figure that `arguments` (default: the command line's) name, and print the files written.

    Raises:
        UserError: no such figure, runs that lack what it shows, or matplotlib is missing.
    """
    parser = argparse.ArgumentParser(
        prog="efficient-ft figure", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("figure", metavar="FIGURE", help="PAPER/figure_N, for example alast/figure_8")
    parser.add_argument("runs", type=Path, nargs="+", metavar="RUN|DIR", help="run folders, or folders of runs")
    parser.add_argument("--out", type=Path, default=Path("figures"), metavar="FOLDER", help="default: figures")
    options = parser.parse_args(arguments)

    from efficient_ft.report.charts import write_chart
    from efficient_ft.report.paper_figures import paper_figure

    chart = paper_figure(options.figure, options.runs)
    for file in write_chart(chart, options.out / options.figure.replace("/", "_")):
        print(file)
