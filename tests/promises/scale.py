"""Promise 9: a large data set, many runs and many steps."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from efficient_ft.core.format import format_bytes, format_seconds
from tests.promises import load
from tests.promises.children import returned
from tests.promises.runs import configuration, train, write_images
from tests.promises.trial import Trial, require

#: Limits: seconds and bytes for a million files, and seconds for a thousand runs.
_FILES_SECONDS, _FILES_BYTES, _COLLECT_SECONDS = 60.0, 2**30, 5.0
#: Limit of the growth of a process in bytes.
_GROWTH_BYTES = 16 * 2**20
#: Methods with a state, and the settings that they require with the smallest network. They run for fewer steps.
_WITH_STATE: dict[str, tuple[str, ...]] = {
    "alast": ("model.kwargs.depth=2", "method.alast.num_layers=1"),
    "mesa": (),
    "swat": (),
    "low_bit": (),
}


def trials(long: bool) -> Iterator[Trial]:
    """Yield trials with many files, many runs and many steps. Each trial runs alone."""
    yield Trial("many files", _files, (1_000_000 if long else 20_000,), alone=True)
    yield Trial("many runs", _runs, (1000 if long else 100,), alone=True)
    yield Trial("many steps", _steps, (100_000 if long else 1_500, "full"), alone=True)
    for method, settings in _WITH_STATE.items() if long else ():
        yield Trial(f"many steps of {method}", _steps, (5_000, method, settings), alone=True)


def _files(folder: Path, files: int) -> dict[str, float]:
    """Start a run on many files."""
    measured = load.million_files(folder, files)
    shown = f"{format_seconds(measured['seconds'])} and {format_bytes(measured['peak_bytes'])}"
    require(measured["seconds"] <= _FILES_SECONDS and measured["peak_bytes"] <= _FILES_BYTES, f"it took {shown}")
    return {f"seconds_of_{files}_files": measured["seconds"], f"peak_bytes_of_{files}_files": measured["peak_bytes"]}


def _runs(folder: Path, runs: int) -> dict[str, float]:
    """Collect many runs."""
    write_images(folder / "images")
    returned(train, configuration(folder / "images"), folder / "run", output=folder / "run.log")
    measured = load.collect_many(folder, folder / "run", runs)
    require(measured["seconds"] <= _COLLECT_SECONDS, f"it took {format_seconds(measured['seconds'])}")
    return {f"seconds_of_{runs}_runs": measured["seconds"]}


def _steps(folder: Path, steps: int, method: str, settings: tuple[str, ...] = ()) -> dict[str, float]:
    """Train for many steps, and require that memory, handles and processes do not grow."""
    measured = load.many_steps(folder, steps, (f"method={method}", *settings))
    require(measured["handles"] <= 0, f"{measured['handles']:.0f} files stay open")
    require(measured["processes"] <= 0, f"{measured['processes']:.0f} processes are left")
    require(measured["bytes"] <= _GROWTH_BYTES, f"it grew by {format_bytes(measured['bytes'])}")
    return {f"growth_bytes_of_{steps}_steps_of_{method}": measured["bytes"]}
