"""Promise 2: a resumed run is the same run."""

from __future__ import annotations

import shutil
import signal
from collections.abc import Callable, Iterator
from itertools import product
from pathlib import Path

from efficient_ft.training.output import checkpoint
from tests.promises.children import returned, run_child
from tests.promises.methods import method_cases
from tests.promises.runs import configuration, require_same_run, train, write_images
from tests.promises.trial import Trial, require

#: By place: the kind of interruption of a run of two epochs of 3 steps, its epoch or step, and the step of the last
#: checkpoint.
_PLACES = {"at the end of an epoch": ("epoch", 1, 3), "in the middle of an epoch": ("SIGKILL", 5, 4)}


def trials(long: bool) -> Iterator[Trial]:
    """Yield a trial for every method, place in the epoch and number of workers (short form: one trial per method)."""
    forms = list(product(_PLACES, (0, 2)))
    for number, case in enumerate(method_cases(long)):
        for place, workers in forms if long else [forms[(0, 2, 0, 2, 1, 0, 2, 3)[number % 8]]]:
            yield Trial(f"{case}, {place}, {workers} workers", _continued, (case, place, workers))
    for change in _CHANGES:
        yield Trial(change, _changed, (change,))


def _exchange(images: Path) -> None:
    (images / "0").rename(images / "x")
    (images / "1").rename(images / "0")
    (images / "x").rename(images / "1")


def _edit(images: Path) -> None:
    file = images / "2" / "05.png"
    file.write_bytes(file.read_bytes()[:-1] + b"\0")


def _replace(images: Path) -> None:
    (images / "3" / "07.png").write_bytes((images / "3" / "08.png").read_bytes())


#: Changes of a data set before a run continues, and the file that the message names.
_CHANGES: dict[str, tuple[Callable[[Path], None], str]] = {
    "class folders 0 and 1 exchanged": (_exchange, "0/00.png"),
    "a byte of a file edited": (_edit, "2/05.png"),
    "a file replaced by another": (_replace, "3/07.png"),
}


def _changed(folder: Path, change: str) -> None:
    """Require that a killed run is rejected after a change of its data, and continues after the data are restored."""
    images, run = folder / "images", folder / "run"
    write_images(images)
    shutil.copytree(images, folder / "copy", copy_function=shutil.copyfile)  # does not copy modification times
    plain = configuration(images)
    returned(train, plain, folder / "straight", output=folder / "straight.log")
    done = run_child(train, plain, run, "SIGKILL", 4, output=folder / "run.log")
    require(done.status == -signal.SIGKILL, f"status {done.status}\n{done.printed}")
    before = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    alter, named = _CHANGES[change]
    alter(images)
    refused = run_child(train, plain, run, output=folder / "refused.log")
    require(refused.status == 2, f"status {refused.status}, not 2\n{refused.printed}")
    said = refused.unwrapped
    require("have changed since the run began" in said and named in said, f"the change is not named: {said}")
    after = {file.name: file.read_bytes() for file in run.iterdir() if file.is_file()}
    require(after == before, "the refused command has changed the run folder")
    shutil.rmtree(images)
    (folder / "copy").rename(images)
    returned(train, plain, run, output=folder / "continued.log")
    require_same_run(run, folder / "straight")


def _continued(folder: Path, case: str, place: str, workers: int) -> None:
    """Kill a run after a checkpoint, continue the run, and compare it with an uninterrupted run."""
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
