"""Blocks about memory and its predictions: allocators, states of optimizers, adapters, plans."""

from __future__ import annotations

import statistics
from typing import Any

from docsgen import records
from docsgen.labels import LABELS
from docsgen.markdown import block, table
from efficient_ft.bench.tables import report_text


@block
def allocators(model: str) -> str:
    """Show the growth of the process with each allocator, relative to the counted bytes."""
    recipes = records.load("allocators")["models"][model]["recipes"]
    names = [name for name in ("keep", "mimalloc", "tcmalloc") if name in next(iter(recipes.values()))]
    rows = []
    for recipe, by_allocator in recipes.items():
        counted = by_allocator[names[0]]["counted_bytes"]
        ratios = [f"{by_allocator[name]['memory']['growth_bytes'] / counted:.2f}" for name in names]
        rows.append([LABELS["allocators"][recipe], f"{counted / records.MIB:.0f}", *ratios])
    return table(["recipe", "counted MiB of a step", *(f"`{name}`: growth / counted" for name in names)], rows)


@block
def optimizer_states() -> str:
    """Show low-bit AdamW: largest steps, errors and bytes, relative to AdamW in 32 bits."""
    data = records.load("optimizer_states")
    cases = list(next(iter(data["optimizers"].values()))["cases"])
    errors = [*(f"error, {case}" for case in (cases[0], *cases[-2:])), "last steps", "bytes", "ms"]
    largest, other = (_states(data, columns) for columns in (cases, errors))
    return (
        f"Largest step, divided by the largest step of torch's AdamW on the same gradients:\n\n{largest}\n\n"
        "Relative error over all steps, norm of the last tenth of the steps divided by their norm with torch's AdamW,"
        f" memory, and time of a step for a parameter of 768×3072 values:\n\n{other}\n\n"
        f"{records.conditions('optimizer_states')}"
    )


def _states(data: dict[str, Any], columns: list[str]) -> str:
    """Return a table of optimizers without its caption, and with the names of the cases in words."""
    shown = report_text(data, columns, form="markdown").partition("\n\n")[2]
    head, line, rows = shown.partition("\n")
    for short, words in {"spread": "range", "late": "pause", "last steps, ": "norm of the last steps, "}.items():
        head = head.replace(short, words)
    return f"{head}{line}{rows}"


@block
def allocators_conditions() -> str:
    """State the conditions of the measurement of allocators, and their step times."""
    recipes = records.load("allocators")["models"]["deit_small"]["recipes"].values()
    ratios = [
        f"{statistics.median(min(r[name]['seconds']) / min(r['keep']['seconds']) for r in recipes):.2f}× with `{name}`"
        for name in ("mimalloc", "tcmalloc")
    ]
    conditions = records.conditions(
        "allocators",
        "The optimizer is AdamW. Each combination of a recipe and an allocator runs in a separate process.",
    )
    return (
        f"{conditions} The time of the shortest step of DeiT-S, relative to `keep`, is {' and '.join(ratios)} (median"
        " over the recipes)."
    )


@block
def plan_predictions() -> str:
    """Show the errors of the predictions of plans, and the number of runs that exceeded their budgets."""
    data = records.load("plans")
    cases = data["cases"]
    trained = [case for case in cases if case["outcome"] == "measured"]
    stopped = [case for case in cases if case["outcome"].startswith("not trained")]
    above = len(stopped) + sum(case["process"][1] > case["memory_bytes"] for case in trained)
    rows = []
    for key, label in LABELS["predictions"].items():
        off = sorted(abs(case[key][0] / case[key][1] - 1) for case in trained)
        cells = [statistics.median(off), off[int(0.9 * (len(off) - 1))], off[-1]]
        rows.append([label, *(f"{cell:.1%}".replace("%", " %") for cell in cells)])
    seconds = [case["planning_seconds"] for case in cases if "planning_seconds" in case]
    environment, twice = data["environment"], [case for case in cases if "first" in case]
    first = max((abs(case["step"][0] / case["step"][1] - 1) for case in twice), default=0)
    where = f"an {environment['device']} with {environment['threads']} threads ({environment['date'][:10]})"
    text = (
        f"The recommended recipe was trained in {len(trained)} of {len(cases)} cases. In the other cases, no recipe fit"
        " the budget, or the loss of accuracy of all recipes that fit was above one point or unknown. **The budget was"
        f" exceeded in {above} of {len(trained) + len(stopped)} runs.** The median time of a plan was"
        f" {statistics.median(seconds):.0f} s and the maximum {max(seconds):.0f} s, on {where}. {len(twice)} cases were"
        f" measured twice, because the error of the step time was above 15 % (up to {100 * first:.0f} %) while the"
        " machine was slower for some minutes. The table uses the second measurement."
    )
    head = ["prediction", "error, median", "error, 90th percentile", "error, largest"]
    return f"{table(head, rows)}\n\n{text} Record: `{records.path('plans')}`, which contains both measurements."


@block
def adapters() -> str:
    """Show adapters on ResNet-50, with frozen and with batch statistics of BatchNorm."""
    data = records.load("adapters")
    rows = []
    for name, recipe in data["recipes"].items():
        reported = data["reported"].get(name)
        cells = [LABELS["adapters"][name], f"{recipe['trainable_parameters']:,}"]
        cells.append("–" if reported is None else f"{reported:.0f}")
        cells += [f"{records.adapters_saved(name, statistics):.0f}" for statistics in ("batch", "frozen")]
        cells.append(f"{recipe['frozen']['peak_bytes'] / records.MIB:.0f}")
        rows.append(cells)
    head = [
        "recipe",
        "parameters trained",
        f"reported in {data['reported']['source']}, MiB",
        "saved MiB, batch statistics",
    ]
    return table([*head, "saved MiB, frozen statistics", "peak MiB, frozen statistics"], rows)


# ---------------------------------------------------------------------------------------------- projectors and speed
_PROJECTORS = ("WHT reflect", "WHT zero", "WHT ortho", "LHE", "DCT")
_PROJECTOR_HEAD = ["WHT `reflect` (published)", "WHT `zero`", "WHT `ortho`", "LHE (`ortho`)", "DCT"]
