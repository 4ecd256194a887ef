"""Report of a run: a self-contained HTML page, and figures of the step statistics as PNG files."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import NamedTuple

import numpy as np

from efficient_ft.config import Config
from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.format import format_percent
from efficient_ft.methods.build import build_methods
from efficient_ft.methods.declarations import Axis
from efficient_ft.record.formats import USE_ITS_VERSION
from efficient_ft.record.results import NAME as RESULTS
from efficient_ft.record.results import read_results
from efficient_ft.record.step_stats import NAME as STEPS
from efficient_ft.report import figures
from efficient_ft.report.figures import Drawing, mean_over_steps, short
from efficient_ft.report.html import definitions, html_table, image, notes, scrollable
from efficient_ft.report.kept_tokens import draw_kept, kept_tokens
from efficient_ft.report.outcomes import outcome_sections
from efficient_ft.report.record import Record, describe, read
from efficient_ft.report.summary import costs, curves, further_facts, headline, methods
from efficient_ft.task import TASKS

PAGE = "report.html"


class Written(NamedTuple):
    """The written files of a report, and notes on parts that are missing."""

    files: list[Path]
    notes: list[str]


def write_report(run: Path, out: Path, images: int = 6) -> Written:
    """Write the page of a run, and the figures of its step statistics, to the folder `out`.

    Args:
        run: the run folder. The run must have finished, or must have recorded step statistics.
        out: the output folder, which is created if it does not exist.
        images: number of images for which the kept tokens are shown.

    Raises:
        UserError: If the run has neither results nor a record, if a file of the run is damaged, or if matplotlib is
            required and not installed.
    """
    finished = (run / RESULTS).is_file()
    record = read(run) if (run / STEPS).is_file() or not finished else None
    if record is not None:
        figures.require_matplotlib()
    facts, config = describe(run, record)
    results = read_results(run, USE_ITS_VERSION) if finished else None
    drawings, messages = _drawings(run, config, record, images)
    parts: list[tuple[str, str]] = []
    head = ""
    if results is not None:
        head, facts = headline(run, config, results), facts | further_facts(config, results)
        parts, missing = outcome_sections(run, config, results)
        messages += missing
    metric = TASKS[config.task].metric if config.task in TASKS else "accuracy"
    parts.append(("Training curves", curves(run, metric)))
    if results is not None:
        parts += [("Costs", costs(config, results)), ("Changes by the methods", methods(results))]
    parts += [(one.title, _figure(one)) for one in drawings]
    if record is not None:
        header, rows = table(record)
        parts.append(("Step statistics", html_table([header, *rows], "Step statistics of each block")))
    for drawing in drawings:
        drawing.write(out / drawing.file)
    title = " · ".join(re.sub(r" \([^)]*\)", "", facts[name]) for name in ("Method", "Model", "Data"))
    write_text_atomically(out / PAGE, page(title, facts, head, parts, messages))
    return Written([*(out / drawing.file for drawing in drawings), out / PAGE], messages)


def _drawings(run: Path, config: Config, record: Record | None, images: int) -> tuple[list[Drawing], list[str]]:
    """Return the figures of the step statistics and of the kept tokens, and notes on figures that are missing."""
    messages: list[str] = []
    drawings: list[Drawing | None] = []
    if record is not None:
        drawings = [figures.draw_budgets(record), figures.draw_trained(record), figures.draw_tokens(record)]
        drawings.append(figures.draw_magnitudes(record))
        if drawings[0] is None:
            messages.append("The methods of this run have no budgets.")
    if images and any(Axis.TOKENS in method.axes for method in build_methods(config)):
        try:
            figures.require_matplotlib()
            drawings.append(draw_kept(kept_tokens(run, config, images)))
        except UserError as error:  # Only this figure requires images and weights.
            messages.append(f"Kept tokens are not drawn. {error}")
    return [drawing for drawing in drawings if drawing is not None], messages


def page(
    title: str, facts: Mapping[str, str], head: str, sections: Sequence[tuple[str, str]], messages: Sequence[str]
) -> str:
    """Return the HTML page.

    Args:
        title: title of the page.
        facts: mapping from titles to facts about the run.
        head: HTML text above the facts.
        sections: titles and HTML texts of the sections. Sections without text are omitted.
        messages: notes on missing parts.
    """
    style, script = ((files("efficient_ft.report") / "assets" / name).read_text(encoding="utf-8") for name in
                     ("run.css", "run.js"))  # fmt: skip
    shown = [(f"part-{number}", *one) for number, one in enumerate(sections) if one[1]]
    links = "".join(f'<a href="#{key}">{escape(name)}</a>' for key, name, _ in shown)
    return "\n".join(
        [
            f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<style>{style}</style>\n</head>\n<body>\n<main>\n<h1>{escape(title)}</h1>{head}",
            definitions(facts),
            notes(messages),
            f'<nav aria-label="Sections">{links}</nav>',
            *(f'<section><h2 id="{key}">{escape(name)}</h2>\n{text}</section>' for key, name, text in shown),
            f"</main>\n<script>{script}</script>\n</body>\n</html>\n",
        ]
    )


def _figure(drawing: Drawing) -> str:
    caption = f"<figcaption>{escape(drawing.caption)}</figcaption>"
    shown = scrollable(image(drawing.png, "png", drawing.alt), drawing.title)
    return f'<figure class="png">{shown}{caption}</figure>'


def table(record: Record) -> tuple[list[str], list[list[str]]]:
    """Return the header and one row per block with the plotted values at the beginning and at the end of the record."""
    first, last, _ = record.ends
    columns: dict[str, list[str]] = {
        "block": record.blocks,
        "trained": [format_percent(share) for share in record.trained.mean(0)],
        "tokens after it": [short(value) for value in mean_over_steps(record.tokens)],
    }
    numbers: dict[str, np.ndarray | None] = {"budget": record.budgets, "relative magnitude": record.magnitudes}
    for name, values in numbers.items():
        for when, part in (("first", first), ("last", last)):
            if values is not None:
                columns[f"{name}, {when}"] = ["–" if np.isnan(v) else f"{v:.4f}" for v in mean_over_steps(values[part])]
    columns["tokens compared"] = [short(value) for value in mean_over_steps(record.compared)]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]
