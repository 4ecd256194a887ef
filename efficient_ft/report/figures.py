"""Figures of a record: budgets over time, and training frequency, tokens and relative magnitude of each block."""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.core.files import write_bytes_atomically
from efficient_ft.report.record import Record

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

DPI = 150
#: Maximum number of blocks that are labeled on an axis.
MAX_LABELS = 26


def require_matplotlib() -> None:
    """Import matplotlib and set its style. Raise a `UserError` if matplotlib is not installed."""
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError("Figures require matplotlib. Run: pip install 'efficient-ft[report]'") from error
    matplotlib.use("Agg")
    matplotlib.rcParams.update(
        {
            "font.size": 11,
            "axes.titlesize": 12,
            "axes.spines.top": False,
            "axes.spines.right": False,
            "axes.grid": True,
            "axes.axisbelow": True,
            "grid.color": "#e3e3e3",
            "savefig.facecolor": "white",
        }
    )


@dataclass(frozen=True)
class Drawing:
    """A figure with a file name, section title, description for screen readers (`alt`) and caption."""

    file: str
    title: str
    alt: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        """Content of the PNG file."""
        stream = io.BytesIO()
        self.figure.savefig(stream, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        return stream.getvalue()

    def write(self, path: Path) -> None:
        """Write the figure to the PNG file `path`."""
        write_bytes_atomically(path, self.png)


def _figure(width: float, height: float, columns: int = 1, **kwargs: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **kwargs)
    return figure, list(axes[0])


def _per_block(axes: Axes, record: Record, room: int = 90) -> None:
    """Label the blocks on the x axis. The labels are rotated if they have more than `room` characters in total."""
    labels, count = record.labels, len(record.labels)
    every = -(-count // MAX_LABELS)
    places = range(0, count, every)
    turned = max(map(len, labels)) * len(places) > room
    axes.set_xticks(
        places, [labels[i] for i in places], rotation=60 if turned else 0, ha="right" if turned else "center"
    )
    axes.set_xlim(-0.7, count - 0.3)
    axes.set_xlabel("block")
    axes.grid(axis="x", visible=False)


def _bars(axes: Axes, record: Record, heights: np.ndarray, texts: Sequence[str], inside: bool = False) -> None:
    """Draw a bar for each block, and write the value above the bar, or at the bottom of the bar if `inside` is True."""
    axes.bar(range(len(heights)), np.nan_to_num(heights), color="#9db4dc", width=0.78)
    if len(heights) <= MAX_LABELS:
        for i, (height, text) in enumerate(zip(np.nan_to_num(heights), texts, strict=True)):
            place = (i, 0 if inside else height)
            axes.annotate(text, place, (0, 4), textcoords="offset points", ha="center", fontsize=9.5)
    _per_block(axes, record)


def _whole_steps(axes: Axes) -> None:
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")


def draw_budgets(record: Record) -> Drawing | None:
    """Draw the budget of each block as a line over the steps. Return None if no budgets were recorded."""
    if record.budgets is None:
        return None
    from matplotlib import colormaps

    height = max(4.8, 1.2 + 0.17 * len(record.blocks))
    figure, (axes,) = _figure(8.6, height)
    # Colors from dark (first block) to light (last block). The lightest color is still visible on white.
    shown, colors = record.thinned, colormaps["viridis"](np.linspace(0, 0.88, len(record.blocks)))
    for i, color in enumerate(colors):
        marker = "o" if len(shown) < 3 else ""
        axes.plot(record.steps[shown], record.budgets[shown, i], color=color, linewidth=1.6, marker=marker)
    low, high = np.nanmin(record.budgets), np.nanmax(record.budgets)
    margin = max(0.02, 0.06 * (high - low))
    axes.set_ylim(low - margin, high + margin)
    axes.set(ylabel="budget", title="Budget of each block")
    _whole_steps(axes)
    _label_ends(axes, record, record.budgets[-1], colors, height)
    return Drawing(
        "budgets.png",
        "Budgets over time",
        "The figure shows one line for each block over the optimizer steps. Budgets at the last step"
        f" ({record.steps[-1]}): {_listed(record.labels, record.budgets[-1], '.3f')}.",
        "Fraction of the incoming patch tokens that each block passes on in each step. Dark lines show the first"
        " blocks, and light lines show the last blocks.",
        figure,
    )


def _label_ends(axes: Axes, record: Record, values: np.ndarray, colors: Any, height: float) -> None:
    """Write the names of the blocks at the ends of the lines, without overlap.

    `height` is the height of the figure in inches.
    """
    low, high = axes.get_ylim()
    size = 10 if len(values) <= MAX_LABELS else 8
    gap = (high - low) * 1.4 * size / 72 / (height - 1)
    order = np.argsort(values, kind="stable")
    places = values[order].astype(float)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], high)
    for i in range(len(places) - 2, -1, -1):  # labels are moved down from the upper edge of the figure
        places[i] = min(places[i], places[i + 1] - gap)
    for block, place in zip(order, places, strict=True):
        line = {
            "arrowstyle": "-",
            "color": colors[block],
            "linewidth": 0.7,
            "relpos": (0, 0.5),
            "shrinkA": 1,
            "shrinkB": 0,
        }
        axes.annotate(
            record.labels[block],
            xy=(1, values[block]),
            xytext=(1.06, place),
            xycoords=axes.get_yaxis_transform(),
            textcoords=axes.get_yaxis_transform(),
            color=colors[block],
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops=line,
        )
    axes.margins(x=0)
    axes.text(1.06, 1.03, "block", transform=axes.transAxes, fontsize=10)


def draw_trained(record: Record) -> Drawing:
    """Draw a bar for each block that shows the fraction of recorded steps in which the block was trained."""
    shares = record.trained.mean(0)
    figure, (axes,) = _figure(8.6, 3.8)
    _bars(axes, record, 100 * shares, [f"{share:.0%}".rstrip("%") for share in shares])
    axes.set(ylim=(0, 108), ylabel="% of the recorded steps", title="How often each block was trained")
    return Drawing(
        "trained.png",
        "Training frequency",
        f"The figure shows one bar for each block: {_listed(record.labels, shares, '.0%')}.",
        "Fraction of the recorded steps in which at least one parameter of the block was trained. On average,"
        f" {record.trained.sum(1).mean():.3g} of {len(record.blocks)} blocks are trained in a step.",
        figure,
    )


def draw_tokens(record: Record) -> Drawing:
    """Draw the number of tokens after each block. Bars show means over the recorded steps, and lines show ranges."""
    mean, least, most = mean_over_steps(record.tokens), np.fmin.reduce(record.tokens), np.fmax.reduce(record.tokens)
    figure, (axes,) = _figure(8.6, 3.8)
    _bars(axes, record, mean, [short(value) for value in mean], inside=True)
    varies = np.nan_to_num(most - least) > 0
    if varies.any():
        at = np.flatnonzero(varies)
        spans = [mean[at] - least[at], most[at] - mean[at]]
        axes.errorbar(at, mean[at], spans, fmt="none", ecolor="#333333", capsize=3, linewidth=1)
    axes.set(ylim=(0, 1.12 * np.nanmax(most, initial=1)), ylabel="tokens of an image", title="Tokens after each block")
    ranges = " Bars show the means over the recorded steps, and lines show the ranges." if varies.any() else ""
    return Drawing(
        "tokens.png",
        "Tokens after each block",
        f"The figure shows one bar for each block: {_listed(record.labels, mean, '.4g')}.",
        "Number of tokens during training, including class tokens and fused tokens. For networks without tokens, the"
        f" number of positions in the feature map is shown.{ranges}",
        figure,
    )


def draw_magnitudes(record: Record) -> Drawing:
    """Draw the relative magnitudes of the blocks.

    Lines show the magnitudes at the beginning and at the end of the record. A heat map shows the magnitudes over time.
    """
    first, last, called = record.ends
    shown = record.thinned
    several = len(shown) > 2
    figure, axes = _figure(
        11.6 if several else 8.6, 4.4, 2 if several else 1, width_ratios=[1, 1.15] if several else [1]
    )
    start, end = mean_over_steps(record.magnitudes[first]), mean_over_steps(record.magnitudes[last])
    places = np.arange(len(record.blocks))
    if len(record.steps) > 1:
        axes[0].plot(places, start, "o--", color="#8a8a8a", label=f"first {called}", markersize=5)
    axes[0].plot(places, end, "o-", color="#3b528b", label=f"last {called}", markersize=6)
    axes[0].set(ylim=(0, None), ylabel="‖f(x)‖ / ‖f(x) + x‖", title="Relative magnitude of each block")
    axes[0].legend(frameon=False)
    _per_block(axes[0], record, 45)
    if several:
        steps = record.steps[shown]
        between = (steps[1:] + steps[:-1]) / 2
        edges = np.concatenate([[steps[0] - (between[0] - steps[0])], between, [steps[-1] + (steps[-1] - between[-1])]])
        mesh = axes[1].pcolormesh(edges, np.arange(len(places) + 1) - 0.5, record.magnitudes[shown].T, cmap="viridis")
        every = -(-len(places) // MAX_LABELS)
        axes[1].set_yticks(places[::every], record.labels[::every])
        axes[1].grid(visible=False)
        axes[1].set(ylabel="block", title="… over time")
        _whole_steps(axes[1])
        figure.colorbar(mesh, ax=axes[1])
    alone = record.compared < record.tokens / 2
    counts = zip(record.labels, alone.sum(0), strict=True)
    where = ", ".join(f"block {label} in {n} of {len(alone)} records" for label, n in counts if n)
    special = (
        f" Only prefix tokens are compared where the positions of other tokens are unknown: {where}." if where else ""
    )
    return Drawing(
        "magnitudes.png",
        "Relative magnitudes",
        f"The figure shows lines over the blocks for the {called} at the beginning and at the end"
        + (", and a heat map over blocks and optimizer steps" if several else "")
        + f". Values at the end: {_listed(record.labels, end, '.3f')}.",
        "Relative change of the tokens in a block: ‖f(x)‖ / ‖f(x) + x‖, where f(x) + x is the output of the block and"
        f" f(x) is the difference between output and input. The values are averaged over images and tokens.{special}",
        figure,
    )


def mean_over_steps(values: np.ndarray) -> np.ndarray:
    """Return the means over T recorded steps for B blocks: (T, B) → (B,). The mean of a block without values is NaN."""
    there = ~np.isnan(values)
    sums, counts = np.where(there, values, 0).sum(0), there.sum(0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def short(value: float) -> str:
    """Format integers and numbers >= 100 without decimals, and other numbers with one decimal. NaN becomes "–"."""
    return "–" if np.isnan(value) else f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _listed(labels: Sequence[str], values: np.ndarray, form: str) -> str:
    return ", ".join(
        f"{label}: {'–' if np.isnan(value) else format(value, form)}"
        for label, value in zip(labels, values, strict=True)
    )
