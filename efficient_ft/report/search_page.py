"""Page of a search (``efficient-ft auto``): the chosen recipe, all recipes that were tried, and the effect of time."""

from __future__ import annotations

import os
import shlex
from collections.abc import Mapping
from functools import partial
from html import escape
from pathlib import Path

from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.format import format_bytes, format_metric, format_seconds
from efficient_ft.core.text import plain_line, spelled
from efficient_ft.record.results import NAME as RESULTS
from efficient_ft.record.results import read_results
from efficient_ft.report.html import Cell, html_table
from efficient_ft.report.page import PAGE, page, write_report
from efficient_ft.report.svg import Line, line_chart
from efficient_ft.search.halving import ranked
from efficient_ft.search.state import Arm, SearchState, read_state
from efficient_ft.search.text import command_of, peak_bytes, standard_error

#: Maximum number of recipes whose accuracy is drawn. The style of the page has four colors.
_DRAWN = 4


def write_search_page(folder: Path, out: Path) -> list[Path]:
    """Write the page of the search in `folder` to the folder `out`, and the page of the run of the best recipe.

    Returns:
        The written pages.

    Raises:
        UserError: If no recipe has finished a slice of training, or if a file is damaged.
    """
    state = read_state(folder)
    assert state is not None
    raced = ranked([arm for arm in state.arms if arm.slices])
    if not raced:
        raise UserError(
            f"The search in {folder} has not trained a recipe yet. Repeat the command of the search to continue."
        )
    best = raced[0] if state.final is None else state.arm(state.final.arm)
    written = []
    run = folder / best.folder
    if (run / RESULTS).is_file():
        written += write_report(run, run / "report", 0).files
    form = partial(format_metric, metric=state.metric or "accuracy")
    facts = {
        **({"Network": best.network} if best.network else {}),
        "Recipe": f"{best.recipe}, learning rate {best.lr:.2g} (from the study: {best.source})",
        "Settings": " ".join(state.settings),
        "Time": _time(state),
        "Memory": f"{format_bytes(peak_bytes(state))} in the largest process, of {format_bytes(state.memory_bytes)}",
    }
    if (run / RESULTS).is_file():
        facts["Methods"] = "; ".join(one["summary"] for one in read_results(run)["methods"].values())
    if state.data is not None:
        data = state.data
        facts["Samples"] = f"{data.train:,} train, {data.val:,} val, {data.test:,} test"
    parts = [
        ("Recipes", _recipes(state, raced, best)),
        ("Accuracy over time", _curves(state, raced, best)),
        ("More time", _more_time(best, form)),
    ]
    title = f"Search: {_label(state, best)}"
    head = _headline(state, best) + _link(run, out)
    write_text_atomically(out / PAGE, page(title, facts, head, parts, _missing(state)))
    return [*written, out / PAGE]


def _label(state: SearchState, arm: Arm) -> str:
    """Return the recipe of an arm, after its network if there are several networks."""
    return f"{arm.network} {arm.recipe}" if state.several_networks else arm.recipe


def _headline(state: SearchState, best: Arm) -> str:
    metric, final, data = state.metric or "accuracy", state.final, state.data
    if final is None or final.value is None or data is None:
        so_far = f"<span>{escape(spelled(metric))} on the val split so far</span>"
        return f'<p class="result">{so_far} <strong>{format_metric(best.slices[-1].value, metric)}</strong></p>'
    split, value, count = ("val", final.value, data.val) if final.test is None else ("test", final.test, data.test)
    about = f"{count:,} samples"
    note = ""
    if metric == "accuracy":
        about = f"standard error {format_metric(standard_error(value, count), metric)}, {about}"
        error = format_metric(standard_error(best.slices[-1].value, data.val), metric)
        note = (
            f"The recipes were compared on {data.val:,} validation samples. Differences below {error}, the standard"
            " error of one accuracy, are not reliable."
        )
    command = " ".join(map(shlex.quote, command_of(state)))
    return (
        f'<p class="result"><span>{escape(spelled(metric))} on the {split} split</span>'
        f" <strong>{format_metric(value, metric)}</strong> <span>{escape(about)}</span></p>"
        f'<p class="note">{escape(note)}</p><p>This command trains the model alone, with the same result:</p>'
        f'<pre tabindex="0" aria-label="Command"><code>{escape(plain_line(command))}</code></pre>'
    )


def _link(run: Path, out: Path) -> str:
    report = run / "report" / PAGE
    if not report.is_file():
        return ""
    place = os.path.relpath(report, out).replace(os.sep, "/")
    return f'<p><a href="{escape(place)}">Results of each class, mispredictions, curves and costs of this model</a></p>'


def _time(state: SearchState) -> str:
    if state.unit == "steps":
        return f"{state.elapsed:,.0f} of {state.budget:,.0f} optimizer steps"
    return f"{format_seconds(state.elapsed)} of {format_seconds(state.budget)}"


def _missing(state: SearchState) -> list[str]:
    return [] if state.finished else ["The search is not finished. Repeat the command of the search to continue."]


def _recipes(state: SearchState, raced: list[Arm], best: Arm) -> str:
    metric = state.metric or "accuracy"
    several = state.several_networks
    header: list[Cell] = [
        *(["network"] if several else []),
        "recipe",
        "learning rate",
        f"val {metric}",
        "steps",
        "training time",
        "peak memory",
        "outcome",
    ]
    rows: list[list[Cell]] = [header]
    for arm in [*raced, *(other for other in state.arms if not other.slices)]:
        final = state.final if arm is best else None
        value = arm.value if final is None or final.value is None else final.value
        step = arm.step if final is None or not final.steps else final.steps
        last = arm.slices[-1] if arm.slices else None
        peak = max((one.peak_bytes for one in arm.slices), default=None)
        rows.append(
            [
                *([arm.network] if several else []),
                arm.recipe,
                (f"{arm.lr:.2g}", arm.lr),
                ("–" if value is None else format_metric(value, metric), value),
                (f"{step:,}", float(step)),
                ("–" if last is None else format_seconds(last.trained), None if last is None else last.trained),
                ("–" if peak is None else format_bytes(peak), None if peak is None else float(peak)),
                arm.stopped or ("trained to the end" if state.finished else "in the race"),
            ]
        )
    table = html_table(rows, "Recipes", words=(0, 1, 7) if several else (0, 6), sort=True)
    return table + _listed("networks", state.networks) + _listed("recipes", state.refused)


def _listed(what: str, reasons: Mapping[str, str]) -> str:
    """Return a list of the networks or recipes that did not take part, with reasons, or "" if there are none."""
    items = "".join(f"<li>{escape(plain_line(f'{name}: {reason}'))}</li>" for name, reason in reasons.items())
    return f"<p>These {what} were excluded:</p><ul>{items}</ul>" if items else ""


def _curves(state: SearchState, raced: list[Arm], best: Arm) -> str:
    """Return charts of the validation metric over the training time and over the peak memory."""
    metric = state.metric or "accuracy"
    form = partial(format_metric, metric=metric)
    drawn = [best, *(arm for arm in raced if arm is not best)][:_DRAWN]
    lines = [Line(arm.name, [one.trained for one in arm.slices], [one.value for one in arm.slices]) for arm in drawn]
    note = "" if len(raced) <= _DRAWN else f"The {_DRAWN} best recipes are shown."
    charts = [line_chart("Validation metric over the training time", "training time in seconds", lines, form, note)]
    front = _front(raced)
    if len(front) > 1:
        named = ", ".join(_label(state, arm) for arm in front)
        line = Line(
            "recipes that no other recipe exceeds in both",
            [max(one.peak_bytes for one in arm.slices) / 2**20 for arm in front],
            [arm.slices[-1].value for arm in front],
        )
        charts.append(line_chart("Pareto front of memory and metric", "peak memory in MiB", [line], form, f"{named}."))
    return f'<div class="charts">{"".join(charts)}</div>'


def _front(raced: list[Arm]) -> list[Arm]:
    """Return the arms on the Pareto front of peak memory and validation metric, in increasing order of memory."""
    found: list[Arm] = []
    for arm in sorted(raced, key=lambda one: (max(part.peak_bytes for part in one.slices), -one.slices[-1].value)):
        if not found or arm.slices[-1].value > found[-1].slices[-1].value:
            found.append(arm)
    return found


def _more_time(best: Arm, form: partial[str]) -> str:
    """Return a sentence about the gain of the best recipe between its last two evaluations at a constant rate."""
    if len(best.slices) < 2:
        return "<p>The best recipe was evaluated only once with a constant learning rate, so no trend is known.</p>"
    before, last = best.slices[-2:]
    text = (
        f"With a constant learning rate, the validation metric of the best recipe changed from {form(before.value)}"
        f" after {format_seconds(before.trained)} of training to {form(last.value)} after"
        f" {format_seconds(last.trained)}."
    )
    return f"<p>{escape(text)}</p>"
