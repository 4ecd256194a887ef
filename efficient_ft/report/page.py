"""Report of a run: a self-contained HTML page with figures, and the figures as PNG files."""

from __future__ import annotations

import base64
import re
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import NamedTuple

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_text_atomically
from efficient_ft.core.format import format_percent
from efficient_ft.report import figures
from efficient_ft.report.figures import Drawing, mean_over_steps, short
from efficient_ft.report.kept_tokens import draw_kept, kept_tokens
from efficient_ft.report.record import Record, describe, read

PAGE = "report.html"


class Written(NamedTuple):
    """The written files of a report, and notes on figures that could not be drawn."""

    files: list[Path]
    notes: list[str]


def write_report(run: Path, out: Path, images: int = 6) -> Written:
    """Draw the figures of the record of `run`, and write the figures and the HTML page to the folder `out`.

    Args:
        run: the run folder.
        out: the output folder, which is created if it does not exist.
        images: number of images for which the kept tokens are shown.

    Raises:
        UserError: If the run has no record, or matplotlib is not installed.
    """
    record = read(run)
    figures.require_matplotlib()
    facts, config = describe(run, record)
    notes: list[str] = []
    drawings = [figures.draw_budgets(record), figures.draw_trained(record), figures.draw_tokens(record)]
    drawings.append(figures.draw_magnitudes(record))
    if images:
        try:
            drawings.append(draw_kept(kept_tokens(run, config, images)))
        except UserError as error:  # Only this figure requires images and weights.
            notes.append(f"Kept tokens are not drawn. {error}")
    if drawings[0] is None:
        notes.append("The methods of this run have no budgets.")
    done = [drawing for drawing in drawings if drawing is not None]
    for drawing in done:
        drawing.write(out / drawing.file)
    write_text_atomically(out / PAGE, page(facts, record, done, notes))
    return Written([*(out / drawing.file for drawing in done), out / PAGE], notes)


_STYLE = """
:root { color-scheme: light dark; --paper: #ffffff; --ink: #1b1b1b; --faint: #5f5f5f; --line: #d9d9d9; }
@media (prefers-color-scheme: dark) {
  :root { --paper: #17181a; --ink: #e8e8e8; --faint: #a5a5a5; --line: #3a3c40; }
}
body { background: var(--paper); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; max-width: 62rem;
  margin: 2rem auto; padding: 0 1rem; }
h1 { font-size: 1.6rem; line-height: 1.25; } h2 { font-size: 1.2rem; margin-top: 2.2rem; }
figure { margin: 0; } figcaption, .note { color: var(--faint); }
img { background: #ffffff; border-radius: 6px; box-sizing: border-box; height: auto; max-width: 100%; padding: 8px; }
.wide { overflow-x: auto; } table { border-collapse: collapse; }
th, td { border-bottom: 1px solid var(--line); padding: .25rem .8rem .25rem 0; text-align: right; }
th:first-child, td:first-child { text-align: left; } dt { color: var(--faint); float: left; width: 7rem; }
dd { margin: 0 0 .2rem 7rem; overflow-wrap: anywhere; }
"""


def page(facts: dict[str, str], record: Record, drawings: Sequence[Drawing], notes: Sequence[str]) -> str:
    """Return the HTML page, which shows the `facts`, the `notes`, the `drawings`, and the `record` as a table."""
    title = " · ".join(re.sub(r" \([^)]*\)", "", facts[name]) for name in ("Method", "Model", "Data"))
    parts = [
        f'<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n<title>{escape(title)}</title>',
        '<meta name="viewport" content="width=device-width, initial-scale=1">',
        f"<style>{_STYLE}</style>\n</head>\n<body>\n<h1>{escape(title)}</h1>\n<dl>",
        *(f"<dt>{escape(name)}</dt><dd>{escape(text)}</dd>" for name, text in facts.items()),
        "</dl>",
        *(f'<p class="note">{escape(note)}</p>' for note in notes),
    ]
    for drawing in drawings:
        source = base64.b64encode(drawing.png).decode()
        parts.append(
            f"<h2>{escape(drawing.title)}</h2>\n<figure>\n"
            f'<img src="data:image/png;base64,{source}" alt="{escape(drawing.alt)}">\n'
            f"<figcaption>{escape(drawing.caption)}</figcaption>\n</figure>"
        )
    header, rows = table(record)
    parts += ['<h2>The numbers</h2>\n<div class="wide"><table>', _row("th", header)]
    parts += [_row("td", row) for row in rows]
    parts.append("</table></div>\n</body>\n</html>\n")
    return "\n".join(parts)


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


def _row(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"
