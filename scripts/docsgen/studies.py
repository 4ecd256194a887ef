"""Tables of the studies in results/: findings, accuracy over the seeds, and costs of each row."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import yaml

from docsgen import ROOT
from docsgen.markdown import block, table
from efficient_ft.papers.published import published_table
from efficient_ft.record.study import NEAR, Records, shown, test_accuracy
from efficient_ft.report import studies

#: Study in which training only the head is much less accurate than full fine-tuning.
CARS = "deit_tiny_cars49"


@cache
def records(name: str) -> Records:
    """Return the records of a study."""
    return Records(ROOT / "results" / name)


def _mean(runs: Sequence[dict[str, Any]]) -> float:
    """Return the mean test accuracy of runs in percent."""
    return statistics.fmean(map(test_accuracy, runs))


@cache
def point(name: str, row: str) -> dict[str, Any]:
    """Return the accuracy of a row in percent, the number of seeds, TFLOPs of a run, and stored KiB per image."""
    runs = records(name).finished(row)
    if not runs:
        raise ValueError(f"the row {row} of the study {name} is not tuned yet")
    return {
        "row": row,
        "accuracy": round(_mean(runs), 4),
        "seeds": len(runs),
        "flops": round(runs[0]["totals"]["flops"] / 1e12, 3),
        "saved": round(runs[0]["executed"]["saved_bytes"] / 1024, 2),
    }


def has_all_seeds(name: str, row: str) -> bool:
    """Return True if a row has results for every seed of the study."""
    return len(records(name).finished(row)) == len(records(name).study.seeds)


def half_agrees(name: str) -> str:
    """Return the number of rows whose best value after half of the epochs is also the best value after all epochs.

    Only rows with at least three whole runs of the search count.
    """
    of, agree = records(name), []
    for row in of.study.rows:
        found = [of.find(of.run(row, value, of.study.tune.seed)) for value in of.study.tune.values]
        curves = [[point["accuracy"] for point in one["curve"]] for one in found if one and one.get("curve")]
        if len(curves) >= 3:
            half = [max(curve[: len(curve) // 2]) for curve in curves]
            whole = [max(curve) for curve in curves]
            agree.append(half.index(max(half)) == whole.index(max(whole)))
    return f"{sum(agree)} of {len(agree)}"


def points(name: str) -> list[dict[str, Any]]:
    """Return the points of all tuned rows of a study."""
    return [point(name, row) for row in records(name).study.rows if records(name).finished(row)]


def front(of: Sequence[dict[str, Any]], cost: str) -> list[dict[str, Any]]:
    """Return the points on the Pareto front of accuracy and cost, sorted by cost."""
    best: list[dict[str, Any]] = []
    for one in sorted(of, key=lambda one: (one[cost], -one["accuracy"])):
        if not best or one["accuracy"] > best[-1]["accuracy"]:
            best.append(one)
    return best


# ------------------------------------------------------------------------------------------------ whole studies
@block
def study(name: str) -> str:
    """Show each tuned row of a study with its learning rate, accuracy and costs, and the ratios to full fine-tuning.

    The column of seconds is omitted, because several runs shared the machine.
    """
    of = records(name)
    head, *rows = studies.study_table(of, list(of.study.rows))
    assert head[-1] == "seconds"
    lines = [table(head[:-1], [[f"`{row[0]}`", *row[1:-1]] for row in rows])]
    lines += [note.replace(studies.AT_END, "\\*") for note in studies.notes(of, list(of.study.rows))]
    return "\n\n".join(lines)


@block
def study_conditions(name: str) -> str:
    """Return the description, the settings and the machines of a study as sentences."""
    of = records(name)
    environments = (one["environment"] for one in of.runs if "environment" in one)
    machines = sorted({f"{one['device']}, torch {one['torch']}" for one in environments})
    tune = of.study.tune
    if len(tune.values) > 1:
        values = ", ".join(map(shown, tune.values))
        first = " and ".join(map(shown, tune.values[max(len(tune.values) // 2 - 1, 0) :][:2]))
        chosen = (
            f"For each row, `{tune.setting}` is selected from {values} with seed {tune.seed}. The search begins with"
            f" {first}. The search then tries the neighbors of the best value, and the neighbors of every value whose"
            f" accuracy on the validation {of.study.sample}s is within {100 * NEAR:g} point of the best accuracy."
            + (f" It compares the runs after {tune.steps} optimizer steps." if tune.steps else "")
            + " The runs with the selected value use"
        )
    else:
        chosen = f"All rows use `{tune.setting}={shown(tune.values[0])}`. The runs use"
    seeds = f"seed{'s' * (len(of.study.seeds) > 1)} {', '.join(map(str, of.study.seeds))}"
    settings = f"Settings of all runs: `{' '.join(of.study.settings)}`. Machines: {'; '.join(machines)}."
    return f"{' '.join(of.study.about.split())}\n\n{chosen} {seeds}. {settings}"


@block
def study_rows(*names: str) -> str:
    """Show the settings of every row of the studies. A row must have the same settings in all studies."""
    settings: dict[str, list[str]] = {}
    for name in names:
        for row, own in records(name).study.rows.items():
            assert settings.setdefault(row, own) == own, f"{name}: the settings of row {row} differ from another study"
    return table(["row", "settings"], [[f"`{row}`", f"`{' '.join(own)}`"] for row, own in settings.items()], left=2)


# ------------------------------------------------------------------------------------------------ single questions
@block
def findings() -> str:
    """Show the findings of ``findings.yaml``, each with the accuracies that support it."""
    rows = []
    for one in yaml.safe_load(Path(__file__).with_name("findings.yaml").read_text(encoding="utf-8")):
        of = [point(one["study"], row) for row in one["rows"]]
        numbers = ", ".join(f"`{p['row']}` {p['accuracy']:.1f} %" for p in of)
        seeds = sorted({p["seeds"] for p in of})
        seeds_shown = str(seeds[0]) if len(seeds) == 1 else f"{seeds[0]} to {seeds[-1]}"
        rows.append([f"[{one['finding']}](#{one['section']})", numbers, seeds_shown, one["holds"]])
    return table(["finding", "test accuracy", "seeds", "confirmed?"], rows, left=4)


def accuracies(name: str, *rows: str) -> str:
    """Return the accuracy of each row and the number of seeds, for use in a sentence."""
    of = [point(name, row) for row in rows]
    numbers = [f"`{one['row']}` {one['accuracy']:.1f} %" for one in of]
    seeds = [f"{one['seeds']} seeds" if one["seeds"] > 1 else "one seed" for one in of]
    if len(set(seeds)) == 1:
        return f"{', '.join(numbers)} ({seeds[0]})"
    return ", ".join(f"{number} ({of_row})" for number, of_row in zip(numbers, seeds, strict=True))


def accuracies_of_seed(name: str, seed: str, *rows: str) -> str:
    """Return the accuracy of each row with the same seed, for use in a sentence."""
    numbers = [f"`{row}` {_by_seed(name, row)[int(seed)]:.1f} %" for row in rows]
    return f"{', '.join(numbers)} (seed {seed})"


def after_epoch(name: str, epoch: str, *rows: str) -> str:
    """Return the validation accuracy of each row after an epoch, as the mean over the seeds, for use in a sentence."""
    numbers = []
    for row in rows:
        mean = statistics.fmean(run["curve"][int(epoch) - 1]["accuracy"] for run in records(name).finished(row))
        numbers.append(f"`{row}` {100 * mean:.1f} %")
    return ", ".join(numbers)


def loss_after_epoch(name: str, epoch: str, *rows: str) -> str:
    """Return the training loss of each row in an epoch, as the mean over the seeds, for use in a sentence."""
    means = [
        statistics.fmean(run["curve"][int(epoch) - 1]["loss"] for run in records(name).finished(row)) for row in rows
    ]
    return ", ".join(f"`{row}` {mean:.2f}" for row, mean in zip(rows, means, strict=True))


@block
def compared(name: str, *rows: str) -> str:
    """Show the accuracy, the seeds and the relative costs of some rows of a study."""
    full = point(name, "full")
    lines = []
    for row in rows:
        one, runs = point(name, row), records(name).finished(row)
        accuracy = studies.spread([test_accuracy(run) for run in runs])
        ratios = [f"{full[cost] / one[cost]:.1f}" for cost in ("flops", "saved")]
        lines.append([f"`{row}`", accuracy, str(one["seeds"]), *ratios])
    return table(["row", "test accuracy, %", "seeds", "times fewer FLOPs", "times fewer bytes"], lines)


@block
def measured(row: str, *names: str) -> str:
    """Show the accuracy of full fine-tuning, of training only the head and of a row in several studies."""
    lines = []
    for name in names:
        full, head, own = (point(name, one) for one in ("full", "head", row))
        accuracies = [f"{one['accuracy']:.1f}" for one in (full, head, own)]
        ratios = [f"{full[cost] / own[cost]:.1f}" for cost in ("flops", "saved")]
        lines.append([records(name).study.title, *accuracies, str(own["seeds"]), *ratios])
    head_line = ["study", "`full`, %", "`head`, %", f"`{row}`, %", "seeds", "times fewer FLOPs", "times fewer bytes"]
    return table(head_line, lines)


def _runs_table(rows: Iterable[str], columns: dict[str, Callable[[str], dict[str, Any] | None]]) -> str:
    """Return a table of the accuracies of single runs, with a column for each kind of run."""
    runs = {row: [find(row) for find in columns.values()] for row in rows}
    shown = {row: ["–" if one is None else f"{test_accuracy(one):.1f}" for one in of] for row, of in runs.items()}
    return table(["row", *columns], [[f"`{row}`", *cells] for row, cells in shown.items()])


@block
def by_seed(name: str, *rows: str) -> str:
    """Show the test accuracy for each seed."""
    of = records(name)
    runs = {(row, run["seed"]): run for row in rows for run in of.finished(row)}
    return _runs_table(rows, {f"seed {s}, %": lambda row, s=s: runs.get((row, s)) for s in of.study.seeds})


@block
def at_rate(name: str, value: str, *rows: str) -> str:
    """Show the test accuracy of the search run with one learning rate, for each row."""
    tune = records(name).study.tune
    heading = f"test accuracy at `{tune.setting}={value}`, %"
    return _runs_table(rows, {heading: lambda row: _at(name, row, float(value))})


@block
def finalists(name: str, row: str) -> str:
    """Show the accuracies of the values of a row that were compared over all seeds."""
    of, lines = records(name), []
    for value in of.finalists(row):
        runs = [run for seed in of.study.seeds if (run := of.find(of.run(row, value, seed))) is not None]
        best = statistics.fmean(100 * run["accuracy"]["best"] for run in runs)
        lines.append([shown(value), f"{best:.2f}", studies.spread(list(map(test_accuracy, runs))), str(len(runs))])
    return table([f"`{of.study.tune.setting}` of `{row}`", "validation, %", "test, %", "seeds"], lines)


def _at(name: str, row: str, value: float) -> dict[str, Any] | None:
    """Return the run of the search with one value of the tuned setting."""
    of = records(name)
    return of.of_the_search(of.run(row, value, of.study.tune.seed))


@block
def by_precision(*names_and_groups: str) -> str:
    """Compare all runs of some rows in bf16 with the runs in fp32 that have the same settings and seed.

    The arguments are the names of studies, followed by groups of rows: ``GROUP=ROW,...``.
    """
    names = [name for name in names_and_groups if "=" not in name]
    lines = []
    for group, _, rows in (argument.partition("=") for argument in names_and_groups[len(names) :]):
        found = [d for name in names for row, d in _differences(name) if row in rows.split(",")]
        cells = [str(len(found)), mean_and_error(found), f"{statistics.stdev(found):.1f}"]
        lines.append([group.replace("_", " "), ", ".join(f"`{row}`" for row in rows.split(",")), *cells])
    return table(["methods", "rows", "pairs", "difference, points", "standard deviation"], lines, left=2)


@cache
def _differences(name: str) -> list[tuple[str, float]]:
    """Return the row and the difference of accuracy (bf16 - fp32) for each pair of runs of a study.

    Runs in bf16 can also be records of the study with the same name and the suffix ``_bf16``.
    """
    both = [name, f"{name}_bf16"] if (ROOT / "results" / f"{name}_bf16").is_dir() else [name]
    runs: dict[tuple[str, ...], dict[str, dict[str, Any]]] = {}
    for run in (run for of in both for run in records(of).runs if "accuracy" in run):
        settings = [one for one in run["settings"] if not one.startswith("trainer.precision=")]
        (precision,) = set(run["settings"]) - set(settings)
        runs.setdefault(tuple(settings), {})[precision.partition("=")[2]] = run
    pairs = [of for of in runs.values() if of.keys() == {"fp32", "bf16"}]
    return [(of["fp32"]["row"], test_accuracy(of["bf16"]) - test_accuracy(of["fp32"])) for of in pairs]


@block
def over_precisions(fp32: str, bf16: str, *rows: str) -> str:
    """Compare two studies that differ only in the precision, over their common seeds."""
    return _precisions_table({row: [_by_seed(of, row) for of in (fp32, bf16)] for row in rows})


@block
def both_precisions(name: str) -> str:
    """Compare the rows of a study with the rows in bf16, whose names end with ``bf16``, over their common seeds.

    Rows that were not run with at least two seeds in both precisions are omitted.
    """
    rows = [row for row in records(name).study.rows if f"{row} bf16" in records(name).study.rows]
    runs = {row: [_by_seed(name, one) for one in (row, f"{row} bf16")] for row in rows}
    return _precisions_table({row: of for row, of in runs.items() if len(of[0].keys() & of[1].keys()) > 1})


def _by_seed(name: str, row: str) -> dict[int, float]:
    """Return the test accuracy of a row in percent for each seed."""
    return {one["seed"]: test_accuracy(one) for one in records(name).finished(row)}


def precision_differences(name: str, *without: str) -> list[float]:
    """Return the differences of accuracy (bf16 - fp32) in a study, without some rows."""
    return [difference for row, difference in _differences(name) if row not in without]


def mean_and_error(differences: Sequence[float]) -> str:
    """Return the mean of differences and its standard error."""
    mean, error = statistics.fmean(differences), statistics.stdev(differences) / len(differences) ** 0.5
    return f"{round(mean, 1) + 0.0:+.1f} ± {error:.1f}".replace("-", "−")  # no −0.0


def _precisions_table(runs: dict[str, list[dict[int, float]]]) -> str:
    """Return a table of accuracies in fp32 and in bf16, which `runs` contains for each row by seed."""
    lines = []
    for row, accuracies in runs.items():
        seeds = sorted(accuracies[0].keys() & accuracies[1].keys())
        exact, half = ([of[seed] for seed in seeds] for of in accuracies)
        spreads = [f"{statistics.fmean(of):.1f} ± {statistics.stdev(of):.1f}" for of in (exact, half)]
        difference = mean_and_error([b - a for a, b in zip(exact, half, strict=True)])
        lines.append([f"`{row}`", *spreads, str(len(seeds)), difference])
    return table(["row", "fp32, %", "bf16, %", "seeds", "difference, points"], lines)


#: Rows of deit_tiny_flowers102 that occur in ALaST's Table 7, and their learning rates in the paper.
_ALAST_7 = {"head": ("ft_head", 1e-4), "full": ("ft_full", 1e-4), "top3": ("ft_top_3", 1e-4), "tome4": ("tome", 1e-4),
            "bsr": ("bsr", 1e-4), "full+lora": ("lora", 1e-3), "alast9": ("alast", 1e-4)}  # fmt: skip


@block
def alast_7_compared(name: str) -> str:
    """Show the accuracies in ALaST's Table 7 and in our study, and their differences to full fine-tuning."""
    of = records(name)
    reported = {row.name: row.cells["acc_flowers"].accuracy for row in published_table("alast/7").rows}
    full = reported["deit_t.ft_full"]
    lines = []
    for row, (theirs, rate) in _ALAST_7.items():
        published, runs = reported[f"deit_t.{theirs}"], of.finished(row)
        gaps = [f"{100 * (published - full):+.0f}", f"{_mean(runs) - _mean(of.finished('full')):+.1f}"]
        above = [gap.replace("-", "−") if row != "full" else "" for gap in gaps]
        at_rate = _at(name, row, rate)
        measured = "" if at_rate is None else f"{test_accuracy(at_rate):.1f}"
        spread = studies.spread([test_accuracy(one) for one in runs])
        lines.append([f"`{row}`", f"{100 * published:.0f}", above[0], measured, spread, above[1]])
    here = ["here, at the paper's learning rate", "here, at its best learning rate"]
    return table(["row", "reported", "above full", *here, "above full"], lines)


# ------------------------------------------------------------------------------------------------ recommendations
@cache
def goals() -> list[dict[str, str]]:
    """Return the recipes that the README recommends: ``goals.yaml``."""
    return yaml.safe_load(Path(__file__).with_name("goals.yaml").read_text(encoding="utf-8"))


@block
def recommended() -> str:
    """Show the recipes of ``goals.yaml`` with their accuracy, and their costs relative to full fine-tuning.

    The accuracy of a CNN is followed by that of full fine-tuning of the CNN.
    """
    rows = []
    for one in goals():
        study, row = one["study"], one["row"]
        of, full = point(study, row), point(study, "full")
        settings = " ".join(f"'{s}'" if "[" in s else s for s in records(study).study.rows[row])
        costs = [f"{full[cost] / of[cost]:.1f}× fewer".replace("1.0× fewer", "same") for cost in ("flops", "saved")]
        on_caltech = f"{of['accuracy']:.1f} %" if study != CARS else "–"
        on_caltech += f" (full: {full['accuracy']:.1f} %)" if "cars" not in one else ""
        has_cars = "cars" in one and has_all_seeds(CARS, one["cars"])
        on_cars = f"{point(CARS, one['cars'])['accuracy']:.1f} %" if has_cars else "–"
        rows.append([one["goal"], f"`{settings}`", on_caltech, on_cars, *costs])
    head = ["if you want", "use", "Caltech-101", "Stanford Cars", "FLOPs", "stored bytes"]
    return table(head, rows, left=4)
