"""The figures of the documentation, as SVGs whose lines follow from the records alone.

``time-memory`` shows step time against memory, ``study-front`` accuracy against what a run costs, ``time-to-accuracy``
accuracy against the time since the training began.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from docsgen import curves, labels, records
from docsgen.studies import front, study_points

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "docs" / "figures"

Box = tuple[float, float, float, float]
"""Left, bottom, right, top."""

#: Recipes drawn: file, name in it, label, color, and where the label stands (points right and up, alignment).
_BASE, _MEMORY, _TOKENS, _BACKPROP, _STACK = "#222222", "#0b6e99", "#b3541e", "#2f7d32", "#7a3e9d"
POINTS = (
    ("memory", "full", "full fine-tuning", _BASE, (-7, 7, "right")),
    ("memory", "checkpointing", "checkpointing", _MEMORY, (0, 9, "center")),
    ("memory", "mesa", "Mesa", _MEMORY, (8, -7, "left")),
    ("memory", "back_razor", "Back Razor 80 %", _MEMORY, (8, 1, "left")),
    ("memory", "back_razor_mesa", "Back Razor + Mesa", _MEMORY, (-8, -4, "right")),
    ("memory", "lbp_wht", "LBP-WHT", _BACKPROP, (8, -4, "left")),
    ("memory", "lbp_wht_back_razor", "LBP-WHT + Back Razor", _STACK, (8, -4, "left")),
    ("tokens", "evit", "EViT", _TOKENS, (8, -4, "left")),
    ("tokens", "tome:r=13", "ToMe, r = 13", _TOKENS, (7, -11, "left")),
    ("tokens", "alast_fixed", "ALaST", _TOKENS, (-8, 3, "right")),
    ("tokens", "uniform_layers", "uniform layers", _TOKENS, (-8, -4, "right")),
    ("stacked", "lisa", "LISA", _TOKENS, (8, -10, "left")),
    ("tokens", "bsr", "BSR", _TOKENS, (8, -4, "left")),
    ("stacked", "bsr+back_razor", "BSR + Back Razor", _STACK, (0, -15, "center")),
    ("stacked", "bsr+checkpointing", "BSR + checkpointing", _STACK, (-2, 9, "center")),
)
KINDS = {
    "baseline": _BASE,
    "how activations are kept": _MEMORY,
    "low-rank backward": _BACKPROP,
    "fewer tokens or layers": _TOKENS,
    "stacked": _STACK,
}


def _time_memory_data() -> list[tuple[str, float, float]]:
    """Label, peak in MiB, and ratio of the step time to full fine-tuning of the same file."""
    return [
        (label, round(records.peak(file, name), 1), round(records.time(file, name), 4))
        for file, name, label, *_ in POINTS
    ]


def _time_memory(plt: Any) -> Any:
    figure, axes = plt.subplots(figsize=(8.4, 4.5))
    for (_, _, label, color, (right, up, align)), (_, peak, ratio) in zip(POINTS, _time_memory_data(), strict=True):
        axes.plot(peak, ratio, "o", color=color, markersize=6.5, zorder=3)
        axes.annotate(label, (peak, ratio), (right, up), textcoords="offset points", ha=align, color=color)
    axes.axhline(1, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
    axes.set(xscale="log", xlim=(130, 1250), ylim=(0, 1.6))
    _ticks(axes, [150, 200, 300, 400, 600, 800, 1000])
    axes.set_xlabel("peak of live tensors in a step, MiB (counted; log scale)")
    axes.set_ylabel("step time ÷ full fine-tuning")
    for kind, color in KINDS.items():
        axes.plot([], [], "o", color=color, label=kind, markersize=6)
    axes.legend(loc="upper right", frameon=False, fontsize=8.5, handletextpad=0.2)
    _plain(axes)
    return figure


#: The study whose front the README shows.
STUDY = "deit_tiny_caltech101"

#: Rows of a lower accuracy, in percent, are left out of the figure: negative controls would compress the others.
LOWEST = 55


def _study_front(plt: Any) -> Any:
    figure, panels = plt.subplots(1, 2, figsize=(9.2, 4.3), sharey=True)
    points = [point for point in study_points(STUDY) if point["accuracy"] >= LOWEST]
    costs = (
        ("flops", "executed TFLOPs of the run (log scale)", [2, 3, 4, 6, 8]),
        ("saved", "kept for the backward pass, KiB / image (log scale)", [40, 100, 300, 1000, 4000]),
    )
    for axes, (cost, label, ticks) in zip(panels, costs, strict=True):
        best = front(points, cost)
        for point in points:
            on = point in best
            axes.plot(
                point[cost],
                point["accuracy"],
                "o",
                color=_MEMORY if on else "#bbbbbb",
                markersize=6 if on else 4,
                zorder=3,
            )
        axes.plot(
            [p[cost] for p in best], [p["accuracy"] for p in best], color=_MEMORY, linewidth=0.9, drawstyle="steps-post"
        )
        axes.set(xscale="log", xlim=(0.7 * min([ticks[0], *(point[cost] for point in points)]), None))
        _ticks(axes, ticks)
        axes.set_xlabel(label)
        _plain(axes)
    panels[0].set_ylabel("test accuracy, %")
    panels[0].margins(y=0.12)
    figure.tight_layout()
    for axes, (cost, *_) in zip(panels, costs, strict=True):
        best = front(points, cost)
        full = [p for p in points if p["row"] == "full" and p not in best]
        _label(
            axes,
            [(p[cost], p["accuracy"], p["row"]) for p in [*best, *full]],
            [(p[cost], p["accuracy"]) for p in points],
        )
    return figure


def _label(axes: Any, labels: Sequence[tuple[float, float, str]], points: Sequence[tuple[float, float]]) -> None:
    """Write each label next to its point, where it covers no point and no other label."""
    width, height, size = 4.4, 9.0, 8.0  # of a letter, of a line, and of the font, in points
    scale = 72 / axes.figure.dpi
    left, right, top = (side * scale for side in (axes.bbox.x0, axes.bbox.x1, axes.bbox.y1))
    taken = [(x - 3, y - 3, x + 3, y + 3) for x, y in axes.transData.transform(points) * scale]
    offsets = [
        (6, -11),
        (6, 4),
        (-6, 4),
        (-6, -11),
        (6, -21),
        (-6, 14),
        (6, -31),
        (-6, 24),
        (-6, -21),
        (-6, -31),
        (6, -41),
        (-6, -41),
        (-24, 14),
        (-48, 24),
    ]
    for x, y, text in labels:
        at_x, at_y = axes.transData.transform((x, y)) * scale
        long = width * len(text)

        def box(offset: tuple[int, int], at: tuple[float, float] = (at_x, at_y), long: float = long) -> Box:
            start = at[0] + offset[0] - (long if offset[0] < 0 else 0)
            return start, at[1] + offset[1], start + long, at[1] + offset[1] + height

        boxes = [(offset, box(offset)) for offset in offsets]
        free = [
            (offset, one)
            for offset, one in boxes
            if left <= one[0] and one[2] <= right and one[3] <= top and not any(_overlap(one, other) for other in taken)
        ]
        (dx, dy), chosen = (free or boxes)[0]
        taken.append(chosen)
        line = {"arrowstyle": "-", "color": "#999999", "linewidth": 0.6} if max(abs(dx), abs(dy + 4)) > 12 else None
        axes.annotate(text, (x, y), (dx, dy), textcoords="offset points", ha="right" if dx < 0 else "left",
                      fontsize=size, color=_BASE, arrowprops=line)  # fmt: skip


def _overlap(one: Box, other: Box) -> bool:
    return one[0] < other[2] and other[0] < one[2] and one[1] < other[3] and other[1] < one[3]


def _ticks(axes: Any, at: list[int]) -> None:
    from matplotlib.ticker import NullLocator

    axes.set_xticks(at, [str(tick) for tick in at])
    axes.xaxis.set_minor_locator(NullLocator())


def _plain(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.grid(color="#e4e4e4", linewidth=0.7, zorder=0)


#: Titles of the networks in the figure of curves.
NETWORKS = {"deit_tiny": "DeiT-Tiny, 112 px", "efficientnet_lite0": "EfficientNet-Lite0, 128 px"}


def _curves_data() -> dict[str, Any]:
    """The target and the curves of each network."""
    return {
        network: [curves.target(network), {name: recipe.curve for name, recipe in curves.recipes(network).items()}]
        for network in records.load("accuracy")["networks"]
    }


def _curves(plt: Any) -> Any:
    data = _curves_data()
    figure, panels = plt.subplots(1, len(data), figsize=(2.4 + 3.6 * len(data), 4.0), squeeze=False)
    for axes, (network, (target, of)) in zip(panels[0], data.items(), strict=True):
        axes.axhline(100 * target, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        for number, (name, curve) in enumerate(of.items()):
            color = _BASE if name == curves.BASELINE else plt.get_cmap("tab10")(number)
            style = "-" if name.endswith("cached") or name == curves.BASELINE else "--"
            axes.plot(
                [at for at, _ in curve],
                [100 * accuracy for _, accuracy in curve],
                color=color,
                linestyle=style,
                linewidth=1.3,
                marker="o",
                markersize=2.5,
                label=labels.CURVES[name].replace("`", ""),
                zorder=3,
            )
        axes.set(xscale="log", ylim=(100 * target - 25, None), title=NETWORKS[network])
        _ticks(axes, [50, 100, 200, 500, 1000])
        axes.set_xlabel("seconds since the training began (log scale)")
        axes.legend(loc="lower right", frameon=False, fontsize=7.5)
        _plain(axes)
    panels[0][0].set_ylabel("test accuracy, %")
    return figure


@dataclass(frozen=True)
class Figure:
    """A figure: the name of its file, the numbers it shows, and what draws them."""

    name: str
    data: Callable[[], Any]
    draw: Callable[[Any], Any]

    @property
    def file(self) -> Path:
        return FOLDER / f"{self.name}.svg"

    def digest(self) -> str:
        """Changes if the numbers or this module do, with any version of matplotlib."""
        source = inspect.getsource(sys.modules[__name__])
        return hashlib.sha256((json.dumps(self.data()) + source).encode()).hexdigest()[:16]

    def svg(self) -> str:
        """The same text for the same records and the same matplotlib."""
        import matplotlib

        matplotlib.use("svg")
        import matplotlib.pyplot as plt

        style = {"svg.hashsalt": "efficient-ft", "svg.fonttype": "path", "font.size": 9.5, "font.family": "DejaVu Sans"}
        with matplotlib.rc_context(style):
            figure = self.draw(plt)
            figure.tight_layout()
            out = io.StringIO()
            about = f"data {self.digest()}, matplotlib {matplotlib.__version__}"
            figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Description": about})
            plt.close(figure)
        return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"

    def stale(self) -> list[str]:
        """Why it is not what it should be. Another version of matplotlib may write other lines of the same data."""
        name = self.file.relative_to(ROOT).as_posix()
        text = self.file.read_text(encoding="utf-8") if self.file.is_file() else ""
        drawn = re.search(r"data (\w+), matplotlib ([\w.]+)", text)
        if drawn is None:
            return [f"{name}: missing"]
        if drawn[1] != self.digest():
            return [f"{name}: drawn from other data ({drawn[1]}, now {self.digest()})"]
        import matplotlib

        if drawn[2] == matplotlib.__version__ and text != self.svg():
            return [f"{name}: changed by hand"]
        return []


FIGURES = (
    Figure("time-memory", _time_memory_data, _time_memory),
    Figure("study-front", lambda: study_points(STUDY), _study_front),
    Figure("time-to-accuracy", _curves_data, _curves),
)


def write() -> list[Path]:
    """Draw the figures; returns the files that changed."""
    changed = []
    for figure in FIGURES:
        new = figure.svg()
        if not figure.file.is_file() or figure.file.read_text(encoding="utf-8") != new:
            figure.file.parent.mkdir(parents=True, exist_ok=True)
            figure.file.write_text(new, encoding="utf-8")
            changed.append(figure.file)
    return changed


def stale() -> list[str]:
    """Why the figures are not what they should be."""
    return [line for figure in FIGURES for line in figure.stale()]
