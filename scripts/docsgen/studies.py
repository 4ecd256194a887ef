"""Tables of the studies in results/: what was run, accuracy over the seeds, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docsgen.markdown import table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from efficient_ft.record.study import NEAR, Records, test_accuracy  # noqa: E402
from efficient_ft.report import studies  # noqa: E402


def records(name: str) -> Records:
    """The records of a study."""
    return Records(ROOT / "results" / name)


def study_table(name: str) -> str:
    """A row for each method that is tuned: the rate chosen, accuracy, and costs, with ratios to full fine-tuning."""
    found = records(name)
    head, *rows = studies.study_table(found, list(found.study.rows))
    lines = [table(head, [[f"`{row[0]}`", *row[1:]] for row in rows])]
    for note in studies.notes(found, list(found.study.rows)):
        lines += ["", note.replace(studies.AT_END, "\\*")]
    return "\n".join(lines)


def study_conditions(name: str) -> str:
    """Conditions of a study: its own words, its settings, and the machines."""
    found = records(name)
    study, tune = found.study, found.study.tune
    machines = sorted({f"{one['environment']['device']}, torch {one['environment']['torch']}" for one in found.runs
                       if "environment" in one})  # fmt: skip
    busy = " Two runs at a time: `seconds` are no comparison."
    rates = ", ".join(f"{value:g}" for value in tune.values)
    return (
        f"{' '.join(study.about.split())}\n\nThe `{tune.setting}` of every row is searched for in {rates} with seed"
        f" {tune.seed}: the two in the middle, then the neighbors of the best on the validation images, and of those"
        f" within {100 * NEAR:g} point of it, until all have been run. The best is then run with seeds"
        f" {', '.join(map(str, study.seeds))}. Settings of all runs: `{' '.join(study.settings)}`. Run on"
        f" {'; '.join(machines)}.{busy}"
    )


def study_points(name: str) -> list[dict[str, Any]]:
    """For each row that is tuned: mean test accuracy in percent, executed TFLOPs of the run, KiB kept for an image."""
    found = records(name)
    points = []
    for row in found.study.rows:
        if runs := found.finished(row):
            points.append(
                {
                    "row": row,
                    "accuracy": round(sum(map(test_accuracy, runs)) / len(runs), 4),
                    "flops": round(runs[0]["totals"]["flops"] / 1e12, 3),
                    "saved": round(runs[0]["executed"]["saved_bytes"] / 1024, 2),
                }
            )
    return points


def front(points: Sequence[dict[str, Any]], cost: str) -> list[dict[str, Any]]:
    """The points that no other one beats in accuracy at the same or a lower cost, by rising cost."""
    best: list[dict[str, Any]] = []
    for point in sorted(points, key=lambda one: (one[cost], -one["accuracy"])):
        if not best or point["accuracy"] > best[-1]["accuracy"]:
            best.append(point)
    return best
