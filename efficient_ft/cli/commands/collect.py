"""``efficient-ft collect DIR``: print one table of many runs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from efficient_ft.cli.terminal import Help, add_columns_option, add_form_option, note, run_folders, status
from efficient_ft.core.format import (
    NOT_IN_PERCENT,
    format_bytes,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
)
from efficient_ft.core.sheet import Column, render
from efficient_ft.core.text import paragraph, spelled
from efficient_ft.record.collection import Run, collect, group_rows, heading, metrics_of, notes, run_rows

DESCRIPTION = """\
Print one table of all runs below DIR. The columns are the metric (for example, the accuracy), the cost, the settings in
which the runs differ, and the totals of each run. Runs that differ only in their seed are averaged in one row. Runs
with different settings are never averaged. --runs prints a row for each run instead. Runs that cannot be read are
listed below the table.

The terminal shows only the columns that fit. --columns selects other columns. CSV and JSON contain all columns.

    efficient-ft collect outputs                               average over the seeds
    efficient-ft collect outputs --columns method,peak,time    print these columns
    efficient-ft collect outputs --runs --form csv > runs.csv
"""


def main(arguments: Sequence[str] | None = None) -> None:
    """Print the table of the runs in a folder."""
    parser = argparse.ArgumentParser(prog="efficient-ft collect", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument(
        "folder", type=Path, nargs="?", metavar="DIR", help="folder of runs; without DIR, runs are listed"
    )
    parser.add_argument("--runs", action="store_true", help="print one row for each run, without averaging")
    add_form_option(parser)
    add_columns_option(parser)
    options = parser.parse_args(arguments)
    if options.folder is None:
        print(run_folders("collect", "DIR"))
        return
    found = collect(options.folder, lambda done, of: status(f"Reading run folders: {done} of {of}"))
    status("")
    header, rows = run_rows(found) if options.runs else group_rows(found)
    if options.form == "text":
        # The heading names the models and data sets, because a column with only one value may be hidden.
        models = ", ".join(dict.fromkeys(run.config.model.name for run in found.runs))
        data = ", ".join(dict.fromkeys(run.data for run in found.runs))
        print(paragraph(f"{len(found.runs)} run{'s' * (len(found.runs) > 1)} of {models} on {data}") + "\n")
    print(render(header, rows, options.form, columns=_columns(found.runs, header), chosen=options.columns))
    for sentence in notes(found, means=not options.runs):
        note(sentence)


#: Columns whose numbers are printed with units.
_NUMBERS = {
    "peak MiB": Column(1, lambda value: format_bytes(value * 2**20), "peak"),
    "backward MFLOPs/sample": Column(1, lambda value: format_number(value * 1e6), "backward FLOPs / sample"),
    "seconds": Column(2, format_seconds, "time"),
}
_FURTHER = {
    "saved MiB/sample": Column(5, lambda value: format_bytes(value * 2**20), "saved / sample"),
    "TFLOPs of the run": Column(5, lambda value: format_number(value * 1e12), "FLOPs of the run"),
    "trainable M": Column(5, lambda value: format_number(value * 1e6), "trainable"),
    "process growth MiB": Column(6, lambda value: format_bytes(value * 2**20), "used by training"),
    "forward MFLOPs/sample": Column(6, lambda value: format_number(value * 1e6), "forward FLOPs / sample"),
    "joules": Column(6, lambda value: format_number(value, "J"), "energy"),
    "published accuracy %": Column(4, lambda value: format_percent(value / 100), "published"),
}


def _columns(runs: Sequence[Run], header: Sequence[str]) -> dict[str, Column]:
    """Return the columns in this order: names; accuracy and cost; settings that differ between runs; other columns."""
    several = len({run.config.model.name for run in runs}) > 1, len({run.data for run in runs}) > 1
    first = {
        "run": Column(words=True),
        "method": Column(words=True),
        "model": Column(0 if several[0] else 8, words=True),
        "data": Column(0 if several[1] else 8, words=True),
    }
    tested = any(run.results["accuracy"].get("test") is not None for run in runs)
    ranks = {"test": 0 if tested else 8, "best": 4 if tested else 1, "last": 7}
    scores: dict[str, dict[str, Column]] = {key: {} for key in (*ranks, "±")}
    for metric in metrics_of(runs):
        scale, name, title = 1 if metric in NOT_IN_PERCENT else 100, heading(metric), spelled(metric)

        def form(value: float, scale: int = scale, metric: str = metric) -> str:
            return format_metric(value / scale, metric)

        for key, rank in ranks.items():
            scores[key][f"{key} {name}"] = Column(rank, form, f"{key} {title}")
        scores["±"][f"test {name} ±"] = Column(3, form, "±")
    accuracy = scores["test"] | scores["±"] | ({} if tested else scores["best"])
    rest_of_scores = scores["best"] | scores["last"]
    known = {*first, *accuracy, *rest_of_scores, *_NUMBERS, *_FURTHER, "seed", "seeds", "split"}
    settings = {name: Column(2, words=True) for name in header if name not in known}
    rest = {"seed": Column(1), "seeds": Column(3, words=True), "split": Column(7, words=True), **_FURTHER}
    every = first | accuracy | _NUMBERS | rest_of_scores | settings | rest
    return {name: column for name, column in every.items() if name in header}
