"""Promise 1: a checkpoint is never lost."""

from __future__ import annotations

import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from efficient_ft.training.output import checkpoint
from tests.promises.children import Child, returned, run_child
from tests.promises.methods import method_cases
from tests.promises.runs import SAVED_AFTER, STEPS, configuration, require_same_run, train, write_images
from tests.promises.trial import Trial, require

#: Cases that the short form also tries: methods with additional modules, choices or thresholds.
_ALSO_SHORT = {"bsr", "bsr_moe", "lhe", "swat", "lora", "lora_fa", "tinytl", "repnet", "stack"}
#: This case compiles for most of a minute in every process, so the long form tries only one of its events.
_COMPILES = "low_bit auto"
#: Number of trials into which the file events of a run are divided.
_PARTS = 4


def trials(long: bool) -> Iterator[Trial]:
    """Yield kills at file events, at random moments and within a write, disk faults, and damaged checkpoints."""
    cases = method_cases(long)
    for number, case in enumerate(cases):
        if case == "full" or (long and case != _COMPILES):
            for part in range(_PARTS):
                yield Trial(f"kill at file events, {case}, part {part + 1} of {_PARTS}", _at_events, (case, part))
        elif long or set(case.split()) & _ALSO_SHORT:  # one event per method, which differs between methods
            yield Trial(f"kill at a file event, {case}", _at_events, (case, None, number))
    moments = 200 if long else 20
    chance = random.Random(0)
    quick = [case for case in cases if case != _COMPILES]
    for number in range(moments):
        case = quick[number % len(quick)]
        yield Trial(f"kill at random moment {number + 1}, {case}", _at_moment, (case, chance.random()))
    for size in (100, 20_000, 60_000) if long else (20_000,):
        yield Trial(f"kill within the write of byte {size}", _within_a_write, (size,))
    for part in range(_PARTS) if long else (0,):
        yield Trial(f"kill while resume=never moves a run away, part {part + 1} of {_PARTS}", _moved_away, (part,))
    yield Trial("a full disk", _full_disk)
    yield Trial("$TMPDIR on another file system", _other_tmpdir)
    for share in (0.0, 0.1, 0.5, 0.99) if long else (0.5,):
        yield Trial(f"a checkpoint cut off at {100 * share:.0f} %", _cut_off, (share,))


def _started(folder: Path, case: str = "full") -> tuple[dict[str, Any], Path, list[str]]:
    """Return the configuration of a run, the folder of the uninterrupted run, and its file events."""
    write_images(folder / "images")
    plain = configuration(folder / "images", case)
    events = returned(train, plain, folder / "straight", "events", output=folder / "straight.log")
    return plain, folder / "straight", events


def _continue(plain: dict[str, Any], run: Path, straight: Path) -> None:
    """Continue the run in `run`, and require the outcome of the uninterrupted run in `straight`."""
    returned(train, plain, run, output=run.with_name(f"{run.name}_continued.log"))
    require_same_run(run, straight)


def _at_events(folder: Path, case: str, part: int | None, one: int = 0) -> dict[str, float]:
    """Continue a run from the files that a SIGKILL before a file event leaves.

    `part` selects every fourth event. If `part` is None, `one` selects a single event.
    """
    write_images(folder / "images")
    plain = configuration(folder / "images", case)
    straight, copies = folder / "straight", folder / "straight_copies"
    events = returned(train, plain, straight, "copies", output=folder / "straight.log")
    numbers = range(part + 1, len(events) + 1, _PARTS) if part is not None else [19 + one % (len(events) - 19)]
    for number in numbers:
        run = folder / f"killed_{number}"
        if (copies / str(number)).is_dir():  # otherwise the run folder does not exist yet
            (copies / str(number)).rename(run)
        saved = sum(_saves(event) for event in events[: number - 1])
        if saved:
            step = checkpoint.read(run / checkpoint.NAME)["global_step"]
            what = f"event {number} ({events[number - 1]})"
            require(step == SAVED_AFTER[saved - 1], f"{what}: the checkpoint is of step {step}")
        _continue(plain, run, straight)
    return {"kills": len(numbers)}


def _at_moment(folder: Path, case: str, share: float) -> dict[str, float]:
    """Kill a run after the fraction `share` of the time of an uninterrupted run."""
    begun = time.monotonic()
    plain, straight, _ = _started(folder, case)
    seconds = share * (time.monotonic() - begun)
    child = Child(train, plain, folder / "killed", output=folder / "killed.log")
    time.sleep(seconds)
    child.signal(signal.SIGKILL)
    done = child.ended()
    require(done.status in (-signal.SIGKILL, 0), f"status {done.status}\n{done.printed}")
    _continue(plain, folder / "killed", straight)
    return {"kills": float(done.status != 0)}


def _saves(event: str) -> bool:
    """Return True if a file event renames a new checkpoint from its temporary folder."""
    return event.startswith("rename ") and event.endswith(f".tmp/{checkpoint.NAME}")


def _moved_away(folder: Path, part: int) -> dict[str, float]:
    """Kill a run with resume=never before its first file events. The earlier run remains complete in one folder."""
    plain, straight, _ = _started(folder)
    again = {**plain, "resume": "never"}
    before = _contents(straight)
    run = folder / "counted" / "run"
    shutil.copytree(straight, run)
    events = returned(train, again, run, "events", output=folder / "events.log")
    numbers = range(part + 1, min(len(events), 24) + 1, _PARTS)
    for number in numbers:
        run = folder / f"killed_{number}" / "run"
        shutil.copytree(straight, run)
        done = run_child(train, again, run, "event", number, output=folder / f"killed_{number}.log")
        what = f"event {number} ({events[number - 1]})"
        require(done.status == -signal.SIGKILL, f"{what} was not reached: status {done.status}\n{done.printed}")
        moved = run.with_name("run.1")
        require(_contents(moved if moved.is_dir() else run) == before, f"{what}: the earlier run is not whole")
        returned(train, again, run, output=folder / f"again_{number}.log")
        require(_contents(moved) == before, f"{what}: the earlier run was not kept by the next command")
        require_same_run(run, straight)
    return {"kills": len(numbers)}


def _contents(run: Path) -> dict[str, bytes]:
    """Return the contents of a run's files by name."""
    return {file.name: file.read_bytes() for file in run.iterdir() if file.is_file() and file.name != ".lock"}


def _within_a_write(folder: Path, size: int) -> None:
    """Kill a run within a write. The system kills the run when a file becomes longer than `size` bytes."""
    plain, straight, _ = _started(folder)
    done = run_child(train, plain, folder / "killed", "write", size, output=folder / "killed.log")
    require(done.status == -signal.SIGXFSZ, f"no write was so long: status {done.status}\n{done.printed}")
    step = checkpoint.read(folder / "killed" / checkpoint.NAME)["global_step"]
    require(step == 4, f"the checkpoint is of step {step}, not 4")
    _continue(plain, folder / "killed", straight)


def _full_disk(folder: Path) -> dict[str, float]:
    """Fill the disk in the middle of a run, free space, and continue the run."""
    plain, straight, _ = _started(folder)
    with _small_disk(folder / "disk") as real:
        run = folder / "disk" / "run"
        if real:  # leaves space for one checkpoint, but not for two
            taken = sum(file.stat().st_size for file in straight.iterdir())
            (folder / "disk" / "filled").write_bytes(bytes(max(0, 2**20 - int(0.8 * taken))))
        done = run_child(train, plain, run, *(() if real else ("full", 2000)), output=folder / "full.log")
        require(done.status == 2, f"status {done.status}\n{done.printed}")
        require("Traceback" not in done.printed, done.printed)
        require("the same command continues" in done.said, f"the last line is: {done.said}")
        require(str(run) in done.said, f"the folder is not named: {done.said}")
        (folder / "disk" / "filled").unlink(missing_ok=True)
        (folder / "disk" / "filled").touch()
        if not real:
            step = checkpoint.read(run / checkpoint.NAME)["global_step"]
            require(step == 4, f"the checkpoint is of step {step}, not 4")
        _continue(plain, run, straight)
    return {"real_disk": float(real)}


@contextmanager
def _small_disk(at: Path) -> Iterator[bool]:
    """Mount a file system of 1 MiB at `at` and yield True, or yield False if only root may mount."""
    at.mkdir()
    mount = ["mount", "-t", "tmpfs", "-o", "size=1m", "none", str(at)]
    try:
        real = subprocess.run(mount, capture_output=True).returncode == 0
    except FileNotFoundError:
        real = False
    try:
        yield real
    finally:
        if real:
            subprocess.run(["umount", "-l", str(at)], capture_output=True)


def _other_tmpdir(folder: Path) -> dict[str, float]:
    """Kill a run whose $TMPDIR is on another file system, if one exists."""
    elsewhere = Path("/dev/shm")
    other = elsewhere.is_dir() and elsewhere.stat().st_dev != folder.stat().st_dev
    environment = {"TMPDIR": str(elsewhere)} if other else {}
    plain, straight, events = _started(folder)
    saves = [n for n, event in enumerate(events, start=1) if _saves(event)]
    for number in (saves[1], saves[1] + 1):
        run = folder / f"killed_{number}"
        output = folder / f"killed_{number}.log"
        done = run_child(train, plain, run, "event", number, output=output, environment=environment)
        require(done.status == -signal.SIGKILL, f"status {done.status}\n{done.printed}")
        _continue(plain, run, straight)
    return {"other_file_system": float(other)}


def _cut_off(folder: Path, share: float) -> None:
    """Truncate the last checkpoint of a killed run. The run continues from the previous checkpoint."""
    plain, straight, _ = _started(folder)
    run = folder / "killed"
    done = run_child(train, plain, run, "SIGKILL", STEPS - 1, output=folder / "killed.log")
    require(done.status == -signal.SIGKILL, f"status {done.status}\n{done.printed}")
    latest = run / checkpoint.NAME
    require(checkpoint.read(latest)["global_step"] == 4, "the last checkpoint is not of step 4")
    with latest.open("rb+") as file:
        file.truncate(int(share * latest.stat().st_size))
    previous = checkpoint.previous(latest)
    require(checkpoint.read(previous)["global_step"] == 3, "the previous checkpoint is not of step 3")
    _continue(plain, run, straight)
    said = (folder / "killed_continued.log").read_text(encoding="utf-8")
    require("is damaged. The previous checkpoint" in said, f"the damage is not said:\n{said}")
