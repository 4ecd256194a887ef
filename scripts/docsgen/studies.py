"""Tables of the studies in results/: what was run, accuracy over the seeds, and what it cost."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from docsgen.markdown import table

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from efficient_ft.papers.published import published_table  # noqa: E402
from efficient_ft.record.study import NEAR, Records, shown, test_accuracy  # noqa: E402
from efficient_ft.report import studies  # noqa: E402


def records(name: str) -> Records:
    """The records of a study."""
    return Records(ROOT / "results" / name)


def study_table(name: str) -> str:
    """A row for each method that is tuned: the rate chosen, accuracy, and costs, with ratios to full fine-tuning.

    Without seconds, which say nothing where several runs share the machine.
    """
    found = records(name)
    head, *rows = studies.study_table(found, list(found.study.rows))
    assert head[-1] == "seconds"
    lines = [table(head[:-1], [[f"`{row[0]}`", *row[1:-1]] for row in rows])]
    for note in studies.notes(found, list(found.study.rows)):
        lines += ["", note.replace(studies.AT_END, "\\*")]
    return "\n".join(lines)


def study_conditions(name: str) -> str:
    """Conditions of a study: its own words, its settings, and the machines."""
    found = records(name)
    study, tune = found.study, found.study.tune
    machines = sorted({f"{one['environment']['device']}, torch {one['environment']['torch']}" for one in found.runs
                       if "environment" in one})  # fmt: skip
    if len(tune.values) > 1:
        rates = ", ".join(shown(value) for value in tune.values)
        first = " and ".join(shown(value) for value in tune.values[max(len(tune.values) // 2 - 1, 0) :][:2])
        chosen = (
            f"The `{tune.setting}` of every row is searched for in {rates} with seed {tune.seed}: {first} first, then"
            f" the neighbors of the best value on the validation {study.sample}s and of every value within"
            f" {100 * NEAR:g} point of it, until no neighbor is left. The best value is then run with"
        )
    else:
        chosen = f"All rows are run with `{tune.setting}={shown(tune.values[0])}` and"
    return (
        f"{' '.join(study.about.split())}\n\n{chosen} {'seeds' if len(study.seeds) > 1 else 'seed'}"
        f" {', '.join(map(str, study.seeds))}. Settings of all runs: `{' '.join(study.settings)}`. Run on"
        f" {'; '.join(machines)}."
    )


def points_lost() -> dict[str, dict[str, float]]:
    """By row, and by study: points of mean test accuracy below the row ``full`` over the same seeds."""
    lost: dict[str, dict[str, float]] = {}
    for folder in sorted((ROOT / "results").iterdir()):
        found = records(folder.name)
        base = {run["seed"]: test_accuracy(run) for run in found.finished("full")}
        for row in found.study.rows:
            runs = {run["seed"]: test_accuracy(run) for run in found.finished(row)}
            seeds = base.keys() & runs.keys()
            if seeds:
                difference = sum(base[seed] - runs[seed] for seed in seeds) / len(seeds)
                lost.setdefault(row, {})[found.study.title] = round(difference, 1)
    return dict(sorted(lost.items()))


#: Rows of deit_tiny_flowers102 that ALaST's Table 7 has, and the learning rate that the paper gives them.
_ALAST_7 = {"head": ("ft_head", 1e-4), "full": ("ft_full", 1e-4), "top3": ("ft_top_3", 1e-4), "tome4": ("tome", 1e-4),
            "bsr": ("bsr", 1e-4), "full+lora": ("lora", 1e-3), "alast9": ("alast", 1e-4)}  # fmt: skip


def alast_7_compared(name: str) -> str:
    """ALaST's Table 7 for DeiT-T next to a study of its rows: percent, and points above or below full fine-tuning."""
    found = records(name)
    printed = {row.name: row.cells["acc_flowers"].accuracy for row in published_table("alast/7").rows}
    own = {row: _mean(runs) for row in _ALAST_7 if (runs := found.finished(row))}
    lines = []
    for row, (theirs, rate) in _ALAST_7.items():
        at_rate = found.of_the_search(found.run(row, rate, found.study.tune.seed))
        published, full = printed[f"deit_t.{theirs}"], printed["deit_t.ft_full"]
        lines.append(
            [
                f"`{row}`",
                f"{100 * published:.0f}",
                "" if row == "full" else _points(100 * (published - full), 0),
                "" if at_rate is None else f"{test_accuracy(at_rate):.1f}",
                studies.spread([test_accuracy(one) for one in found.finished(row)]) if row in own else "",
                _points(own[row] - own["full"], 1) if row in own and row != "full" else "",
            ]
        )
    head = ["row", "printed", "above full", "here, at the paper's rate", "here, at its own rate", "above full"]
    return table(head, lines)


def _points(difference: float, digits: int) -> str:
    return f"{round(difference, digits) + 0.0:+.{digits}f}".replace("-", "−")


def _mean(runs: Sequence[dict[str, Any]]) -> float:
    """The mean test accuracy of runs in percent."""
    return sum(map(test_accuracy, runs)) / len(runs)


def study_rows(*names: str) -> str:
    """The settings of every row of the studies; a name stands for the same settings in all of them."""
    settings: dict[str, list[str]] = {}
    for name in names:
        for row, own in records(name).study.rows.items():
            assert settings.setdefault(row, own) == own, f"{name}: {row} has other settings than in another study"
    return table(["row", "settings"], [[f"`{row}`", f"`{' '.join(own)}`"] for row, own in settings.items()], left=2)


def study_points(name: str) -> list[dict[str, Any]]:
    """For each row that is tuned: mean test accuracy in percent, executed TFLOPs of the run, KiB kept for an image."""
    found = records(name)
    points = []
    for row in found.study.rows:
        if runs := found.finished(row):
            points.append(
                {
                    "row": row,
                    "accuracy": round(_mean(runs), 4),
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
