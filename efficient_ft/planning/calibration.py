"""Record the predictions of plans, and compare them with measurements of runs (`plan --calibration`)."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from efficient_ft.config import fingerprint
from efficient_ft.core.errors import UserError, first_line
from efficient_ft.core.files import open_file
from efficient_ft.core.format import format_bytes, format_percent
from efficient_ft.core.parsing import parse_json
from efficient_ft.core.text import paragraph, table
from efficient_ft.planning.plan import Plan
from efficient_ft.record import config_file
from efficient_ft.record import results as results_file

#: Entries of a prediction that are read, and their types.
_READ: dict[str, tuple[type, ...]] = {
    "run": (str,), "name": (str,), "memory_bytes": (int, float), "process_bytes": (int, float),
    "counted_bytes": (int, float), "step_seconds": (int, float, type(None)), "timed": (bool,),
}  # fmt: skip
#: Name of a file in the folder of runs. Every plan appends one line for each option to this file.
FILE = "plans.jsonl"


def record(plan: Plan, folder: Path) -> None:
    """Append the predictions of a plan's options to `FILE` in `folder` (the folder of runs), if `FILE` is writable."""
    lines = [
        json.dumps(
            {
                "run": option.fingerprint,
                "name": option.name,
                "memory_bytes": plan.memory_bytes,
                "base_bytes": plan.base_bytes,
                "device": plan.device,
                "allocator": plan.allocator,
                "process_bytes": option.peak_bytes,
                "tried": option.measured_bytes is not None,
                "counted_bytes": option.counted.step_bytes,
                "step_seconds": option.step_seconds,
                "timed": option.timed,
            }
        )
        for option in plan.options
    ]
    with suppress(OSError):
        folder.mkdir(parents=True, exist_ok=True)
        with open_file(folder / FILE, "a") as file:
            file.write("".join(line + "\n" for line in lines))


def calibration(folders: Sequence[Path]) -> list[dict[str, Any]]:
    """Return the latest prediction and the measurement of each finished run that was planned.

    Raises:
        UserError: If one of `folders` (the folders of runs) contains no plans.
    """
    found = []
    for folder in folders:
        if not (folder / FILE).is_file():
            raise UserError(f"The folder {folder} has no plans ({FILE}). Pass the folder of runs (outputs).")
        predicted = _predictions(folder / FILE)
        for file in sorted(folder.rglob(results_file.NAME)):
            run = fingerprint(config_file.read_config(file.parent))
            results = results_file.read_results(file.parent)
            if run in predicted and "memory" in results:
                name = file.parent.relative_to(folder) if folder.is_absolute() else file.parent
                found.append(_pair(name, predicted[run], dict(results)))
    return found


def _predictions(file: Path) -> dict[str, dict[str, Any]]:
    """Return the latest prediction of each run, keyed by fingerprint. A damaged file raises a UserError."""
    found = {}
    try:
        for number, line in enumerate(file.read_text(encoding="utf-8").splitlines(), start=1):
            one = parse_json(line)
            if not isinstance(one, dict) or not all(type(one.get(key)) in kinds for key, kinds in _READ.items()):
                raise ValueError(f"line {number} does not contain a valid prediction")
            found[one["run"]] = one
    except ValueError as error:
        raise UserError(
            f"The file {file} is damaged ({first_line(error)}). Remove the line or rename the file."
        ) from error
    return found


def _pair(folder: Path, predicted: dict[str, Any], results: dict[str, Any]) -> dict[str, Any]:
    memory, device = results["memory"], results["memory"]["device"]
    peak = memory["peak_bytes"] if device is None else device["reserved_bytes"]
    seconds = results["totals"].get("step_seconds") or results["cost"]["measured"]["step_seconds"]
    return {
        "folder": os.fspath(folder),
        "name": predicted["name"],
        "within_budget": peak <= predicted["memory_bytes"],
        "memory": (predicted["process_bytes"], peak),
        "counted": (predicted["counted_bytes"], memory["counted_bytes"]),
        "step": (predicted["step_seconds"], seconds) if predicted["timed"] and seconds else None,
    }


def calibration_text(folders: Sequence[Path]) -> str:
    """Return a table of the planned runs and the errors of their predictions."""
    pairs = calibration(folders)
    if not pairs:
        raise UserError("None of the planned runs has finished. Run the command of a plan, then repeat this command.")
    rows = [["run", "recipe", "predicted", "measured", "off", "counted off", "step off"]]
    for pair in pairs:
        (predicted, measured), step = pair["memory"], pair["step"]
        rows.append(
            [
                pair["folder"],
                pair["name"],
                format_bytes(predicted),
                format_bytes(measured),
                format_percent(_off(pair["memory"]), sign=True),
                format_percent(_off(pair["counted"]), sign=True),
                "–" if step is None else format_percent(_off(step), sign=True),
            ]
        )
    lines = [table(rows, left=(0, 1)), ""]
    over = [pair for pair in pairs if not pair["within_budget"]]
    lines.append(f"{len(pairs)} planned runs have finished. {len(over)} of these runs exceeded their budget.")
    for key, title in (("memory", "peak of the process"), ("counted", "counted peak of a step"), ("step", "step time")):
        off = [abs(_off(pair[key])) for pair in pairs if pair[key] is not None]
        if off:
            median, largest = map(format_percent, (statistics.median(off), max(off)))
            lines.append(f"The predicted {title} is off by {median} (median) and at most {largest}.")
    return "\n".join([lines[0], *map(paragraph, lines[1:])])


def _off(pair: tuple[float, float]) -> float:
    return pair[0] / pair[1] - 1
