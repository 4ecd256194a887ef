"""The figures of the documentation. Their numbers come from the records."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from docsgen import curves, graph, records, studies
from docsgen.labels import LABELS
from docsgen.svg import Canvas, Scale, dots

FOLDER = Path(__file__).resolve().parents[2] / "docs" / "figures"

KINDS = {
    "c0": "baseline",
    "c1": "compressed activations",
    "c3": "low-rank backward",
    "c2": "fewer tokens or layers",
    "c4": "stacked",
}


def time_memory() -> str:
    """Draw step time and peak memory of recipes on DeiT-S."""
    scales = [
        Scale("peak of a step, MiB (log)", (150, 300, 600, 1200), log=True),
        Scale("step time ÷ full fine-tuning", (0, 0.5, 1, 1.5)),
    ]
    rows = []
    for label, where in LABELS["time_memory"].items():
        file, name, kind = where.split()
        rows.append((label, kind, (records.peak(file, name), records.time(file, name))))
    return dots("Peak memory and step time of methods on DeiT-S", scales, rows, KINDS)


def first_screen() -> str:
    """Draw accuracy and cost of the recommended recipes and of the other stacks at 224 px."""
    study = "deit_tiny_caltech101_224"
    labels = LABELS["first_screen"]
    of = sorted((studies.point(study, row) for row in labels), key=lambda one: -one["saved"])
    full = studies.point(study, "full")
    scales = [
        Scale("test accuracy, %", (82, 84, 86, 88, 90)),
        Scale("FLOPs of the run, %", (0, 25, 50, 75, 100)),
        Scale("stored activations, % (log)", (0.5, 2, 10, 100), log=True),
    ]
    rows = []
    for one in of:
        shares = [100 * one[cost] / full[cost] for cost in ("flops", "saved")]
        kind = {"full": "c0", "blocks6+tome16+mesa": "c1"}.get(one["row"], "c5")
        rows.append((labels[one["row"]], kind, (one["accuracy"], *shares)))
    return dots("Accuracy, FLOPs and stored activations of DeiT-Tiny on Caltech-101, by method", scales, rows, {})


def study_front() -> str:
    """Draw the Pareto fronts of the first study."""
    of = studies.points("deit_tiny_caltech101")
    fronts = {cost: studies.front(of, cost) for cost in ("flops", "saved")}
    best = [one for one in of if one["row"] == "full" or any(one in front for front in fronts.values())]
    scales = [
        Scale("test accuracy, %", (40, 50, 60, 70, 80, 90)),
        Scale("TFLOPs of the run", (0, 2, 4, 6, 8)),
        Scale("stored KiB / image (log)", (30, 100, 1000, 8000), log=True),
    ]
    rows = []
    for one in sorted(best, key=lambda one: -one["accuracy"]):
        kind = "c0" if one["row"] == "full" else "c1"
        rows.append((one["row"], kind, (one["accuracy"], one["flops"], one["saved"])))
    legend = {"c0": "full fine-tuning", "c1": "on the Pareto front of one of the two costs"}
    return dots("The Pareto front of accuracy and cost of DeiT-Tiny on Caltech-101", scales, rows, legend)


#: Titles of the networks in the figure of curves.
NETWORKS = {"deit_tiny": "DeiT-Tiny, 112 px", "efficientnet_lite0": "EfficientNet-Lite0, 128 px"}


def time_to_accuracy() -> str:
    """Draw the test accuracy of recipes against the time since training began, by network."""
    networks = list(records.load("accuracy")["networks"])
    most = max(len(curves.recipes(network)) for network in networks)
    left, panel, gap, top, height = 50, 380, 60, 34, 260
    canvas = Canvas(left + (panel + gap) * len(networks), top + height + 56 + 19 * most, "Accuracy against time")
    scale = Scale("seconds since training began (log)", (20, 50, 100, 200, 500, 1000, 2000), log=True)
    for number, network in enumerate(networks):
        x0, goal = left + number * (panel + gap), 100 * curves.target(network)
        low, high = 5 * (goal // 5) - 20, 5 * (goal // 5) + 10

        def place(x: float, y: float, x0: float = x0, low: float = low, high: float = high) -> tuple[float, float]:
            share = min(max((y - low) / (high - low), 0), 1)
            return x0 + panel * min(max(scale.at(x), 0), 1), top + height * (1 - share)

        canvas.text(x0 + panel / 2, 16, NETWORKS[network], "middle", bold=True)
        for tick in scale.ticks:
            canvas.line([place(tick, low), place(tick, high)])
            canvas.text(place(tick, low)[0], top + height + 18, f"{tick:g}", "middle")
        for percent in range(int(low), int(high) + 1, 5):
            canvas.line([place(scale.ticks[0], percent), place(scale.ticks[-1], percent)])
            canvas.text(x0 - 8, place(1, percent)[1] + 4, f"{percent} %", "end")
        canvas.line([place(scale.ticks[0], goal), place(scale.ticks[-1], goal)], "c5", dashed=True)
        canvas.text(x0 + panel / 2, top + height + 38, scale.title, "middle")
        of = sorted(curves.recipes(network).items(), key=lambda item: item[0] != curves.BASELINE)
        for index, (name, recipe) in enumerate(of):
            kind, dashed, y = f"c{index % 8}", index >= 8, top + height + 62 + 19 * index
            points = [place(at, 100 * accuracy) for at, accuracy in recipe.curve]
            canvas.line(points, kind, dashed)
            canvas.line([(x0, y - 4), (x0 + 26, y - 4)], kind, dashed)
            canvas.text(x0 + 34, y, LABELS["curves"][name].replace("`", ""))
    return str(canvas)


FIGURES = {
    "first-screen": first_screen,
    "time-memory": time_memory,
    "study-front": study_front,
    "time-to-accuracy": time_to_accuracy,
    "architecture": graph.drawn,
}


def wanted() -> Iterator[tuple[Path, str]]:
    """Yield each figure's file and text."""
    for name, draw in FIGURES.items():
        yield FOLDER / f"{name}.svg", draw()
