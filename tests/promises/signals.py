"""Promise 5: SIGTERM and Ctrl-C at any moment after the first second."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from efficient_ft.training.callbacks import recorder
from efficient_ft.training.output import checkpoint
from tests.promises.children import Child, returned, wait_until
from tests.promises.runs import arguments, program, require_same_run, write_images
from tests.promises.trial import Trial, require

_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
#: Signals that a terminal, ``timeout``, a scheduler or a service manager sends to a process group.
_TO_GROUPS = (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGUSR1)
#: Delay in seconds until a forked program responds to signals.
_FIRST_MOMENT = 0.05
#: Setting with enough epochs that the signal arrives before the end.
_LONGER = "trainer.epochs=8"


def trials(long: bool) -> Iterator[Trial]:
    """Yield signals at random moments of a run, and signals to a program that loads its libraries."""
    chance = random.Random(0)
    for number in range(100 if long else 4):
        for signal_number in _STATUS:
            name = f"{signal_number.name} at random moment {number + 1}"
            yield Trial(name, _at_moment, (signal_number, chance.random(), number % 3 == 2))
    for number in range(40 if long else 4):
        trial = (_TO_GROUPS[number % 4], 0.3 + 0.7 * chance.random(), True, True)
        yield Trial(f"{trial[0].name} to a process group with workers, number {number + 1}", _at_moment, trial)
    for number in range(10 if long else 1):
        for signal_number in _STATUS:
            seconds = 1 + 6 * chance.random()
            name = f"{signal_number.name} to a new program, number {number + 1}"
            yield Trial(name, _to_a_new_program, (signal_number, seconds))


def _at_moment(
    folder: Path, number: signal.Signals, share: float, workers: bool, group: bool = False
) -> dict[str, float]:
    """Signal a run after a fraction of its duration, and continue the run. The outcome equals an uninterrupted run.

    Args:
        folder: Empty folder.
        number: Number of the signal.
        share: Fraction of the duration of a run.
        workers: If True, load the data in two processes.
        group: If True, also signal the workers, and send every signal except SIGINT twice.
    """
    write_images(folder / "images")
    more = (_LONGER, f"data.num_workers={2 if workers else 0}")
    begun = time.monotonic()
    straight = arguments(folder / "images", folder / "straight", *more)
    returned(_program, straight, folder / "straight_began", output=folder / "straight.log")
    seconds = share * (time.monotonic() - begun)
    command = arguments(folder / "images", folder / "run", *more)
    child = Child(_program, command, folder / "began", output=folder / "run.log")
    require(wait_until((folder / "began").exists), "the program did not begin")
    time.sleep(_FIRST_MOMENT + seconds)
    if not group:
        child.signal(number)
    for _ in range(2 if group and number != signal.SIGINT else int(group)):
        child.signal_group(number)
    done = child.ended()
    saved = checkpoint.exists(folder / "run" / checkpoint.NAME)
    if done.status != 0:  # otherwise the run is finished
        require(done.status == 128 + number, f"status {done.status}, not {128 + number}\n{done.printed[-3000:]}")
        require("Traceback" not in done.printed, done.printed[-3000:])
        require("memory" not in done.said, f"a requested stop is reported as lack of memory: {done.said}")
        require("same command" in done.unwrapped, f"it does not say how to continue: {done.said}")
        rows = folder / "run" / "metrics.jsonl"
        trained = rows.is_file() and rows.stat().st_size > 0
        require(saved or not trained, f"it had trained, and saved nothing\n{done.printed[-3000:]}")
    returned(_program, command, folder / "continues", output=folder / "continued.log")
    require_same_run(folder / "run", folder / "straight")
    return {"interrupted": float(done.status != 0), "with_a_checkpoint": float(saved and done.status != 0)}


def _program(words: list[str], began: Path) -> None:
    """Create the file `began` and run the program with metrics of each step. It must run in a child process."""
    recorder.RECORD_EVERY = 1
    began.touch()
    program(words)


def _to_a_new_program(folder: Path, number: signal.Signals, seconds: float) -> None:
    """Start a program and signal it after `seconds`."""
    write_images(folder / "images")
    command = [
        sys.executable,
        "-m",
        "efficient_ft",
        *arguments(folder / "images", folder / "run", "trainer.epochs=500"),
    ]
    with (folder / "run.log").open("w") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT, start_new_session=True)
        try:
            time.sleep(seconds)
            process.send_signal(number)
            status = process.wait(120)
        except subprocess.TimeoutExpired:
            status = 0
        finally:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    printed = (folder / "run.log").read_text()
    require(status == _STATUS[number], f"status {status}, not {_STATUS[number]}\n{printed[-3000:]}")
    require("Traceback" not in printed, printed[-3000:])
