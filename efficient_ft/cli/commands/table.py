"""``efficient-ft table``: print published tables, and the commands, costs, runs and results of their rows."""

from __future__ import annotations

import argparse
import os
import shlex
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from efficient_ft.cli.commands.study import of_this_machine
from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.jobs import Job, command, finished, not_read, run_jobs, write_sweep_table
from efficient_ft.cli.hydra.rows import check_settings, merged, of_tasks
from efficient_ft.cli.hydra.variants import folder_of
from efficient_ft.cli.terminal import Help, add_columns_option, add_form_option, words
from efficient_ft.core.errors import UserError
from efficient_ft.core.sheet import DATA, Cell, Column, render
from efficient_ft.core.terminal import show
from efficient_ft.core.text import paragraph
from efficient_ft.papers.published import COSTS, PAPERS, Row, Table, chosen_rows, figures, published_table, table_names
from efficient_ft.record.results import final_accuracy

# Heavy modules are imported after the arguments are parsed, so that ``--help`` responds immediately.

DESCRIPTION = """\
Print the published tables of the four papers, and reproduce them.

    efficient-ft table [data.root=DIR]        list tables and figures, and the runs possible on this machine
    efficient-ft table lbp_wht/2              print the published numbers, and deviations of our runs
    efficient-ft table lbp_wht/2 --commands   print the command for every accuracy
    efficient-ft table lbp_wht/2 --cost       count the cost of every row by the paper's rule and as executed
    efficient-ft table alast/7 --run --rows deit_t.alast --seeds 0,1,2 data.root=DIR
    efficient-ft table alast/7 --report --seeds 0,1,2 data.root=DIR

--run skips finished runs, so the same command continues after an interruption. --report prints published and obtained
accuracies side by side. KEY=VALUE settings are added to the command of every run. A report includes only runs with the
same settings.
"""

#: Names of metrics in headers, keyed by the prefix of the accuracy column.
_KINDS = {"acc": "accuracy", "miou": "mean IoU"}
#: Maximum number of missing runs that a report lists.
_NAMED = 8


@dataclass(frozen=True)
class CellRun:
    """A run that reproduces an accuracy of a published table.

    The run belongs to a row, an accuracy column (or None if the run reproduces all columns of the row), and a seed.
    """

    row: Row
    column: str | None
    seed: int
    arguments: tuple[str, ...]


def main(arguments: Sequence[str] | None = None) -> None:
    """List, print, count, run or report published tables. The exit status is 1 if a run has failed."""
    parser = argparse.ArgumentParser(prog="efficient-ft table", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("table", nargs="?", metavar="TABLE", help="PAPER/NUMBER, for example lbp_wht/2")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings for every run")
    what = parser.add_mutually_exclusive_group()
    what.add_argument("--commands", action="store_true", help="print the command of every run")
    what.add_argument("--cost", action="store_true", help="count the cost of every row, without data or weights")
    what.add_argument("--run", action="store_true", help="start the unfinished runs, and print a report")
    what.add_argument("--report", action="store_true", help="print published and obtained accuracies")
    parser.add_argument("--rows", type=words, default=[], metavar="ROW,...", help="only these rows (default: all)")
    parser.add_argument("--seeds", type=_seeds, default=[233], metavar="N,...", help="seeds of the runs (default: 233)")
    add_form_option(parser)
    add_columns_option(parser)
    options = parser.parse_intermixed_args(arguments)
    settings = [word for word in (options.table, *options.settings) if word is not None and "=" in word]
    if options.table is None or "=" in options.table:
        roots = [word.partition("=")[2] for word in settings if word.startswith("data.root=")]
        others = len(settings) > len(roots)
        if options.run or options.report or options.commands or options.cost or options.rows or others:
            raise UserError("The table must come first. `efficient-ft table [data.root=DIR]` lists all tables.")
        _list(roots[-1] if roots else "./data", options)
        return
    check_settings(options.settings)
    table = published_table(options.table)
    rows = chosen_rows(table, options.rows)
    if options.cost and options.settings:
        raise UserError(f"{options.settings[0]}: --cost does not accept settings. Remove this setting.")
    if options.commands and options.form != "text":
        raise UserError(f"--form {options.form} cannot be combined with --commands. Remove --form.")
    if options.run and options.form not in ("text", "markdown"):
        raise UserError(f"--form {options.form} cannot be combined with --run. Use --report after the runs.")
    if options.cost:
        from efficient_ft.cli.commands.table_costs import print_costs

        print_costs(table, rows, options.form, options.columns, min(4, os.cpu_count() or 1))
        return
    if not (options.commands or options.run or options.report):
        print(_shown(table, rows, options))
        return
    runs = list(_runs(table, rows, options.seeds, settings))
    if options.commands:
        for one in runs:
            print(shlex.join(["efficient-ft", *one.arguments]))
        return
    jobs = _jobs(runs)
    try:
        if options.run:
            run_jobs(jobs, lambda job: command(None, None, None, job.arguments), jobs[0].config.jobs)
    finally:  # The results are reported even if a run has failed.
        if options.run:
            write_sweep_table(Path("outputs"), [job.folder for job in jobs])
        print(_report(table, rows, runs, jobs, settings, options))


def _seeds(given: str) -> list[int]:
    if not all(word.isdecimal() for word in given.split(",")):
        raise argparse.ArgumentTypeError(f"must be integers >= 0 separated by commas, got {given}.")
    return list(dict.fromkeys(int(word) for word in given.split(",")))


def _list(root: str, options: argparse.Namespace) -> None:
    header = ["table", "rows", "accuracies", "about", "here"]
    lines: list[list[Cell]] = []
    for name in table_names():
        table = published_table(name)
        accuracies = sum(len(row.cells) for row in table.rows)
        lines.append([name, len(table.rows), accuracies or None, table.title, state_of(table, root)])
    for figure in figures():
        lines.append([figure.name, None, None, figure.title, figure.command or f"no: {figure.reason}"])
    columns = {name: Column(words=True) for name in ("table", "about", "here")}
    columns |= {"rows": Column(2), "accuracies": Column(1)}
    print(render(header, lines, options.form, columns=columns, chosen=options.columns))


def state_of(table: Table, root: str = "./data") -> str:
    """Describe the costs and runs of `table` that are possible on this machine with the data sets in `root`."""
    cells = [cell for row in table.rows for cell in row.cells.values()]
    runs = [cell for cell in cells if cell.arguments]
    if not runs:
        counted = table.counted or any(row.arguments for row in table.rows)
        return "costs" if counted else f"no: {table.reason}"
    needed = sorted({str(cell.data) for cell in runs})
    here = [data for data in needed if present(data, root)]
    missing = [data for data in needed if data not in here]
    absent = [f"not in {root}: {', '.join(missing)}"] if missing else []
    ready = [cell for cell in runs if cell.data in here]
    # The network depends on the task. All runs of a table have the same task.
    task = next((word for cell in ready for word in cell.arguments if word.startswith("task=")), None)
    models = sorted({cell.arguments[0] for cell in ready})
    without = [model for model in models if not _weights(model, task and (task, f"data={ready[0].data}"))]
    if without:
        absent.append(f"missing weights: {', '.join(model.partition('=')[2] for model in without)}")
    able = sum(cell.arguments[0] not in without for cell in ready)
    if not absent:
        return f"costs; runs ({able})"
    return f"costs; {able} of {len(runs)} runs: {'; '.join(absent)}"


@cache
def _weights(model: str, of_task: tuple[str, ...] | None = None) -> bool:
    """Return True if the weights of ``model=NAME`` are cached or can be downloaded."""
    from efficient_ft.models.factory import missing_weights

    return missing_weights(configured([model, "recipe=none", *(of_task or ())]).model) is None


def present(data: str, root: str = "./data") -> bool:
    """Return True if the files of a published data set are in `root`."""
    from efficient_ft.data.published import MASK_SETS, PUBLISHED, TEXT_SETS, MaskSet, PublishedSet

    sources: dict[str, PublishedSet | MaskSet] = {**PUBLISHED, **MASK_SETS, **TEXT_SETS}
    source = sources[data]
    return not source.absent(source.root(root))


def _shown(table: Table, rows: Sequence[Row], options: argparse.Namespace) -> str:
    """Return the published numbers as a table. Text and Markdown also contain notes and the deviations of our runs."""
    costs = [key for key in COSTS if any(key in row.costs for row in rows)]
    columns = list(dict.fromkeys(key for row in rows for key in row.cells))
    # If a table contains no numbers (for example, only formulas), its text columns are shown.
    stated = [] if costs or columns else [key for key in rows[0].columns if key != "label"]
    header = ["row", "label", *stated, *(COSTS[key] for key in costs), *columns]
    lines: list[list[Cell]] = []
    for row in rows:
        printed = [row.cells[key].printed if key in row.cells else None for key in columns]
        own = [row.columns[key] for key in stated]
        lines.append([row.name, row.label, *own, *map(row.costs.get, costs), *printed])
    formats = {
        "row": Column(words=True),
        **{key: Column(2, title=_title(key)) for key in columns},
        **{COSTS[key]: Column(3 if number else 1) for number, key in enumerate(costs)},
        **{key: Column(words=True) for key in stated},
        "label": Column(4, words=True),
    }
    shown = render(header, lines, options.form, columns=formats, chosen=options.columns)
    if options.form not in ("text", "markdown"):
        return shown
    parts = [f"{PAPERS[table.paper]}, Table {table.number}: {table.title}\n{table.conditions}", shown]
    if table.reason:
        parts.append(f"Not run: {table.reason}")
    different = dict.fromkeys(note for row in rows for cell in row.cells.values() for note in cell.deviations)
    parts += _listed("Our runs differ from the paper as follows:", list(different))
    parts += _listed("In the paper:", table.notes)
    return "\n\n".join([_filled(part, options.form) if part != shown else part for part in parts])


def _title(column: str) -> str:
    """Return the header of an accuracy column, e.g. ``accuracy cifar10`` for ``acc_cifar10``."""
    kind, _, data = column.partition("_")
    return f"{_KINDS.get(kind, kind)} {data}"


def _filled(part: str, form: str) -> str:
    """Return a part of the output. In text format, lines are wrapped to the width of the terminal."""
    if form != "text":
        return part
    return "\n".join(paragraph(line, "  " if line.startswith("- ") else "") for line in part.split("\n"))


def _listed(title: str, notes: Sequence[str]) -> list[str]:
    return ["\n".join([title, *(f"- {note}" for note in notes)])] if notes else []


def _runs(table: Table, rows: Sequence[Row], seeds: Sequence[int], settings: Sequence[str]) -> Iterator[CellRun]:
    if not any(row.runs for row in rows):
        raise UserError(f"The table {table.name} has no reproducible accuracies. {table.reason or ''}".rstrip())
    for row in rows:
        own = of_tasks(settings, row.tasks)
        for seed in seeds:
            for column, arguments in row.runs:
                yield CellRun(row, column, seed, merged(*arguments, f"seed={seed}", *own))


def _jobs(runs: Sequence[CellRun]) -> list[Job]:
    """Compose the configuration of every run, because the configuration determines the run folder."""
    jobs = []
    for one in runs:
        config = configured(one.arguments)
        title = " ".join([one.row.name, *([one.column] if one.column else []), f"seed={one.seed}"])
        if config.cost_only or config.evaluate is not None:
            raise UserError(f"The run {title} does not train with cost_only or evaluate. For costs, use --cost.")
        if any(argument.startswith("hydra.run.dir=") for argument in one.arguments):
            raise UserError("hydra.run.dir: each run of a table requires a separate folder. Remove this setting.")
        jobs.append(Job(one.arguments, title, folder_of(config), config))
    folders = [job.folder for job in jobs]
    if len(set(folders)) < len(folders):
        same = next(job.title for job in jobs if folders.count(job.folder) > 1)
        raise UserError(
            f"With these settings, the run {same} is identical to another run. Remove the settings that replace the"
            " differences between the runs."
        )
    return jobs


def _report(
    table: Table,
    rows: Sequence[Row],
    runs: Sequence[CellRun],
    jobs: Sequence[Job],
    settings: Sequence[str],
    options: argparse.Namespace,
) -> str:
    found = _obtained(runs, jobs)
    seeds = len({one.seed for one in runs})
    columns = list(dict.fromkeys(key for row in rows for key in row.cells))
    data = options.form in DATA
    parts = ("published", "mean", "min", "max", "seeds") if data else ("published", "obtained")
    header = ["row", *(f"{key} {part}" for key in columns for part in parts)]
    lines: list[list[Cell]] = []
    for row in rows:
        line: list[Cell] = [row.name]
        for key in columns:
            printed = 100 * row.cells[key].accuracy if key in row.cells else None
            values = found.get((row.name, key), [])
            if data:
                of_seeds = (sum(values) / len(values), min(values), max(values)) if values else ()
                numbers: list[float | None] = [round(100 * one, 4) for one in of_seeds] or [None] * 3
                line += [None if printed is None else round(printed, 4), *numbers, len(values)]
            else:
                line += [None if printed is None else f"{printed:.2f}", spread(values, seeds)]
        lines.append(line)
    named = {"row": Column(words=True)}
    for key in columns:
        named |= {f"{key} {p}": Column(1 + (p == "published"), title=f"{_title(key)} {p}") for p in parts}
    shown = render(header, lines, options.form, columns=named, chosen=options.columns)
    notes = _report_notes(settings, jobs)
    if options.form not in ("text", "markdown"):
        for one in notes:
            show(one, sys.stderr)
        return shown
    title = f"{table.name}: {table.title} (values in %, mean [min…max] over seeds)"
    return "\n\n".join([_filled(title, options.form), shown, *(_filled(one, options.form) for one in notes)])


def _obtained(runs: Sequence[CellRun], jobs: Sequence[Job]) -> dict[tuple[str, str], list[float]]:
    """Return the accuracies of the finished runs, keyed by row and column, and set the results of the jobs."""
    found: dict[tuple[str, str], list[float]] = {}
    for one, job in zip(runs, jobs, strict=True):
        job.results = results = job.results or finished(job.folder, job.config)
        if results is None:
            continue
        tasks = results["accuracy"].get("tasks", {})
        for column, cell in one.row.cells.items():
            if one.column is None and cell.data in tasks:
                test = results["data"]["tasks"][cell.data]["accuracy"].get("test")
                reached = final_accuracy({**tasks[cell.data], "test": test})
            elif one.column == column:
                reached = final_accuracy(results["accuracy"])
            else:
                continue
            found.setdefault((one.row.name, column), []).append(reached)
    return found


def _report_notes(settings: Sequence[str], jobs: Sequence[Job]) -> list[str]:
    missing = [job for job in jobs if job.results is None]
    limited = [job.title for job in jobs if job.results and job.config.trainer.limit_eval_batches is not None]
    notes = []
    if other := [one for one in settings if not of_this_machine(one.partition("=")[0])]:
        notes.append(f"The runs have settings that differ from the table: {' '.join(other)}.")
    if missing:
        more = f" and {len(missing) - _NAMED} more (--commands lists all runs)" if len(missing) > _NAMED else ""
        named = ", ".join(job.title for job in missing[:_NAMED])
        notes.append(f"{len(missing)} of {len(jobs)} runs are missing: {named}{more}.")
    if len(missing) == len(jobs):
        notes.append("A report includes only runs with the same settings. Repeat the settings passed to --run.")
    notes += [f"Not read: {job.title}: {reason}" for job in missing if (reason := not_read(job.folder))]
    if limited:
        notes.append(f"trainer.limit_eval_batches restricts the evaluated images of these runs: {', '.join(limited)}.")
    return notes


def spread(values: Sequence[float], seeds: int) -> str | None:
    """Format fractions as percentages, e.g. ``97.12 [97.01…97.30], 3 seeds``, or return None if there are no values.

    `seeds` is the expected number of values.
    """
    if not values:
        return None
    from efficient_ft.report import studies

    shown = studies.spread([100 * value for value in values])
    of = f"{len(values)} of " if len(values) < seeds else ""
    return f"{shown}, {of}{seeds} seeds" if seeds > 1 else shown
