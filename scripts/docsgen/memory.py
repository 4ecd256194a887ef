"""Blocks about memory: allocators, optimizer states, adapters, and predictions of plans."""

from __future__ import annotations

import statistics
from typing import Any

from docsgen import records
from docsgen.markdown import block, table
from docsgen.records import LABELS
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
    """Show the largest steps, the errors and the memory of low-bit AdamW, relative to AdamW in 32 bits."""
    data = records.load("optimizer_states")
    cases = list(next(iter(data["optimizers"].values()))["cases"])
    errors = [*(f"error, {case}" for case in (cases[0], *cases[-2:])), "last steps", "bytes", "ms"]
    largest, other = (_states(data, columns) for columns in (cases, errors))
    return (
        f"This table shows the largest step relative to that of torch's AdamW on the same gradients:\n\n{largest}\n\n"
        "This table shows the relative error over all steps, the norm of the last tenth of the steps relative to"
        f" torch's AdamW, and the memory and the time of a step for a parameter of 768×3072 values:\n\n{other}\n\n"
        f"{records.conditions('optimizer_states')}"
    )


def _states(data: dict[str, Any], columns: list[str]) -> str:
    """Return a table of optimizers without its caption, and replace abbreviations in the header."""
    shown = report_text(data, columns, form="markdown").partition("\n\n")[2]
    head, line, rows = shown.partition("\n")
    for short, words in {"spread": "range", "late": "pause", "last steps, ": "norm of the last steps, "}.items():
        head = head.replace(short, words)
    return f"{head}{line}{rows}"


@block
def plan_predictions(file: str) -> str:
    """Show the errors of the predictions of plans, and the number of runs that exceeded their budgets."""
    data = records.load(file)
    cases = data["cases"]
    trained = [case for case in cases if case["outcome"] == "measured"]
    stopped = [case for case in cases if case["outcome"].startswith("not trained")]
    above = len(stopped) + sum(case["process"][1] > case["memory_bytes"] for case in trained)
    rows = []
    for key, label in LABELS["predictions"].items():
        off = sorted(abs(case[key][0] / case[key][1] - 1) for case in trained if key in case)
        if not off:
            continue
        cells = [statistics.median(off), off[int(0.9 * (len(off) - 1))], off[-1]]
        rows.append([label, *(f"{cell:.1%}".replace("%", " %") for cell in cells)])
    seconds = [case["planning_seconds"] for case in cases if "planning_seconds" in case]
    twice, environment = sum("first" in case for case in cases), data["environment"]
    text = (
        f"The recommended recipe was trained in {len(trained)} of {len(cases)} cases, and {above} runs exceeded the"
        f" budget. In the remaining cases, no recipe that fit the budget had a known loss of accuracy of at most one"
        f" point."
    )
    if twice:
        text += (
            f" {twice} cases were measured twice, because the machine was slow for some minutes. For these cases, the"
            f" table uses the second measurement."
        )
    if any("step" in case for case in trained):
        text += f" The median planning time was {statistics.median(seconds):.0f} s."
    text += (
        f" All cases were measured on {environment['date'][:10]} on an {environment['device']}."
        f" Record: `{records.path(file)}`."
    )
    head = ["prediction", "error, median", "error, 90th percentile", "error, largest"]
    return f"{table(head, rows)}\n\n{text}"


@block
def adapters() -> str:
    """Show the memory of adapters on ResNet-50, with frozen and with batch statistics of BatchNorm."""
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
