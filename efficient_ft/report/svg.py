"""Charts as SVG elements of an HTML page. Colors and text follow the style of the page, also in dark mode."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from html import escape
from typing import Any, NamedTuple

import numpy as np

from efficient_ft.core.text import plain_line, shortened
from efficient_ft.data.inspection import spread
from efficient_ft.record.class_results import confusion_matrix

#: Size of a chart and its margins (left, right, top, bottom), in units of the SVG element.
_WIDTH, _HEIGHT, _MARGINS = 420, 250, (62, 12, 10, 40)
#: Maximum number of points of a line and of a scatter plot.
_POINTS = 400
#: Width of a confusion matrix, minimum and maximum size of an entry, and minimum sizes for class names and for numbers.
_MATRIX, _LEAST, _LARGEST, _NAMED, _NUMBERED = 640, 2, 44, 11, 24


class Line(NamedTuple):
    """A named line of a chart with one y value for each x value."""

    name: str
    x: Sequence[float]
    y: Sequence[float]


def line_chart(
    title: str,
    x_label: str,
    lines: Sequence[Line],
    form: Callable[[float], str] = "{:.4g}".format,
    note: str = "",
    zero: bool = False,
) -> str:
    """Return a figure with a legend. The alt text states the ends of each line.

    `form` formats values of the y axis, which starts at 0 if `zero` is True. `note` is a part of the caption.
    """
    values = [v for one in lines for v in one.y]
    axes = _Axes([v for one in lines for v in one.x], [*values, *([0.0] if zero else [])], x_label, form)
    paths, legend, alt = [], [], []
    for number, one in enumerate(lines):
        kept = spread(len(one.x), _POINTS)
        at = [(axes.x(one.x[i]), axes.y(one.y[i])) for i in kept]
        paths.append(f'<path class="line c{number % 4}" d="M{"L".join(f"{x:.1f} {y:.1f}" for x, y in at)}"/>')
        if len(at) <= 30:
            paths += [f'<circle class="dot c{number % 4}" cx="{x:.1f}" cy="{y:.1f}" r="3"/>' for x, y in at]
        legend.append(f'<span class="key c{number % 4}">{escape(one.name)}</span>')
        ends = f"{form(one.y[0])} at the beginning, {form(one.y[-1])} at the end"
        alt.append(f"{one.name}: {ends}, between {form(min(one.y))} and {form(max(one.y))}")
    caption = f"<figcaption>{' '.join(legend)}{' ' + escape(note) if note else ''}</figcaption>"
    chart = axes.svg("".join(paths), f"{title}. {'. '.join(alt)}.")
    return f"<figure><h3>{escape(title)}</h3>{chart}{caption}</figure>"


def scatter(title: str, true: np.ndarray, predicted: np.ndarray) -> str:
    """Return a figure with the predicted value (y) and the true value (x) of each sample, and the line y = x."""
    kept = spread(len(true), _POINTS)
    low, high = float(min(true.min(), predicted.min())), float(max(true.max(), predicted.max()))
    axes = _Axes([low, high], [low, high], "true value", "{:.4g}".format)
    line = f'<path class="diagonal" d="M{axes.x(low)} {axes.y(low)}L{axes.x(high)} {axes.y(high)}"/>'
    dots = [f'<circle class="point" cx="{axes.x(a):.1f}" cy="{axes.y(b):.1f}" r="3"/>'
            for a, b in zip(true[kept].tolist(), predicted[kept].tolist(), strict=True)]  # fmt: skip
    alt = f"{title}: predicted values against true values, both between {low:.4g} and {high:.4g}."
    note = f" {len(kept)} of {len(true)} samples are shown." if len(kept) < len(true) else ""
    caption = f"Predicted values (vertical) against true values (horizontal). The line marks exact predictions.{note}"
    return (
        f"<figure><h3>{escape(title)}</h3>{axes.svg(line + ''.join(dots), alt)}"
        f"<figcaption>{caption}</figcaption></figure>"
    )


def calibration(samples: Sequence[int], accuracy: Sequence[float], error: str) -> str:
    """Return a reliability diagram (Guo et al. 2017). `error` is the formatted calibration error."""
    axes, count = _Axes([0, 1], [0, 1], "probability of the predicted class", _percent, exact=True), len(samples)
    bars = []
    for number, (size, height) in enumerate(zip(samples, accuracy, strict=True)):
        if size:
            left, right, top = axes.x(number / count), axes.x((number + 1) / count), min(axes.y(height), axes.y(0) - 2)
            span = " to ".join(_percent(edge / count) for edge in (number, number + 1))
            text = f"probability {span}: {_percent(height)} of {size} are correct"
            bars.append(f'<rect class="bar" x="{left + 1:.1f}" y="{top:.1f}" width="{right - left - 2:.1f}" '
                        f'height="{axes.y(0) - top:.1f}"><title>{text}</title></rect>')  # fmt: skip
    line = f'<path class="diagonal" d="M{axes.x(0)} {axes.y(0)}L{axes.x(1)} {axes.y(1)}"/>'
    alt = f"Reliability diagram: bars of the accuracy in {count} bins of the probability. Calibration error {error}."
    return f"<figure>{axes.svg(''.join(bars) + line, alt)}</figure>"


def matrix(results: Mapping[str, Any], names: Sequence[str]) -> str:
    """Return the confusion matrix of a `record.class_results.ClassResults`. Rows are true classes."""
    counts, classes = confusion_matrix(results), len(names)
    size = max(_LEAST, min(_LARGEST, _MATRIX // classes))
    font = min(14, round(0.8 * size))
    labels = [shortened(plain_line(name), 24) for name in names] if size >= _NAMED else []
    margin = max(24, round(0.62 * font * max(map(len, labels))) + 8) if labels else 2
    side = margin + classes * size
    totals = np.maximum(counts.sum(1), 1)
    layers: dict[tuple[str, int], list[str]] = {}
    texts = []
    for row, column in np.argwhere(counts).tolist():
        x, y = margin + column * size, margin + row * size
        share = round(8 * math.sqrt(counts[row, column] / totals[row]))
        shade = (25 + 5 * share) if size >= _NUMBERED else (40 + 7 * share)  # numbers must be readable on the colors
        layers.setdefault(("right" if row == column else "wrong", shade), []).append(f"M{x} {y}h{size}v{size}h-{size}z")
        if size >= _NUMBERED:
            center = f'x="{x + size / 2}" y="{y + size / 2 + 5}"'
            texts.append(f'<text {center} class="middle">{counts[row, column]}</text>')
    for number, label in enumerate(labels):
        at = margin + (number + 0.5) * size + font / 3
        texts.append(f'<text x="{margin - 5}" y="{at:.1f}" class="end">{escape(label)}</text>')
        texts.append(f'<text transform="translate({at:.1f} {margin - 5}) rotate(-90)">'
                     f"{escape(label)}</text>")  # fmt: skip
    cells = "".join(f'<path class="{kind}" fill-opacity=".{shade}" d="{"".join(d)}"/>'
                    for (kind, shade), d in layers.items())  # fmt: skip
    frame = f'<rect class="frame" x="{margin}" y="{margin}" width="{classes * size}" height="{classes * size}"/>'
    least = min(side, max(round(0.75 * side), 300)) if size >= _NUMBERED else side if labels else min(side, 340)
    return (
        f'<svg class="cells" viewBox="0 0 {side} {side}" width="{side}" role="img" '
        f'style="font-size:{font}px;min-width:{least}px" aria-label="Confusion matrix of {classes} classes" '
        f'data-size="{size}" data-margin="{margin}">{cells}{frame}{"".join(texts)}</svg>'
    )


def _percent(value: float) -> str:
    return f"{100 * value:.0f} %"


class _Axes:
    """Scales of a chart. `exact` keeps the given limits instead of adding a margin."""

    def __init__(
        self, xs: Sequence[float], ys: Sequence[float], label: str, form: Callable[[float], str], exact: bool = False
    ) -> None:
        self._label, self._form = label, form
        self._x, self._y = (min(xs), max(xs)), (min(ys), max(ys))
        if not exact:
            room = (self._y[1] - self._y[0]) * 0.06 or abs(self._y[1]) * 0.06 or 1.0
            self._y = (self._y[0] - room if self._y[0] < 0 or self._y[0] > room else 0.0, self._y[1] + room)

    def x(self, value: float) -> float:
        left, right, _, _ = _MARGINS
        return left + (value - self._x[0]) / ((self._x[1] - self._x[0]) or 1) * (_WIDTH - left - right)

    def y(self, value: float) -> float:
        _, _, top, bottom = _MARGINS
        return _HEIGHT - bottom - (value - self._y[0]) / ((self._y[1] - self._y[0]) or 1) * (_HEIGHT - top - bottom)

    def svg(self, content: str, alt: str) -> str:
        left, right, top, bottom = _MARGINS
        parts = []
        for value in _ticks(*self._y):
            y = self.y(value)
            parts.append(f'<path class="grid" d="M{left} {y:.1f}H{_WIDTH - right}"/>')
            parts.append(f'<text x="{left - 6}" y="{y + 4:.1f}" class="end">{escape(self._form(value))}</text>')
        for value in _ticks(*self._x):
            x = f"{self.x(value):.1f}"
            parts.append(f'<path class="grid" d="M{x} {top}V{_HEIGHT - bottom}"/>')
            parts.append(f'<text x="{x}" y="{_HEIGHT - bottom + 16}" class="middle">{value:g}</text>')
        middle = (left + _WIDTH - right) / 2
        parts.append(f'<text x="{middle}" y="{_HEIGHT - 6}" class="middle">{escape(self._label)}</text>')
        box = f'viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(alt)}"'
        return f'<svg class="chart" {box}>{"".join(parts)}{content}</svg>'


def _ticks(low: float, high: float) -> list[float]:
    """Return about five round numbers from `low` to `high`."""
    rough = (high - low) / 5 or 1.0
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(factor * power for factor in (1, 2, 5, 10) if factor * power >= rough * (1 - 1e-9))
    first, last = math.ceil(low / step - 1e-9), math.floor(high / step + 1e-9)
    return [float(f"{number * step:.12g}") for number in range(first, last + 1)]
