"""The figure of the README: step time against memory, as an SVG whose lines follow from the records alone."""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import re
import sys
from pathlib import Path

from docsgen import records

ROOT = Path(__file__).resolve().parents[2]
FILE = ROOT / "docs" / "figures" / "time-memory.svg"

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


def data() -> list[tuple[str, float, float]]:
    """Label, peak in MiB, and ratio of the step time to full fine-tuning of the same file."""
    return [
        (label, round(records.peak(file, name), 1), round(records.time(file, name), 4))
        for file, name, label, *_ in POINTS
    ]


def digest() -> str:
    """Changes if the numbers or this module do, with any version of matplotlib."""
    source = inspect.getsource(sys.modules[__name__])
    return hashlib.sha256((json.dumps(data()) + source).encode()).hexdigest()[:16]


def draw() -> str:
    """The SVG: the same text for the same records and the same matplotlib."""
    import matplotlib

    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    style = {"svg.hashsalt": "efficient-ft", "svg.fonttype": "path", "font.size": 9.5, "font.family": "DejaVu Sans"}
    with matplotlib.rc_context(style):
        figure, axes = plt.subplots(figsize=(8.4, 4.5))
        for (_, _, label, color, (right, up, align)), (_, peak, ratio) in zip(POINTS, data(), strict=True):
            axes.plot(peak, ratio, "o", color=color, markersize=6.5, zorder=3)
            axes.annotate(label, (peak, ratio), (right, up), textcoords="offset points", ha=align, color=color)
        axes.axhline(1, color="#999999", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.set(xscale="log", xlim=(130, 1250), ylim=(0, 1.6))
        ticks = [150, 200, 300, 400, 600, 800, 1000]
        axes.set_xticks(ticks, [str(tick) for tick in ticks])
        axes.xaxis.set_minor_locator(matplotlib.ticker.NullLocator())
        axes.set_xlabel("peak of live tensors in a step, MiB (counted; log scale)")
        axes.set_ylabel("step time ÷ full fine-tuning")
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
        axes.grid(color="#e4e4e4", linewidth=0.7, zorder=0)
        for kind, color in KINDS.items():
            axes.plot([], [], "o", color=color, label=kind, markersize=6)
        axes.legend(loc="upper right", frameon=False, fontsize=8.5, handletextpad=0.2)
        figure.tight_layout()
        out = io.StringIO()
        about = f"data {digest()}, matplotlib {matplotlib.__version__}"
        figure.savefig(out, format="svg", metadata={"Date": None, "Creator": None, "Description": about})
        plt.close(figure)
    return "\n".join(line.rstrip() for line in out.getvalue().splitlines()) + "\n"


def write() -> list[Path]:
    """Draw the figure; returns the file if it changed."""
    new = draw()
    if FILE.is_file() and FILE.read_text(encoding="utf-8") == new:
        return []
    FILE.parent.mkdir(parents=True, exist_ok=True)
    FILE.write_text(new, encoding="utf-8")
    return [FILE]


def stale() -> list[str]:
    """Why the figure is not what it should be. Another version of matplotlib may write other lines of the same data."""
    name = FILE.relative_to(ROOT).as_posix()
    text = FILE.read_text(encoding="utf-8") if FILE.is_file() else ""
    drawn = re.search(r"data (\w+), matplotlib ([\w.]+)", text)
    if drawn is None:
        return [f"{name}: missing"]
    if drawn[1] != digest():
        return [f"{name}: drawn from other data ({drawn[1]}, now {digest()})"]
    import matplotlib

    if drawn[2] == matplotlib.__version__ and text != draw():
        return [f"{name}: changed by hand"]
    return []
