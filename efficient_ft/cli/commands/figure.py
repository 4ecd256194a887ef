"""``efficient-ft figure PAPER/figure_N RUN|DIR...|KEY=VALUE...``: draw a figure of a paper from runs or a model."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.terminal import Help
from efficient_ft.cli.terminal import note as say_note
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.sheet import render
from efficient_ft.core.text import plain_line
from efficient_ft.papers.published import figures
from efficient_ft.record.collection import notes

DESCRIPTION = """\
Draw a figure of a paper as PNG, and write its data as CSV. The figure is drawn from finished runs, or from a model and
images. Without arguments, the command lists the figures.

    efficient-ft -m experiment=alast_layers model=deit_tiny data=flowers102 step_stats.interval=1
    efficient-ft figure alast/figure_8 outputs/flowers102
    efficient-ft figure alast/figure_2 model=deit_small data=folder data.root=DIR
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Draw a figure, and print the paths of the written files."""
    parser = argparse.ArgumentParser(prog="efficient-ft figure", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("figure", nargs="?", metavar="FIGURE", help="PAPER/figure_N, for example alast/figure_8")
    of = "run folders, folders that contain runs, or settings of the model and images"
    parser.add_argument("of", nargs="*", metavar="RUN|DIR|KEY=VALUE", help=of)
    folder = Path("figures")
    parser.add_argument("--out", type=Path, default=folder, metavar="FOLDER", help="output folder (default: figures)")
    options = parser.parse_intermixed_args(arguments)
    if options.figure is None:
        rows = []
        for one in figures():
            words = f"no: {one.reason}" if one.command is None else " ".join(one.command.split()[3:])
            rows.append([one.name, one.title, words or "–"])
        print("Usage: efficient-ft figure FIGURE FROM\n")
        print(render(["figure", "about", "from"], rows, "text", left=3))
        return
    from efficient_ft.report import model_figures, paper_figures
    from efficient_ft.report.charts import write_chart
    from efficient_ft.report.runs import collect_paths

    if options.figure in model_figures.FIGURES:
        chart = model_figures.model_figure(options.figure, configured(options.of))
    elif options.figure in paper_figures.FIGURES:
        if not options.of:
            raise UserError(f"The figure {options.figure} is drawn from runs. Pass run folders, or a folder of runs.")
        found = collect_paths([Path(one) for one in options.of])
        for sentence in notes(found, means=True):
            say_note(sentence)
        chart = paper_figures.paper_figure(options.figure, found)
    else:
        raise SettingError("figure", options.figure, [figure.name for figure in figures()])
    for sentence in chart.notes:
        say_note(sentence)
    for file in write_chart(chart, options.out / options.figure.replace("/", "_")):
        print(plain_line(str(file)))
