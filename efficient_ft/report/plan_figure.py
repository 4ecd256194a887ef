"""Figure of a plan: peak memory and step time of the recipes, with one series for each class."""

from __future__ import annotations

from efficient_ft.planning import Exactness, Plan
from efficient_ft.planning.text import CLASSES
from efficient_ft.report.charts import Chart, Panel, Series


def plan_chart(plan: Plan) -> Chart:
    """Return a chart of all options in `plan` whose step time is known."""
    series = []
    for exactness in Exactness:
        of = [o for o in plan.options if o.exactness is exactness and o.step_seconds is not None]
        if of:
            peaks, seconds = [o.peak_bytes / 1e9 for o in of], [o.step_seconds or 0.0 for o in of]
            series.append(Series(CLASSES[exactness], peaks, seconds))
    if plan.recommended is not None and plan.recommended.step_seconds is not None:
        best = plan.recommended
        series.append(Series(f"recommended: {best.name}", [best.peak_bytes / 1e9], [best.step_seconds or 0.0]))
    panel = Panel("", "peak of the process, GB", "seconds of an optimizer step", series, "points")
    return Chart(f"Recipes within {plan.memory_bytes / 1e9:g} GB", [panel])
