"""Tables of the studies in results/: what was run, accuracy over the seeds, and what it cost."""

from __future__ import annotations

import statistics
import sys
from pathlib import Path

from docsgen.markdown import table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from efficient_ft.record.study import Records, test_accuracy  # noqa: E402


def records(name: str) -> Records:
    """The records of a study."""
    return Records(ROOT / "results" / name)


def study_table(name: str) -> str:
    """A row for each method that is tuned: the rate chosen, accuracy, and costs, with ratios to full fine-tuning."""
    found = records(name)
    full = found.finished("full")
    rows, waiting = [], []
    for row in found.study.rows:
        runs = found.finished(row)
        if not runs:
            waiting.append(f"`{row}`")
            continue
        values = [test_accuracy(one) for one in runs]
        first = runs[0]
        base = full[0] if full else first
        rows.append(
            [
                f"`{row}`",
                f"{first['value']:g}" + ("*" if first["value"] in _ends(found) else ""),
                _range(values),
                str(len(values)),
                f"{first['totals']['flops'] / 1e12:.2f}",
                f"{base['totals']['flops'] / first['totals']['flops']:.2f}×",
                f"{first['executed']['saved_bytes'] / 1024:.0f}",
                f"{base['executed']['saved_bytes'] / first['executed']['saved_bytes']:.1f}×",
                f"{statistics.median(one['totals']['seconds'] for one in runs):.0f}",
            ]
        )
    head = ["row", "rate", "test accuracy, %", "seeds", "TFLOPs", "fewer", "saved KiB / image", "less", "seconds"]
    said = ["", "`*`: the best rate is at the end of the grid."] if any("*" in row[1] for row in rows) else []
    if waiting:
        said += ["", f"Not tuned yet: {', '.join(waiting)}."]
    return "\n".join([table(head, rows), *said])


def _ends(found: Records) -> tuple[float, float]:
    values = sorted(found.study.tune.values)
    return values[0], values[-1]


def _range(values: list[float]) -> str:
    mean = f"{statistics.fmean(values):.1f}"
    return mean if len(values) == 1 else f"{mean} [{min(values):.1f}…{max(values):.1f}]"


def study_conditions(name: str) -> str:
    """Conditions of a study: its own words, its settings, and the machines."""
    found = records(name)
    study, tune = found.study, found.study.tune
    machines = sorted({f"{one['environment']['device']}, torch {one['environment']['torch']}" for one in found.runs
                       if "environment" in one})  # fmt: skip
    rates = ", ".join(f"{value:g}" for value in tune.values)
    return (
        f"{' '.join(study.about.split())}\n\nEvery row is tuned over the same values of `{tune.setting}`, {rates}, with"
        f" seed {tune.seed}; the best on the validation images is then run with seeds"
        f" {', '.join(map(str, study.seeds))}. Settings of all runs: `{' '.join(study.settings)}`. Run on"
        f" {'; '.join(machines)}."
    )
