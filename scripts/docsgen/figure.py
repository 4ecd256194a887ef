"""Figures of the documentation, drawn from the records."""

from __future__ import annotations

import hashlib
import io
import statistics
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import NullFormatter, PercentFormatter

from docsgen import ROOT, curves, graph, records, studies
from docsgen.records import LABELS

FOLDER = ROOT / "docs" / "figures"

#: Colors in light mode, and the corresponding colors in dark mode. The first color is used for text and baselines, and
#: the second color for grids.
COLORS = {
    "#24292f": "#e6edf3",
    "#d8dee4": "#3d444d",
    "#8a8f98": "#8b949e",
    "#0b6e99": "#4fb3e0",
    "#b3541e": "#f0934f",
    "#2f7d32": "#6cc070",
    "#7a3e9d": "#c08ae0",
    "#b8336a": "#f07aa8",
    "#9a7b00": "#d9b83f",
}
TEXT, GRID, GRAY, BLUE, ORANGE, GREEN, PURPLE, *_ = COLORS

#: With these settings, text is stored as text, and two runs write the same file.
STYLE = {"svg.fonttype": "none", "svg.hashsalt": "efficient-ft", "font.family": "sans-serif", "font.size": 10,
         "text.color": TEXT, "axes.edgecolor": GRID, "axes.labelcolor": TEXT, "grid.color": GRID,
         "xtick.labelcolor": TEXT, "ytick.labelcolor": TEXT, "xtick.color": GRID, "ytick.color": GRID,
         "axes.grid": True, "axes.axisbelow": True, "axes.titlesize": 10, "axes.titleweight": "bold"}  # fmt: skip
matplotlib.rcParams.update(STYLE)

KINDS = {
    "baseline": TEXT,
    "compressed activations": BLUE,
    "low-rank backward": GREEN,
    "fewer tokens or layers": ORANGE,
    "stacked": PURPLE,
}


class Scale(NamedTuple):
    """A horizontal axis with a title, and with ticks that span the axis."""

    title: str
    ticks: tuple[float, ...]
    log: bool = False

    def set_on(self, axes: Axes) -> None:
        axes.set_xscale("log" if self.log else "linear")
        axes.set_xlim(self.ticks[0], self.ticks[-1])
        axes.set_xticks(self.ticks, [f"{tick:g}" for tick in self.ticks])
        axes.xaxis.set_minor_formatter(NullFormatter())
        axes.tick_params(which="both", length=0)


class Dots(NamedTuple):
    """Data of a dot plot: each row has a label, a color, and one value for each scale.

    Values outside a scale are drawn at its end. Rows in `emphasized` are drawn in bold, with their values.
    """

    scales: Sequence[Scale]
    rows: Sequence[tuple[str, str, Sequence[float]]]
    legend: dict[str, str]
    emphasized: tuple[str, ...] = ()

    def draw(self) -> Figure:
        figure = Figure((2.4 * len(self.scales) + 2.4, 0.27 * len(self.rows) + 1), layout="constrained")
        figure.get_layout_engine().set(wspace=0.06)
        for number, scale in enumerate(self.scales):
            axes = figure.add_subplot(1, len(self.scales), number + 1, title=scale.title)
            scale.set_on(axes)
            for row, (label, color, values) in enumerate(self.rows):
                x = min(max(values[number], scale.ticks[0]), scale.ticks[-1])
                axes.plot(x, row, "o", color=color, clip_on=False)
                if label in self.emphasized:
                    offset = {"xytext": (7, 0), "textcoords": "offset points"}
                    axes.annotate(f"{values[number]:.3g}", (x, row), va="center", weight="bold", **offset)
            axes.set_yticks(range(len(self.rows)), [label if number == 0 else "" for label, *_ in self.rows])
            axes.grid(visible=False, axis="y")
            axes.spines[:].set_visible(False)
            axes.set_ylim(len(self.rows) - 0.5, -0.5)
            for text in axes.get_yticklabels():
                text.set_weight("bold" if text.get_text() in self.emphasized else "normal")
        if self.legend:
            points = [axes.plot([], [], "o", color=color)[0] for color in self.legend.values()]
            figure.legend(points, list(self.legend), loc="outside lower center", ncols=3, frameon=False)
        return figure


def time_memory() -> Dots:
    """Return step time and peak memory of recipes on DeiT-S."""
    scales = [
        Scale("peak of a step, MiB (log)", (150, 300, 600, 1200), log=True),
        Scale("step time ÷ full fine-tuning", (0, 0.5, 1, 1.5)),
    ]
    rows = []
    for label, where in LABELS["time_memory"].items():
        file, name, kind = where.split(maxsplit=2)
        rows.append((label, KINDS[kind], (records.peak(file, name), records.time(file, name))))
    return Dots(scales, rows, KINDS)


#: Costs relative to full fine-tuning in the figures of the study on Stanford Cars.
SHARES = {
    "flops": Scale("FLOPs of the run, %", (0, 25, 50, 75, 100, 125)),
    "saved": Scale("stored activations, % (log)", (1, 3, 10, 30, 100), log=True),
    "time": Scale("time of a step, %", (0, 25, 50, 75, 100, 125)),
}


def _compared(names: Iterable[str]) -> Dots:
    """Return the test accuracy of rows of the study on Stanford Cars, and the costs relative to full fine-tuning.

    Rows without results for all seeds are omitted. The rows on the Pareto front of accuracy and a cost are blue.
    """
    points = [_with_time(row) for row in names if studies.has_all_seeds(studies.CARS, row)]
    full = next(one for one in points if one["row"] == "full")
    front = {one["row"] for cost in SHARES for one in studies.front(points, cost)}
    rows = []
    for one in sorted(points, key=lambda one: -one["accuracy"]):
        color = TEXT if one["row"] == "full" else BLUE if one["row"] in front else GRAY
        shares = [100 * one[cost] / full[cost] for cost in SHARES]
        rows.append((LABELS["cars"][one["row"]], color, (one["accuracy"], *shares)))
    scales = [Scale("test accuracy, %", (50, 60, 70, 80, 90)), *SHARES.values()]
    legend = {"full fine-tuning": TEXT, "Pareto front of accuracy and a cost": BLUE, "other methods": GRAY}
    return Dots(scales, rows, legend, (LABELS["cars"]["blocks6+tome16+mesa"],))


def _with_time(row: str) -> dict[str, Any]:
    time = records.time("cars_steps", LABELS["cars_steps"].get(row, row))
    return {**studies.point(studies.CARS, row), "time": time}


def first_screen() -> Dots:
    """Return accuracy and cost of one row for each method."""
    return _compared(LABELS["first_screen"])


def cars_front() -> Dots:
    """Return accuracy and cost of all finished rows of the first block of the study."""
    return _compared(LABELS["cars"])


def study_front() -> Dots:
    """Return the Pareto fronts of the first study."""
    of = studies.points("deit_tiny_caltech101")
    fronts = [studies.front(of, cost) for cost in ("flops", "saved")]
    best = [one for one in of if one["row"] == "full" or any(one in front for front in fronts)]
    scales = [
        Scale("test accuracy, %", (40, 50, 60, 70, 80, 90)),
        Scale("TFLOPs of the run", (0, 2, 4, 6, 8)),
        Scale("stored KiB / image (log)", (30, 100, 1000, 8000), log=True),
    ]
    legend = {"full fine-tuning": TEXT, "on the Pareto front of one of the two costs": BLUE}
    rows = [
        (one["row"], TEXT if one["row"] == "full" else BLUE, (one["accuracy"], one["flops"], one["saved"]))
        for one in sorted(best, key=lambda one: -one["accuracy"])
    ]
    return Dots(scales, rows, legend)


class Curves(NamedTuple):
    """Target accuracy and mean curves of the recipes, for each network."""

    networks: dict[str, tuple[float, dict[str, list[tuple[float, float]]]]]

    def draw(self) -> Figure:
        figure = Figure((11, 6.6), layout="constrained")
        styles = [(color, line) for line in ("-", "--") for color in COLORS if color not in (GRID, GRAY)]
        for number, (network, (goal, of)) in enumerate(self.networks.items(), 1):
            title = "seconds since training began (log)"
            axes = figure.add_subplot(1, len(self.networks), number, title=network, xlabel=title)
            Scale(title, (20, 50, 100, 200, 500, 1000, 2000), log=True).set_on(axes)
            for (label, curve), (color, line) in zip(of.items(), styles, strict=False):
                axes.plot(*zip(*curve, strict=True), line, color=color, label=label.replace("`", ""))
            axes.axhline(goal, color=GRAY, linestyle=":")
            axes.set_ylim(0.05 * (goal // 0.05) - 0.2, 0.05 * (goal // 0.05) + 0.1)
            axes.yaxis.set_major_formatter(PercentFormatter(1, 0, " %"))
            axes.legend(loc="upper left", bbox_to_anchor=(0, -0.14), frameon=False)
        return figure


def time_to_accuracy() -> Curves:
    """Return the test accuracy of recipes as a function of the training time, for each network."""
    titles = {"deit_tiny": "DeiT-Tiny, 112 px", "efficientnet_lite0": "EfficientNet-Lite0, 128 px"}
    found = {}
    for network in records.load("accuracy")["networks"]:
        of = sorted(curves.recipes(network).items(), key=lambda item: item[0] != curves.BASELINE)
        means = {LABELS["curves"][name]: curves.mean(runs) for name, runs in of}
        found[titles[network]] = (curves.target(network), means)
    return Curves(found)


class Convergence(NamedTuple):
    """Training loss and validation accuracy after each epoch, by row."""

    rows: dict[str, tuple[list[float], list[float]]]

    def draw(self) -> Figure:
        figure = Figure((9, 4), layout="constrained")
        colors = [color for color in COLORS if color not in (GRID, GRAY)]
        for number, title in enumerate(("training loss", "validation accuracy, %")):
            axes = figure.add_subplot(1, 2, number + 1, title=title, xlabel="epoch")
            for color, (label, curves_of_row) in zip(colors, self.rows.items(), strict=False):
                values = curves_of_row[number]
                axes.plot(range(1, len(values) + 1), values, color=color, label=label)
            axes.set_xlim(1)
            if number:
                axes.legend(loc="lower right", frameon=False)
        return figure


def convergence() -> Convergence:
    """Return the mean curves over the seeds of rows of the study on Stanford Cars."""
    rows = {}
    for row, label in LABELS["convergence"].items():
        runs = [run["curve"] for run in studies.records(studies.CARS).finished(row) if "curve" in run]
        if runs:
            loss, accuracy = ([statistics.fmean(point[key] for point in epoch) for epoch in zip(*runs, strict=True)]
                              for key in ("loss", "accuracy"))  # fmt: skip
            rows[label] = (loss, [100 * value for value in accuracy])
    return Convergence(rows)


class Packages(NamedTuple):
    """Layers of packages from the lowest to the highest, and the lower packages that each package imports directly."""

    layers: list[list[str]]
    imports: dict[str, list[str]]

    def draw(self) -> Figure:
        figure = Figure((8, 0.7 * len(self.layers)))
        axes = figure.add_axes((0, 0, 1, 1))
        axes.set_axis_off()
        at = {}
        for level, names in enumerate(self.layers):
            at |= {name: ((place + 0.5) / len(names), level) for place, name in enumerate(names)}
            # Neighboring layers are shifted, so that lines do not cross boxes.
            at |= {name: (at[name][0] + (level % 2 - 0.5) * 0.06, level) for name in names}
        for name, others in self.imports.items():
            for other in others:
                axes.plot(*zip(at[name], at[other], strict=True), color=GRAY, linewidth=1)
        for name, (x, y) in at.items():
            box = {"boxstyle": "round,pad=0.5", "facecolor": GRID, "edgecolor": GRAY}
            axes.text(x, y, name, ha="center", va="center", bbox=box)
        axes.set_xlim(0, 1)
        axes.set_ylim(-0.5, len(self.layers) - 0.5)
        return figure


FIGURES: dict[str, Callable[[], Any]] = {
    "first-screen": first_screen,
    "time-memory": time_memory,
    "cars-front": cars_front,
    "study-front": study_front,
    "time-to-accuracy": time_to_accuracy,
    "convergence": convergence,
    "architecture": lambda: Packages(graph.layers(), {name: graph.direct(name) for name in graph.imports()}),
}


def wanted() -> Iterator[tuple[Path, str]]:
    """Yield the file and the text of each figure.

    The first line of a file contains a hash of the drawn data and of this module. A file with the same hash is not
    replaced, because a different version of matplotlib would write different bytes for the same figure.
    """
    source = Path(__file__).read_text(encoding="utf-8")
    for name, data in FIGURES.items():
        of, file = data(), FOLDER / f"{name}.svg"
        mark = f"<!-- {hashlib.sha256(f'{of!r}{source}'.encode()).hexdigest()[:16]} -->"
        old = file.read_text(encoding="utf-8") if file.is_file() else ""
        yield file, old if old.startswith(mark) else f"{mark}\n{_svg(of.draw())}"


def _svg(figure: Figure) -> str:
    """Return a figure as SVG with colors that follow the light or dark mode of the browser."""
    stream = io.StringIO()
    figure.savefig(stream, format="svg", transparent=True, metadata={"Date": None, "Creator": None})
    text = stream.getvalue().partition("<svg")[2]
    dark = "".join(
        f'[style*="{part}: {color}"]{{{part}:{COLORS[color]}!important}}'
        for part in ("fill", "stroke")
        for color in COLORS
    )
    return f"<svg{text.replace('<defs>', f'<defs><style>@media(prefers-color-scheme:dark){{{dark}}}</style>', 1)}"
