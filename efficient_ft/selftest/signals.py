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

from efficient_ft.selftest.children import Child, returned
from efficient_ft.selftest.runs import arguments, program, require_same_run, write_images
from efficient_ft.selftest.trial import Trial, require
from efficient_ft.training import checkpoint

_STATUS = {signal.SIGINT: 130, signal.SIGTERM: 143}
#: Enough epochs for the signal to come before the end.
_LONGER = "trainer.epochs=8"


def trials(long: bool) -> Iterator[Trial]:
    """Yield signals at random moments of a run, and to a program that loads its libraries."""
    chance = random.Random(0)
    for number in range(100 if long else 4):
        for signal_number in _STATUS:
            name = f"{signal_number.name} at random moment {number + 1}"
            yield Trial(name, _at_moment, (signal_number, chance.random(), number % 3 == 2))
    for number in range(10 if long else 1):
        for signal_number in _STATUS:
            seconds = 1 + 6 * chance.random()
            name = f"{signal_number.name} to a new program, number {number + 1}"
            yield Trial(name, _to_a_new_program, (signal_number, seconds))


def _at_moment(folder: Path, number: signal.Signals, share: float, workers: bool) -> dict[str, float]:
    """Signal a run after a share of its time; the same command ends it as a run without interruption ends."""
    write_images(folder / "images")
    more = (_LONGER, f"data.num_workers={2 if workers else 0}")
    begun = time.monotonic()
    returned(program, arguments(folder / "images", folder / "straight", *more), output=folder / "straight.log")
    seconds = share * (time.monotonic() - begun)
    command = arguments(folder / "images", folder / "run", *more)
    child = Child(program, command, output=folder / "run.log")
    time.sleep(seconds)
    child.signal(number)
    done = child.ended()
    saved = checkpoint.exists(folder / "run" / checkpoint.NAME)
    if done.status != 0:  # else it had finished
        require(done.status == _STATUS[number], f"status {done.status}, not {_STATUS[number]}\n{done.printed[-3000:]}")
        require("Traceback" not in done.printed, done.printed[-3000:])
        require("same command" in done.printed, f"it does not say how to continue: {done.said}")
        trained = (folder / "run" / "metrics.jsonl").exists()  # made when the training begins
        require(saved or not trained, f"it was training, and saved nothing\n{done.printed[-3000:]}")
    returned(program, command, output=folder / "continued.log")
    require_same_run(folder / "run", folder / "straight")
    return {"interrupted": float(done.status != 0), "with_a_checkpoint": float(saved and done.status != 0)}


def _to_a_new_program(folder: Path, number: signal.Signals, seconds: float) -> None:
    """Signal a program that was started `seconds` ago."""
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
