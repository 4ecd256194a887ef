"""Promise 2: a resumed run is the same run."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from itertools import product
from pathlib import Path

from efficient_ft.selftest.children import returned, run_child
from efficient_ft.selftest.methods import method_cases
from efficient_ft.selftest.runs import configuration, require_same_run, train, write_images
from efficient_ft.selftest.trial import Trial, require
from efficient_ft.training import checkpoint

#: By where a run of two epochs of 3 steps is killed: the interruption, its number, and the step of the last checkpoint.
_PLACES = {"at the end of an epoch": ("epoch", 1, 3), "in the middle of an epoch": ("SIGKILL", 5, 4)}


def trials(long: bool) -> Iterator[Trial]:
    """Yield a trial for every method, place in the epoch and number of worker processes; short: one for each method."""
    forms = list(product(_PLACES, (0, 2)))
    for number, case in enumerate(method_cases(long)):
        for place, workers in forms if long else [forms[(0, 2, 0, 2, 1, 0, 2, 3)[number % 8]]]:
            yield Trial(f"{case}, {place}, {workers} workers", _continued, (case, place, workers))


def _continued(folder: Path, case: str, place: str, workers: int) -> None:
    """Kill a run after the checkpoint of a step, continue it, and compare it with a run without interruption."""
    write_images(folder / "images")
    plain = configuration(folder / "images", case, data__num_workers=workers)
    interruption, at, saved = _PLACES[place]
    done = run_child(train, plain, folder / "broken", interruption, at, output=folder / "broken.log")
    require(done.status == -signal.SIGKILL, f"status {done.status}\n{done.printed}")
    step = checkpoint.read(folder / "broken" / checkpoint.NAME)["global_step"]
    require(step == saved, f"the checkpoint is of step {step}, not {saved}")
    for name in ("broken", "straight"):
        returned(train, plain, folder / name, output=folder / f"{name}_whole.log")
    require_same_run(folder / "broken", folder / "straight")
