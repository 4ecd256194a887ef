"""Charts that are written as PNG images and as CSV files."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from efficient_ft.core.files import write_bytes_atomically, write_text_atomically
from efficient_ft.core.text import csv_text
from efficient_ft.report.figures import DPI, require_matplotlib

#: Maximum number of series in a panel with a legend.
MAX_NAMED = 14


@dataclass(frozen=True)
class Series:
    """Named series of points. `x` and `y` must have the same length. In bar charts, `x` may contain strings."""

    name: str
    x: Sequence[float | str]
    y: Sequence[float]


@dataclass(frozen=True)
class Panel:
    """A pair of axes with labels. The labels `x` and `y` should include the units.

    `kind` must be ``lines`` (with markers if there are few points), ``points``, ``bars`` or ``image``. A panel of kind
    ``image`` must have one series, which contains the pixels of a square image in row-major order.
    """

    title: str
    x: str
    y: str
    series: Sequence[Series]
    kind: Literal["lines", "points", "bars", "image"] = "lines"
    #: Use a logarithmic x axis.
    log: bool = False


@dataclass(frozen=True)
class Chart:
    """A figure with one or more panels side by side."""

    title: str
    panels: Sequence[Panel]
    notes: Sequence[str] = field(default=())


def write_chart(chart: Chart, path: Path) -> list[Path]:
    """Write a chart to ``PATH.png`` and ``PATH.csv``. Raise a `UserError` if matplotlib is not installed."""
    require_matplotlib()
    png, table = path.with_name(f"{path.name}.png"), path.with_name(f"{path.name}.csv")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(5.2 * len(chart.panels), 4.2), layout="constrained")
    figure.suptitle(chart.title)
    for axes, panel in zip(figure.subplots(1, len(chart.panels), squeeze=False)[0], chart.panels, strict=True):
        _draw(axes, panel)
    stream = io.BytesIO()
    figure.savefig(stream, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
    write_bytes_atomically(png, stream.getvalue())
    write_text_atomically(table, chart_csv(chart))
    return [png, table]


def chart_csv(chart: Chart) -> str:
    """Return the data of a chart as CSV with the columns panel, series, x and y, and with one row for each point."""
    rows = [("panel", "series", "x", "y")]
    for panel in chart.panels:
        for series in panel.series:
            for x, y in zip(series.x, series.y, strict=True):
                rows.append((panel.title, series.name, x if isinstance(x, str) else f"{x:.6g}", f"{y:.6g}"))
    return csv_text(rows)


def _draw(axes: Any, panel: Panel) -> None:
    from matplotlib import colormaps

    axes.set_title(panel.title)
    axes.set_xlabel(panel.x)
    axes.set_ylabel(panel.y)
    if panel.log:
        axes.set_xscale("log")
    colors = colormaps["viridis"]([i / max(1, len(panel.series)) for i in range(len(panel.series))])
    if panel.kind == "image":
        (series,) = panel.series
        side = round(len(series.y) ** 0.5)
        axes.imshow([series.y[row * side : (row + 1) * side] for row in range(side)], cmap="viridis")
        axes.grid(visible=False)
        return
    if panel.kind == "bars":
        words = list(dict.fromkeys(x for series in panel.series for x in series.x))
        width = 0.8 / len(panel.series)
        for number, (series, color) in enumerate(zip(panel.series, colors, strict=True)):
            places = [words.index(x) + (number - (len(panel.series) - 1) / 2) * width for x in series.x]
            axes.bar(places, series.y, width, label=series.name, color=color)
        labels = [str(word) for word in words]
        axes.set_xticks(range(len(words)), labels, rotation=45 if sum(map(len, labels)) > 30 else 0)
    else:
        for series, color in zip(panel.series, colors, strict=True):
            few = len(series.x) <= 20
            style = {"linestyle": "" if panel.kind == "points" else "-", "marker": "o" if few else ""}
            axes.plot(series.x, series.y, label=series.name, color=color, **style)
    if 1 < len(panel.series) <= MAX_NAMED:  # A longer legend would cover the plot.
        axes.legend(fontsize=8)
