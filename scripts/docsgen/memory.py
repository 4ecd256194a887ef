"""Blocks about memory and its predictions: allocators, states of optimizers, adapters, plans."""

from __future__ import annotations

import statistics

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
    columns = [*cases, *(f"error, {case}" for case in (cases[0], *cases[-2:])), "last steps", "bytes", "ms"]
    shown = report_text(data, columns, form="markdown")
    return f"{shown}\n\n{records.conditions('optimizer_states')}"


@block
def allocators_conditions() -> str:
    """State the conditions of the measurement of allocators, and their step times."""
    recipes = records.load("allocators")["models"]["deit_small"]["recipes"].values()
    ratios = [
        f"{statistics.median(min(r[name]['seconds']) / min(r['keep']['seconds']) for r in recipes):.2f}× with `{name}`"
        for name in ("mimalloc", "tcmalloc")
    ]
    conditions = records.conditions("allocators", "AdamW, each recipe and allocator in a separate process")
    return (
        f"{conditions} The shortest step of DeiT-S took, relative to the one with `keep`, the median over the recipes:"
        f" {', '.join(ratios)}."
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
    where = f"{environment['device']}, {environment['threads']} threads, {environment['date'][:10]}"
    text = (
        f"{len(cases)} cases: in {len(trained)} the recommended recipe was trained. In the others nothing fit, or only"
        f" recipes that lose more than a point or an unknown amount. **{above} of the"
        f" {len(trained) + len(stopped)} runs exceeded their budget.** A plan took {statistics.median(seconds):.0f} s"
        f" (median), {max(seconds):.0f} s at most, on {where}. {len(twice)} cases were measured twice: their step time"
        f" was off by more than 15 % (by up to {100 * first:.0f} %), because the machine was slower for some minutes."
        " The second measurement counts."
    )
    head = ["predicted", "off by, median", "90 % are off by at most", "largest"]
    return f"{table(head, rows)}\n\n{text} Record: `{records.path('plans')}`, with both."


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
