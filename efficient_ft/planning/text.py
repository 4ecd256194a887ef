"""A plan as text for a terminal."""

from __future__ import annotations

import math

from efficient_ft.core.format import format_seconds
from efficient_ft.core.text import table
from efficient_ft.planning.candidates import Exactness
from efficient_ft.planning.options import Option
from efficient_ft.planning.planner import Plan

#: What each class of recipes is called.
CLASSES = {
    Exactness.EXACT: "exact",
    Exactness.NEAR: "near exact",
    Exactness.APPROXIMATE: "approximate",
    Exactness.PART: "trains a part",
}


def plan_text(plan: Plan, *, every: bool = False) -> str:
    """The table of the options, the recommendation, and what is excluded and why.

    Args:
        plan: the plan.
        every: all options; False: those on the Pareto front of peak, step time and exactness.
    """
    where = "the GPU" if plan.device.startswith("cuda") else "the process"
    lines = [
        f"Budget: {gigabytes(plan.memory_bytes)} of memory for {where}"
        + (f", {gigabytes(plan.base_bytes)} of it for the interpreter and its libraries" if plan.base_bytes else "")
        + f"; allocator: {plan.allocator}."
    ]
    if plan.memory_bytes < plan.asked_bytes:
        lines.append(
            f"{gigabytes(plan.asked_bytes)} were asked for; this machine or its container may take"
            f" {gigabytes(plan.memory_bytes)}, which counts."
        )
    shown = [option for option in plan.options if every or option.on_front or option == plan.recommended]
    if shown:
        title = "recipes that fit" if every else "recipes that fit, on the front of peak, time and exactness"
        lines += ["", table([_header(plan, title), *(_line(option, plan) for option in shown)], left=(0, 5))]
        lines += [
            "",
            "peak: of the process; counted: live tensors of it. Values with ≈ are predicted, peaks from the count and"
            " times from FLOPs; the",
            "others are measured here"
            + (
                ": the recommended recipe took a few steps in a process of its own."
                if any(option.measured_bytes is not None for option in shown)
                else "."
            ),
            "cosine: of the gradient with the exact one, on images of the run; lost: points of test accuracy below full"
            " fine-tuning in finished",
            "studies of small networks, from the best to the worst, without the memory method; –: not known.",
        ]
    lines.append("")
    if plan.recommended is not None:
        lines += ["Recommended: " + plan.recommended.name, "  " + plan.recommended.command]
        lines[-1] += f" memory={_setting(plan.memory_bytes)}"
    elif plan.options:
        lines += _none_allowed(plan)
    else:
        lines.append(
            f"Nothing fits. The smallest budget that does is {_setting(plan.smallest_bytes)}, with {plan.smallest}."
            " Or choose a smaller data.batch_size, model.image_size or model, or allow split=true."
        )
    if plan.excluded:
        lines += ["", f"Not possible ({len(plan.excluded)}):"]
        over = [e for e in plan.excluded if e.process_bytes is not None]
        if over:
            over.sort(key=lambda e: e.process_bytes or 0)
            lines.append(
                f"  above the budget: {'; '.join(f'{e.name} ({gigabytes(e.process_bytes or 0)})' for e in over)}"
            )
        reasons: dict[str, list[str]] = {}
        for one in plan.excluded:
            if one.process_bytes is None:
                reasons.setdefault(one.reason, []).append(one.name)
        lines += [f"  {'; '.join(names)}: {reason}" for reason, names in reasons.items()]
    lines += ["", f"Planned in {plan.seconds:.0f} s."]
    return "\n".join(lines)


def _none_allowed(plan: Plan) -> list[str]:
    """Why none of the recipes that fit is recommended, and what would allow one."""
    lines = ["None of these is within the limits of time and loss."]
    if any(option.exactness <= Exactness.NEAR for option in plan.options):
        return [*lines, "The exact and near exact ones take too long: time=LONGER allows them."]
    known = {o.name: max(o.points_lost.values()) for o in plan.options if o.points_lost}
    if known:
        name = min(known, key=known.__getitem__)
        points = math.ceil(10 * known[name]) / 10
        lines.append(f"{name} loses the least of those that were studied: loss={points:g} allows it.")
    if len(known) < len(plan.options):
        lines.append("What was never studied is not recommended; --json FILE has the command of each recipe.")
    exact = [e for e in plan.excluded if e.exactness is not None and e.exactness <= Exactness.NEAR]
    if exact:
        least = min(exact, key=lambda e: e.process_bytes or 0)
        assert least.exactness is not None
        assert least.process_bytes is not None
        kind = CLASSES[least.exactness]
        lines.append(f"With memory={_setting(least.process_bytes)} a recipe fits that is {kind}: {least.name}.")
    return lines


def gigabytes(size: int) -> str:
    """1234567890 → ``1.23 GB``: decimal, as budgets are usually given."""
    return f"{size / 1e9:.2f} GB"


def _setting(size: int) -> str:
    return f"{-(-size // 10**7) / 100:g}GB"


def _header(plan: Plan, title: str) -> list[str]:
    total = ["run"] if plan.steps else []
    return [title, "peak", "counted", "step", *total, "class", "cosine", "lost"]


def _line(option: Option, plan: Plan) -> list[str]:
    seconds, about = option.step_seconds, "" if option.timed else "≈ "
    step = "–" if seconds is None else about + format_seconds(seconds)
    total = []
    if plan.steps:
        total = ["–" if seconds is None else about + format_seconds(seconds * plan.steps)]
    lost = option.points_lost.values()
    points = "–"
    if lost:
        points = f"{min(lost):+.1f}" if len(lost) == 1 else f"{min(lost):+.1f}…{max(lost):+.1f}"
    return [
        option.name,
        ("≈ " if option.measured_bytes is None else "") + gigabytes(option.peak_bytes),
        gigabytes(option.counted.peak_bytes),
        step,
        *total,
        CLASSES[option.exactness],
        "–" if option.cosine is None else "1" if option.exactness is Exactness.EXACT else f"{option.cosine:.4f}",
        "0" if option.exactness is Exactness.EXACT else points,
    ]
