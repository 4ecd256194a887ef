"""Format a plan as text for a terminal."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence

from efficient_ft.core.format import bytes_setting, format_bytes, format_seconds
from efficient_ft.core.sheet import Cell, Column, render
from efficient_ft.core.text import display_width, paragraph, terminal_width, wrapped
from efficient_ft.methods.declarations import Exactness
from efficient_ft.planning.options import Option
from efficient_ft.planning.plan import Plan

#: Display names of the exactness classes.
CLASSES = {
    Exactness.EXACT: "exact",
    Exactness.NEAR: "near exact",
    Exactness.APPROXIMATE: "approximate",
    Exactness.PART: "trains a part",
    Exactness.UNKNOWN: "unknown",
}


def plan_text(plan: Plan, *, every: bool = False, columns: Sequence[str] = ()) -> str:
    """Return the table of the options, the recommendation, and the excluded recipes with reasons.

    If `every` is True, all options are shown instead of the Pareto front of peak, step time and exactness. See
    `core.sheet.render` for `columns`.
    """
    where = "the GPU" if plan.device.startswith("cuda") else "the process"
    lines = [
        f"The budget for {where} is memory={bytes_setting(plan.memory_bytes)} ({format_bytes(plan.memory_bytes)})"
        + (f". The interpreter and the libraries use {format_bytes(plan.base_bytes)}" if plan.base_bytes else "")
        + f". The allocator is {plan.allocator}."
    ]
    if plan.memory_bytes < plan.asked_bytes:
        lines.append(
            f"The requested budget is {format_bytes(plan.asked_bytes)}, but this machine or its container has only"
            f" {format_bytes(plan.memory_bytes)}. The smaller value is used as the budget."
        )
    texts = ["\n".join(map(paragraph, lines))]
    shown = [option for option in plan.options if every or option.on_front or option == plan.recommended]
    if shown:
        which = "" if every else " and are on the Pareto front of peak, time and exactness (--all shows all recipes)"
        texts += [f"{paragraph(f'Recipes that fit{which}:')}\n{_table(shown, plan, columns)}", _legend(shown)]
    texts += ["\n".join(_recommendation(plan)), *_excluded(plan)]
    return "\n\n".join([*texts, f"Planned in {format_seconds(plan.seconds)}."])


def _table(options: Sequence[Option], plan: Plan, chosen: Sequence[str]) -> str:
    columns = {"recipe": Column(words=True), "peak": Column(), "step": Column(1), "run": Column(3), "class":
               Column(1, words=True), "cosine": Column(2), "lost": Column(1), "counted": Column(4)}  # fmt: skip
    rows = [_line(option, plan) for option in options]
    return render(list(columns), rows, "text", columns=columns, chosen=chosen)


def _legend(shown: Sequence[Option]) -> str:
    """Return sentences that explain the columns and state which values are measured."""
    tried = any(option.measured_bytes is not None for option in shown)
    evidence = dict.fromkeys(text for o in shown if o.exactness is Exactness.EXACT for text in o.evidence)
    return "\n".join(
        paragraph(line)
        for line in (
            "peak: peak memory of the process. counted: peak memory of the live tensors. Values with ≈ are predictions:"
            " peaks are predicted from the count, and times from FLOPs. The other values are measured on this machine."
            + (" The recommended recipe ran for a few steps in a separate process." if tried else ""),
            "cosine: cosine similarity between the gradient and the exact gradient of the trained parameters, on images"
            " of the run. If the cosine is not measured, the methods declare the class."
            + (f" Evidence that recipes are exact: {'; '.join(evidence)}." if evidence else ""),
            "lost: loss of test accuracy relative to full fine-tuning, in percentage points. The range covers finished"
            " studies of small networks without the memory method. The sign – means that the recipe was not studied.",
        )
    )


def _recommendation(plan: Plan) -> list[str]:
    """Return lines with the recommended recipe and its command, or with the reason why no recipe is recommended."""
    left = len(plan.not_examined)
    if plan.recommended is not None:
        lines = wrapped(f"Recommended: {plan.recommended.name}", terminal_width(), "  ")
        lines += _command([*plan.recommended.words, f"memory={bytes_setting(plan.memory_bytes)}"])
        of = f" of {plan.examined + left}" if left else ""
        if plan.examined == 1:
            lines.append(paragraph(f"The recommendation is based on one recipe: only 1{of} was examined.{_more(plan)}"))
        elif len(plan.options) == 1:
            lines.append(
                paragraph(
                    f"The recommendation is based on one recipe: only one of the {plan.examined} examined recipes"
                    f" fits{f' ({plan.examined + left} recipes in total)' if left else ''}.{_more(plan)}"
                )
            )
        elif left:
            lines.append(paragraph(f"The recommendation is based on {plan.examined}{of} recipes.{_more(plan)}"))
        return lines
    if plan.options:
        return [_broken(line) for line in _none_allowed(plan)]
    which = "No recipe fits" if not left else f"None of the {plan.examined} examined recipes fits"
    return [
        _broken(
            f"{which}. The smallest sufficient budget is {bytes_setting(plan.smallest_bytes)} (recipe {plan.smallest})."
            " Increase the budget, choose a smaller data.batch_size, model.image_size or model, or set split=true."
        )
    ]


def _more(plan: Plan) -> str:
    """Return a sentence on how to examine the remaining recipes, or an empty string if all recipes were examined."""
    left = len(plan.not_examined)
    if not left:
        return ""
    minutes = max(math.ceil(plan.planning_seconds / 60 * (1 + 1.5 * left / plan.examined)), 1)
    return f" To examine more recipes, use --planning-time {minutes}m."


def _command(words: Sequence[str]) -> list[str]:
    """Return a command in lines that fit the terminal and that a shell reads as one command."""
    lines = [f"  {words[0]}"]
    for word in words[1:]:
        if display_width(f"{lines[-1]} {word} \\") > terminal_width():
            lines[-1] += " \\"
            lines.append(f"      {word}")
        else:
            lines[-1] += f" {word}"
    return lines


def _excluded(plan: Plan) -> list[str]:
    """Return lists of the recipes that are not possible, by reason, and of the recipes that were not examined."""
    texts = []
    impossible = [one for one in plan.excluded if one.examined]
    if impossible:
        sizes: dict[str, list[int]] = {}
        reasons: dict[str, list[str]] = {}
        for one in impossible:
            if one.process_bytes is None:
                reasons.setdefault(one.reason, []).append(one.name)
            else:
                sizes.setdefault(one.name.partition(", ")[0], []).append(one.process_bytes)
        groups: dict[str, list[str]] = {}
        for stem, needed in sorted(sizes.items(), key=lambda pair: min(pair[1])):
            groups.setdefault(_span(needed, plan.memory_bytes), []).append(_several(stem, len(needed)))
        lines = [f"{', '.join(names)}: needs {span}" for span, names in groups.items()]
        lines += [f"{', '.join(names)}: {reason}" for reason, names in reasons.items()]
        first = f"Not possible ({len(impossible)}; the budget is {format_bytes(plan.memory_bytes)}):"
        texts.append("\n".join([first, *(_broken(f"  {line}") for line in lines)]))
    if plan.not_examined:
        stems = Counter(name.partition(", ")[0] for name in plan.not_examined)
        names = ", ".join(_several(stem, count) for stem, count in stems.items())
        first = f"Not examined ({len(plan.not_examined)}): planning took {format_seconds(plan.seconds)}.{_more(plan)}"
        texts.append(f"{paragraph(first)}\n{_broken(f'  {names}')}")
    return texts


def _broken(line: str) -> str:
    """Wrap a line with recipe names for the terminal."""
    return "\n".join(wrapped(line, terminal_width(), "    "))


def _several(stem: str, count: int) -> str:
    return stem if count == 1 else f"{stem} ({count} optimizers)"


def _span(sizes: Sequence[int], budget: int) -> str:
    """Return the range of sizes above the budget. A size that is printed like the budget is marked as larger."""
    shown = format_bytes(budget)
    least, most = (
        f"slightly more than {text}" if text == shown else text for text in map(format_bytes, (min(sizes), max(sizes)))
    )
    return least if least == most else f"{least} to {most}"


def _none_allowed(plan: Plan) -> list[str]:
    """Return lines that explain why no recipe is recommended, and which limits would allow a recipe."""
    lines = ["None of these recipes is within the limits of time and loss."]
    if any(option.choice <= Exactness.NEAR for option in plan.options):
        return [*lines, "The exact and near exact recipes take too long. Increase time=TIME to allow these recipes."]
    known = {o.name: max(o.points_lost.values()) for o in plan.options if o.points_lost}
    if known:
        name = min(known, key=known.__getitem__)
        points = math.ceil(10 * known[name]) / 10
        lines.append(f"Of the studied recipes, {name} has the smallest loss. Set loss={points:g} to allow this recipe.")
    if len(known) < len(plan.options):
        lines.append("Recipes without a study are not recommended. --json FILE writes the command of each recipe.")
    exact = [e for e in plan.excluded if e.exactness is not None and e.exactness <= Exactness.NEAR]
    if exact:
        least = min(exact, key=lambda e: e.process_bytes or 0)
        assert least.exactness is not None
        assert least.process_bytes is not None
        kind = CLASSES[least.exactness]
        lines.append(f"Set memory={bytes_setting(least.process_bytes)} to allow the {kind} recipe {least.name}.")
    return lines


def _cosine(option: Option) -> str:
    """Format the cosine. The cosine of the user's methods is unknown until it is measured."""
    if option.exactness is Exactness.EXACT:
        return "1"
    if option.cosine is None:
        return "–" if option.added is None else "unknown"
    return f"{option.cosine:.4f}"


def _line(option: Option, plan: Plan) -> list[Cell]:
    seconds, about = option.step_seconds, "" if option.timed else "≈ "
    lost = option.points_lost.values()
    points = "–"
    if lost:
        points = f"{min(lost):+.1f}" if len(lost) == 1 else f"{min(lost):+.1f}…{max(lost):+.1f}"
    return [
        option.name,
        ("≈ " if option.measured_bytes is None else "") + format_bytes(option.peak_bytes),
        "–" if seconds is None else about + format_seconds(seconds),
        "–" if seconds is None else about + format_seconds(seconds * plan.steps) if plan.steps else None,
        CLASSES[option.exactness],
        _cosine(option),
        "0" if option.exactness is Exactness.EXACT else points,
        format_bytes(option.counted.peak_bytes),
    ]
