"""SVG figures in light and dark mode, written as text: the same bytes for the same numbers on every machine."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

#: Colors by class: in light mode, in dark mode.
COLORS = {
    "c0": ("#24292f", "#e6edf3"),
    "c1": ("#0b6e99", "#4fb3e0"),
    "c2": ("#b3541e", "#f0934f"),
    "c3": ("#2f7d32", "#6cc070"),
    "c4": ("#7a3e9d", "#c08ae0"),
    "c5": ("#8a8f98", "#8b949e"),
    "c6": ("#b8336a", "#f07aa8"),
    "c7": ("#9a7b00", "#d9b83f"),
}


def _style(mode: int) -> str:
    grid = ("#d8dee4", "#3d444d")[mode]
    rules = [f"text{{fill:{COLORS['c0'][mode]}}}", f".grid{{stroke:{grid};fill:none}}", f".box{{stroke:{grid}}}"]
    rules.append(f".box{{fill:{('#f6f8fa', '#161b22')[mode]}}}")
    rules += [f".{name}{{stroke:{color[mode]};fill:{color[mode]}}}" for name, color in COLORS.items()]
    return "".join(rules)


class Canvas:
    """A drawing of a given size in pixels; y points down."""

    def __init__(self, width: int, height: int, title: str) -> None:
        self.width, self.height, self.title = width, height, title
        self.items: list[str] = []

    def text(self, x: float, y: float, text: str, anchor: str = "start", bold: bool = False) -> None:
        """Write a text whose baseline is at y; anchor: start, middle or end."""
        weight = ' font-weight="600"' if bold else ""
        self.items.append(f'<text x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"{weight}>{escape(text)}</text>')

    def line(self, points: Sequence[tuple[float, float]], kind: str = "grid", dashed: bool = False) -> None:
        """Draw a line through points."""
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        at = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        self.items.append(f'<polyline class="{kind}" style="fill:none;stroke-width:1.5" points="{at}"{dash}/>')

    def dot(self, x: float, y: float, kind: str, radius: float = 5) -> None:
        """Draw a filled circle."""
        self.items.append(f'<circle class="{kind}" cx="{x:.1f}" cy="{y:.1f}" r="{radius}"/>')

    def box(self, x: float, y: float, width: float, height: float) -> None:
        """Draw a rectangle with round corners."""
        self.items.append(
            f'<rect class="box" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" height="{height:.1f}" rx="5"/>'
        )

    def __str__(self) -> str:
        """Return the file's text."""
        style = f"text{{font:13px system-ui,sans-serif}}{_style(0)}@media(prefers-color-scheme:dark){{{_style(1)}}}"
        size = f'width="{self.width}" height="{self.height}" viewBox="0 0 {self.width} {self.height}"'
        head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} role="img">\n<title>{escape(self.title)}</title>'
        return "\n".join([head, f"<style>{style}</style>", *self.items, "</svg>\n"])


@dataclass(frozen=True)
class Scale:
    """A horizontal scale from `low` to `high`, with a title, and ticks; logarithmic if `log`."""

    title: str
    ticks: tuple[float, ...]
    log: bool = False

    def at(self, value: float) -> float:
        """Return the place of a value: 0 at the first tick, 1 at the last."""
        of = math.log if self.log else float
        low, high = of(self.ticks[0]), of(self.ticks[-1])
        return (of(value) - low) / (high - low)


def dots(
    title: str, scales: Sequence[Scale], rows: Sequence[tuple[str, str, Sequence[float]]], legend: dict[str, str]
) -> str:
    """Draw a dot for each row and scale.

    Args:
        title: the alternative text.
        scales: the panels from left to right.
        rows: a label, a color class, and a value for each scale. Values above a scale are shown at its end.
        legend: labels by color class. Without a legend, rows of class c1 are emphasized.
    """
    left, panel, gap, line = 210, 190, 34, 25  # pixels
    bottom = 34 + line * len(rows)
    canvas = Canvas(left + (panel + gap) * len(scales), bottom + (86 if legend else 34), title)
    for number, scale in enumerate(scales):
        x0 = left + number * (panel + gap)
        canvas.text(x0 + panel / 2, 16, scale.title, "middle", bold=True)
        for tick in scale.ticks:
            x = x0 + panel * scale.at(tick)
            canvas.line([(x, 28), (x, bottom)])
            canvas.text(x, bottom + 18, f"{tick:g}", "middle")
        for place, (_, kind, values) in enumerate(rows):
            x, y = x0 + panel * min(scale.at(values[number]), 1), 34 + line * (place + 0.4)
            canvas.dot(x, y, kind)
            if kind == "c1" and not legend:
                canvas.text(x + 9, y + 4, f"{values[number]:.3g}", bold=True)
    for place, (label, kind, _) in enumerate(rows):
        canvas.text(left - 14, 38 + line * (place + 0.4), label, "end", bold=kind == "c1" and not legend)
    x, y = 20.0, bottom + 46
    for kind, label in legend.items():
        if x + 20 + 7 * len(label) > canvas.width:
            x, y = 20.0, y + 22
        canvas.dot(x, y, kind)
        canvas.text(x + 10, y + 4, label)
        x += 36 + 7 * len(label)
    return str(canvas)
