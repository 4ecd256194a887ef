"""``efficient-ft selftest``: try the promises on this machine."""

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

from efficient_ft.cli.terminal import Help, count
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_seconds
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.selftest.trial import Promise, Trial

DESCRIPTION = """\
Try the promises of docs/promises.md on this machine: runs are killed, resumed, given damaged files, swept over.

    efficient-ft selftest                     every promise in its short form, some minutes
    efficient-ft selftest 1 2 10              some of them
    efficient-ft selftest --long --json FILE  all trials, some hours

Trials run in a temporary folder, some at a time; a failed one is named with its reason, and the status is 1.
"""


@dataclass(frozen=True)
class Outcome:
    """The outcome of a trial.

    Attributes:
        promise: its number.
        name: the trial's name.
        failure: the reason why the promise is broken; None: it holds.
        measured: what the trial measured.
        seconds: how long it took.
    """

    promise: int
    name: str
    failure: str | None
    measured: dict[str, float]
    seconds: float


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the trials that `arguments` (default: the command line's) ask for; return 1 if a promise is broken.

    Raises:
        UserError: no such promise, or no trial has the name; a record of a part; this system cannot fork.
    """
    options = _parser().parse_args(arguments)
    if sys.platform == "win32":
        raise UserError("selftest needs signals and forked processes, which Windows has not.")
    from efficient_ft.selftest import children

    children.prepare_environment()
    from efficient_ft.selftest.promises import PROMISES

    numbers = {promise.number for promise in PROMISES}
    if unknown := set(options.promise) - numbers:
        raise UserError(f"There is no promise {min(unknown)}; they are numbered 1 to {max(numbers)}.")
    if options.only and options.json is not None:
        raise UserError("--json keeps a record of whole promises. Leave out --only, or --json.")
    held = _held(options.json, "long" if options.long else "short")
    _write(options.json, held)  # a file that cannot be written is better known before hours of trials
    begun, outcomes = time.monotonic(), list[Outcome]()
    for promise in PROMISES:
        if options.promise and promise.number not in options.promise:
            continue
        todo = [trial for trial in promise.trials(options.long) if options.only in trial.name]
        if todo:
            tried = _try(promise, todo, options)
            held["promises"].update(_record(tried))
            _write(options.json, held)
            outcomes += tried
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


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="efficient-ft selftest", description=DESCRIPTION, formatter_class=Help)
    parser.add_argument("promise", nargs="*", type=int, metavar="NUMBER", help="default: all of them")
    parser.add_argument("--long", action="store_true", help="all trials, not a selection")
    parser.add_argument("--only", default="", metavar="TEXT", help="only trials with TEXT in their name")
    parser.add_argument("--jobs", type=count, default=2, help="trials at a time, each with one thread (default 2)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write a record to FILE, or into it")
    parser.add_argument("--keep", action="store_true", help="keep the folders of failed trials")
    return parser


def _try(promise: Promise, trials: Sequence[Trial], options: argparse.Namespace) -> list[Outcome]:
    """Run the trials of one promise, those of load alone; print a line."""
    begun, outcomes = time.monotonic(), list[Outcome]()
    print(f"{promise.number:2}  {promise.title}: {len(trials)} trials …", end="", flush=True)
    with ThreadPoolExecutor(options.jobs) as pool:
        waiting = [pool.submit(_tried, promise.number, one, options.keep) for one in trials if not one.alone]
        try:
            outcomes += [done.result() for done in as_completed(waiting)]
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    outcomes += [_tried(promise.number, one, options.keep) for one in trials if one.alone]
    broken = sum(outcome.failure is not None for outcome in outcomes)
    print(f" {'hold' if not broken else f'{broken} FAILED'} ({format_seconds(time.monotonic() - begun)})", flush=True)
    return sorted(outcomes, key=lambda outcome: outcome.name)


def _tried(number: int, trial: Trial, keep: bool) -> Outcome:
    folder = Path(tempfile.mkdtemp(prefix="efficient_ft_selftest_"))
    begun, failure, measured = time.monotonic(), None, None
    try:
        measured = trial.function(folder, *trial.arguments)
    except Exception as error:  # a mistake in a trial is a failed trial too
        failure = f"{type(error).__name__}: {error}".replace(str(folder), "FOLDER")
        failure += f"\n(its folder: {folder})" if keep else ""
    seconds = time.monotonic() - begun
    if not keep or failure is None:
        shutil.rmtree(folder, ignore_errors=True)
    return Outcome(number, trial.name, failure, measured or {}, seconds)


def _held(file: Path | None, form: str) -> dict[str, Any]:
    """Return the record in `file`, whose other promises stay in it; an empty one if there is none.

    Raises:
        UserError: it is no such record, or one of the other form.
    """
    if file is None or not file.is_file():
        return {"form": form, "promises": {}}
    try:
        held: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if held["form"] == form and isinstance(held["promises"], dict):
            return held
    except (ValueError, TypeError, LookupError):
        pass
    raise UserError(f"--json {file}: the file holds something else than the record of a {form} selftest. Name another.")


def _write(file: Path | None, held: dict[str, Any]) -> None:
    if file is not None:
        write_text_atomically(file, json_text(held, indent=1) + "\n")


def _record(outcomes: Sequence[Outcome]) -> dict[str, Any]:
    """Return, by promise, the counts of its trials, what they measured, the failures, the machine and the date."""
    from efficient_ft.record.environment import environment

    promises: dict[str, Any] = {}
    here = environment("cpu")
    for outcome in outcomes:
        empty = {"trials": 0, "failed": [], "seconds": 0.0, "measured": {}, "environment": here}
        held = promises.setdefault(str(outcome.promise), empty)
        held["trials"] += 1
        held["seconds"] = round(held["seconds"] + outcome.seconds, 1)
        if outcome.failure is not None:
            held["failed"].append({"name": outcome.name, "failure": outcome.failure.splitlines()[0][:500]})
        for key, value in outcome.measured.items():
            # Differences and limits are largest values; counts are summed.
            combine = max if key.startswith(("largest", "seconds", "peak", "growth")) else sum
            held["measured"][key] = combine((held["measured"].get(key, 0), value))
    return promises
