"""``efficient-ft study FOLDER``: compare methods on one network and data set, each at its best learning rate."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from efficient_ft.cli.hydra import processes
from efficient_ft.cli.hydra.compose import configured
from efficient_ft.cli.hydra.jobs import Job, command, run_jobs, this_program
from efficient_ft.cli.hydra.rows import check_settings, merged
from efficient_ft.cli.hydra.variants import folder_of
from efficient_ft.cli.terminal import Help, add_columns_option, words
from efficient_ft.config import Config, data_configs, setting_names
from efficient_ft.core.errors import UserError, did_you_mean
from efficient_ft.core.format import format_bytes, format_number, format_seconds
from efficient_ft.core.sheet import Column, render
from efficient_ft.core.terminal import show
from efficient_ft.core.text import paragraph, plain_line
from efficient_ft.record.lr_test import NAME, read_suggestion
from efficient_ft.record.study import Records, StudyRun, curve_of, shown
from efficient_ft.record.study_definition import chosen_rows

DESCRIPTION = """\
Run a study. FOLDER/study.yaml defines the rows (methods), the setting that is tuned for each row, and the seeds.

    efficient-ft study                                list the studies below the current folder
    efficient-ft study results/deit_tiny_caltech101 data.root=DIR model.weights=FILE jobs=2
    efficient-ft study results/deit_tiny_caltech101 --report

The command starts the unfinished runs. The same command continues an interrupted study. --report prints the table of
the finished runs without starting a run. KEY=VALUE settings apply only to this machine, for example the image folder or
the number of parallel jobs, and are not recorded. FOLDER/records.json contains a record of every finished run.
"""

#: Settings that do not change the results of a study, like the settings of `logger`.
OF_THIS_MACHINE = ("data.root", "data.download", "data.num_workers", "model.weights", "jobs", "job_timeout",
                   "trainer.accelerator", "trainer.progress", "logger")  # fmt: skip


def of_this_machine(key: str) -> bool:
    """Return True if the setting does not change the results of a study."""
    return key in OF_THIS_MACHINE or key.startswith("logger.")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run or report a study. The exit status is 1 if a run has failed."""
    parser = argparse.ArgumentParser(prog="efficient-ft study", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("folder", type=Path, nargs="?", metavar="FOLDER", help="folder that contains study.yaml")
    parser.add_argument("settings", nargs="*", metavar="KEY=VALUE", help="settings for this machine")
    parser.add_argument("--rows", type=words, default=[], metavar="ROW,...", help="only these rows (default: all)")
    parser.add_argument("--tune-only", action="store_true", help="run only the tuning, without further seeds")
    parser.add_argument("--report", action="store_true", help="print the table without starting a run")
    add_columns_option(parser)
    options = parser.parse_intermixed_args(arguments)
    if options.folder is None:
        found = sorted(file.parent for depth in ("*", "*/*") for file in Path().glob(f"{depth}/study.yaml"))
        lines = ["Studies here:", *(f"  {plain_line(str(folder))}" for folder in found)]
        none = ["No study.yaml was found up to two levels below the current folder."]
        print("\n".join(["Usage: efficient-ft study FOLDER", *(lines if found else none)]))
        return
    check_settings(options.settings)
    for key in (word.partition("=")[0] for word in options.settings):
        if not of_this_machine(key) and not re.fullmatch(r"tasks\.\w+\.(root|download|num_workers)", key):
            raise UserError(
                f"The setting {key} changes the runs of the study. Set {key} in {options.folder / 'study.yaml'}. The"
                f" command line accepts only settings that are not recorded: {', '.join(OF_THIS_MACHINE)}."
            )
    records = Records(options.folder)
    rows = chosen_rows(records.study, options.rows)
    for name in records.study.tune.ignore:
        if name not in setting_names() and not name.startswith("method."):
            raise UserError(f"tune.ignore lists {name}, which is not a setting.{did_you_mean(name, setting_names())}")
    failed = False
    if not options.report:
        _test_learning_rates(records, rows, options.settings)
        tried: set[StudyRun] = set()  # Failed runs are not repeated.
        while runs := [run for run in records.tuning_runs(rows) if run not in tried]:
            tried.update(runs)
            failed = _run(records, runs, options.settings) or failed
        if not options.tune_only:
            failed = _run(records, records.seed_runs(rows), options.settings) or failed
    print(report(records, rows, options.columns))
    if failed:
        raise SystemExit(1)


def _test_learning_rates(records: Records, rows: Sequence[str], settings: Sequence[str]) -> None:
    """Run the learning rate range tests at whose suggestions the search starts (``start: lr_test``)."""
    untested = records.untested(rows)
    if untested:
        records.refuse_unwritable()
    for row in untested:
        tested = records.tested(row)
        arguments = [one for one in merged(*tested, *settings) if not one.startswith(("jobs=", "job_timeout="))]
        configured(arguments)  # Report invalid settings before a process starts.
        out = Path("outputs", "lr_tests", records.path.parent.resolve().name, re.sub(r"[^\w.+-]+", "_", row))
        show(f"Learning rate range test: {row}")
        (out / NAME).unlink(missing_ok=True)
        ended = processes.run([*this_program(), "lr", *arguments, "--out", str(out)])
        if (out / NAME).is_file():
            records.starts.add(row, tested, read_suggestion(out))
        else:
            reason = ended.failure or "it wrote no result"
            show(f"The test of {row} failed ({reason}). The search starts at the middle values.", sys.stderr)


def _run(records: Records, runs: Sequence[StudyRun], settings: Sequence[str]) -> bool:
    """Start the runs that have no record, and record their results. Return True if a run has failed."""
    jobs: list[Job] = []
    run_of: dict[int, StudyRun] = {}
    for run in runs:
        if records.find(run) is not None:
            continue
        arguments = tuple(merged(*run.arguments, *settings))
        title = f"{run.row} {records.study.tune.setting}={shown(run.value)} seed={run.seed}"
        if run.steps is not None:
            arguments, title = (*arguments, f"pause_at={run.steps}"), f"{title} (paused after {run.steps} steps)"
        config = configured(arguments)
        job = Job(arguments, title, folder_of(config), config)
        if not job.trains:
            raise UserError(f"The run {title} does not train with cost_only or evaluate. Remove this setting.")
        if same := next((other for other in jobs if other.folder == job.folder), None):
            raise UserError(f"The runs {title} and {same.title} are identical. Remove one of the rows.")
        jobs.append(job)
        run_of[id(job)] = run
    if not jobs:
        return False
    records.refuse_unwritable()
    _refuse_other_images(records, {run_of[id(job)]: job.config for job in jobs})

    def record(job: Job) -> None:
        run = run_of[id(job)]
        if job.results is not None and (paused := job.results.get("paused")) is not None:
            records.add_paused(run, paused["value"], curve_of(job.folder, paused))
        elif job.results is not None:
            curve = curve_of(job.folder, job.results["accuracy"])
            records.add(replace(run, steps=None), job.results, curve)  # type: ignore[arg-type]
        elif job.diverged and job.failure is not None:
            records.add_diverged(run, job.failure)

    try:
        run_jobs(jobs, lambda job: command(None, None, None, job.arguments), jobs[0].config.jobs, record)
    except SystemExit as end:
        # Status 1 means that a job has failed. The table lists failed jobs. Any other status ends the study.
        if end.code != 1:
            raise
    return any(job.failure is not None and not job.diverged for job in jobs)


def _refuse_other_images(records: Records, configs: Mapping[StudyRun, Config]) -> None:
    """Raise a `UserError` if the images of a run differ from the recorded images.

    Call this function before any run starts.
    """
    if not any(record.get("images") for record in records.runs):
        return
    from efficient_ft.data import read_data

    digests: dict[str, str] = {}
    for run, config in configs.items():
        key = str([(one.name, one.root) for one in data_configs(config)])
        if key not in digests:
            digests[key] = "+".join(read_data(one).digest() for one in data_configs(config))
        records.refuse_other_images(run, digests[key])


def report(records: Records, rows: Sequence[str], columns: Sequence[str] = ()) -> str:
    """Return a table of the finished runs in `rows`, followed by notes on missing runs."""
    from efficient_ft.report.studies import notes, study_cells

    header, lines = study_cells(records, rows)
    row, tuned, accuracy, *_ = header
    saved = next(name for name in header if name.startswith("saved"))
    points = next((name for name in header if name.startswith("points")), "points")
    named = {
        row: Column(words=True),
        accuracy: Column(),
        points: Column(1),
        "peak MiB": Column(1, lambda value: format_bytes(value * 2**20), "peak"),
        "TFLOPs": Column(1, lambda value: format_number(value * 1e12), "FLOPs of the run"),
        "seconds": Column(2, format_seconds, "time"),
        tuned: Column(2),
        saved: Column(3, lambda value: format_bytes(value * 1024), saved.replace("KiB ", "")),
        "seeds": Column(4),
        "times fewer FLOPs": Column(4, format_number),
        "times fewer bytes": Column(4, format_number),
        "process MiB": Column(5, lambda value: format_bytes(value * 2**20), "used by training"),
    }
    columns_of = {name: column for name, column in named.items() if name in header}
    table = render(header, lines, "text", columns=columns_of, chosen=columns)
    return "\n".join([paragraph(records.study.title), table, *(paragraph(one, "  ") for one in notes(records, rows))])
