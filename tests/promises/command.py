"""The part of ``efficient-ft selftest`` that requires a checkout: run trials and report their outcomes."""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_seconds
from efficient_ft.record.files import json_text, write_text_atomically
from tests.promises import children
from tests.promises.trial import Promise, Trial


@dataclass(frozen=True)
class Outcome:
    """Outcome of a trial.

    Attributes:
        promise: Number of the promise.
        name: Name of the trial.
        failure: Reason of the failure, or None if the trial passed.
        measured: Values that the trial measured.
        seconds: Duration of the trial.
    """

    promise: int
    name: str
    failure: str | None
    measured: dict[str, float]
    seconds: float


def run(options: argparse.Namespace) -> int:
    """Run the trials that the parsed command line `options` selects.

    Returns:
        int: 1 if a trial fails, 0 otherwise.

    Raises:
        UserError: If a promise or a trial is unknown, or if the record cannot store the results.
    """
    children.prepare_environment()  # must run before the import of torch
    from tests.promises import promises

    numbers = {promise.number for promise in promises.PROMISES}
    if unknown := set(options.promise) - numbers:
        raise UserError(f"There is no promise {min(unknown)}. The promises have the numbers 1 to {max(numbers)}.")
    if options.only and options.json is not None:
        raise UserError("--json records whole promises. Remove --only or --json.")
    record = _read_record(options.json, "long" if options.long else "short")
    _write(options.json, record)  # reports an unwritable file before the trials, which can take hours
    begun, outcomes = time.monotonic(), list[Outcome]()
    for promise in promises.PROMISES:
        if options.promise and promise.number not in options.promise:
            continue
        selected = [trial for trial in promise.trials(options.long) if options.only in trial.name]
        if selected:
            finished = _run_promise(promise, selected, options)
            record["promises"].update(_summary(finished))
            _write(options.json, record)
            outcomes += finished
    if not outcomes:
        raise UserError(f"--only {options.only}: no trial has this in its name.")
    broken = [outcome for outcome in outcomes if outcome.failure is not None]
    seconds = time.monotonic() - begun
    print(f"\n{len(outcomes)} trials, {len(broken)} failed, {format_seconds(seconds)}", flush=True)
    for outcome in broken:
        print(f"\nPromise {outcome.promise}, {outcome.name}:\n{outcome.failure}", file=sys.stderr)
    if options.json is not None:
        print(f"Record: {options.json}")
    return 1 if broken else 0


def _run_promise(promise: Promise, trials: Sequence[Trial], options: argparse.Namespace) -> list[Outcome]:
    """Run the trials of one promise, parallel trials first, and print a line."""
    begun, outcomes = time.monotonic(), list[Outcome]()
    print(f"{promise.number:2}  {promise.title}: {len(trials)} trials …", end="", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(_run_trial, promise.number, one, options.keep) for one in trials if not one.alone]
        try:
            outcomes += [done.result() for done in as_completed(waiting)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes += [_run_trial(promise.number, one, options.keep) for one in trials if one.alone]
    broken = sum(outcome.failure is not None for outcome in outcomes)
    print(f" {'hold' if not broken else f'{broken} FAILED'} ({format_seconds(time.monotonic() - begun)})", flush=True)
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _run_trial(number: int, trial: Trial, keep: bool) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="efficient_ft_selftest_"))
    begun, failure, measured = time.monotonic(), None, None
    try:
        measured = trial.function(folder, *trial.arguments)
    except Exception as error:  # an error of the trial is also a failure
        failure = f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")
        failure += f"\n(its folder: {folder})" if keep else ""
    seconds = time.monotonic() - begun
    if not keep or failure is None:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(number, trial.name, failure, measured or {}, seconds)


def _read_record(file: Path | None, form: str) -> dict[str, Any]:
    """Return the record in `file`, or an empty record if there is no file. Promises that do not run keep their entries.

    Raises:
        UserError: If the file is not a record of this form.
    """
    if file is None or not file.is_file():
        return {"form": form, "promises": {}}
    try:
        record: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if record["form"] == form and isinstance(record["promises"], dict):
            return record
    except (ValueError, TypeError, LookupError):
        pass
    raise UserError(f"--json {file}: the file is not the record of a {form} selftest. Choose another file.")


def _write(file: Path | None, record: dict[str, Any]) -> None:
    if file is not None:
        write_text_atomically(file, json_text(record, indent=1) + "\n")


def _summary(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return, for each promise, the number of trials, the failures, the measured values and the environment."""
    from efficient_ft.record.environment import environment

    summary: dict[str, Any] = {}
    here = environment("cpu")
    for outcome in outcomes:
        empty = {"trials": 0, "failed": [], "seconds": 0.0, "measured": {}, "environment": here}
        entry = summary.setdefault(str(outcome.promise), empty)
        entry["trials"] += 1
        entry["seconds"] = round(entry["seconds"] + outcome.seconds, 1)
        if outcome.failure is not None:
            entry["failed"].append({"name": outcome.name, "failure": outcome.failure.splitlines()[0][:500]})
        for key, value in outcome.measured.items():
            # The maximum is kept for differences and limits. Counts are summed.
            combine = max if key.startswith(("largest", "seconds", "peak", "growth")) else sum
            entry["measured"][key] = combine((entry["measured"].get(key, 0), value))
    return summary
