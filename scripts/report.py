"""Figures of what a run has recorded (``step_stats.interval=1``): ``python scripts/report.py RUN``

Draws budgets over time, how often each block trained, tokens behind each block, relative magnitudes, and the kept
tokens laid over images of the run's own evaluation split: PNG files, and report.html, one page of its own that needs no
network. What each number means stands in `efficient_ft/record/step_stats.py`.
"""

from __future__ import annotations

import argparse
import base64
import io
import json
import os
import re
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from efficient_ft.core.errors import UserError, replace_unprintable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from efficient_ft.config import Config
    from efficient_ft.methods.base import Method

DPI = 150
#: More steps than this are thinned out evenly where they are drawn one by one.
MOST_STEPS = 600
#: More blocks than this get no label each.
MOST_LABELS = 26
#: Columns of the kept tokens: more blocks that drop are left out evenly, the last one never.
MOST_DROPS = 5
#: Dropped patches keep this share of their light; the rest is a dark blue, to be told from what is black.
DIMMED, TINT = 0.2, (0.08, 0.11, 0.30)


def main(arguments: Sequence[str] | None = None) -> int:
    """The exit status."""
    replace_unprintable()
    options = _parser().parse_args(arguments)
    try:
        write(options.run, options.out or options.run / "report", options.images)
    except UserError as error:
        print(error, file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="Figures of what a run has recorded (step_stats.interval=1).")
    parser.add_argument("run", type=Path, help="a run folder")
    parser.add_argument("--images", type=_count, default=6, metavar="N", help="images with kept tokens (default 6)")
    parser.add_argument("--out", type=Path, metavar="FOLDER", help="where to (default: RUN/report)")
    return parser


def _count(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text}: allowed is a whole number of at least 0")
    return int(text)


def write(run: Path, out: Path, images: int) -> None:
    """Draw the record of `run` and write the figures and the page into `out`.

    Raises:
        UserError: it has recorded nothing, or matplotlib is not there.
    """
    record = read(run)
    _require_matplotlib()
    from efficient_ft.training.checkpoint import write_atomically, write_text_atomically

    facts, config = describe(run, record)
    notes: list[str] = []
    drawings = [draw_budgets(record), draw_trained(record), draw_tokens(record), draw_magnitudes(record)]
    if images:
        try:
            drawings.append(draw_kept(kept_tokens(run, config, images)))
        except UserError as error:  # the record is there, whatever became of the images and the weights
            notes.append(f"Kept tokens are not drawn. {error}")
    if drawings[0] is None:
        notes.append("The methods of this run have no budgets.")
    done = [drawing for drawing in drawings if drawing is not None]
    for drawing in done:
        write_atomically(out / drawing.file, drawing.write)
    write_text_atomically(out / "report.html", page(facts, record, done, notes))
    for note in notes:
        print(f"note: {note}")
    print("\n".join(str(out / name) for name in (*(drawing.file for drawing in done), "report.html")))


def _require_matplotlib() -> None:
    try:
        import matplotlib
    except ModuleNotFoundError as error:
        raise UserError(
            "scripts/report.py draws with matplotlib, which is not installed: pip install -e '.[report]'"
        ) from error
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


# ---------------------------------------------------------------------------------------------- what was recorded
@dataclass(frozen=True)
class Record:
    """The rows of step_stats.jsonl: T recorded steps of B blocks.

    Attributes:
        steps: (T,), from 1.
        blocks: full names.
        labels: the numbers in them, by which blocks are told apart.
        trained: (T, B), of truth values.
        budgets: (T, B); None: there are none.
        tokens, magnitudes, compared: (T, B), not a number where nothing was recorded.
    """

    steps: np.ndarray
    blocks: list[str]
    labels: list[str]
    trained: np.ndarray
    budgets: np.ndarray | None
    tokens: np.ndarray
    magnitudes: np.ndarray
    compared: np.ndarray

    @property
    def ends(self) -> tuple[slice, slice, str]:
        """The first and the last tenth of the record, and how to call them."""
        share = max(1, len(self.steps) // 10)
        called = "record" if share == 1 else f"{share} records"
        return slice(0, share), slice(-share, None), called

    @property
    def thinned(self) -> np.ndarray:
        """Indices of the steps to be drawn one by one."""
        count = len(self.steps)
        return np.unique(np.linspace(0, count - 1, min(count, MOST_STEPS)).round().astype(int))


def read(run: Path) -> Record:
    """What `run` has recorded.

    Raises:
        UserError: nothing.
    """
    from efficient_ft.record.step_stats import NAME
    from efficient_ft.training.callbacks import Rows

    if not run.is_dir():
        raise UserError(f"{run}: no such folder; give the folder that a run named at its end.")
    rows = Rows(run / NAME).read()
    if not rows:
        raise UserError(
            f"{run}: nothing was recorded there ({NAME}). Train with step_stats.interval=1 (each optimizer step, or n: every"
            " n-th); a run that has finished is trained anew with resume=never."
        )
    blocks = list(rows[0]["blocks"])

    def numbers(name: str) -> np.ndarray:
        empty = [None] * len(blocks)
        return np.array([row.get(name) or empty for row in rows], dtype=float)

    budgets = numbers("budgets")
    return Record(
        steps=np.array([row["step"] for row in rows]),
        blocks=blocks,
        labels=_labels(blocks),
        trained=np.array([[block in row["trained"] for block in blocks] for row in rows]),
        budgets=None if np.isnan(budgets).all() else budgets,
        tokens=numbers("tokens"),
        magnitudes=numbers("magnitudes"),
        compared=numbers("compared"),
    )


def _labels(blocks: Sequence[str]) -> list[str]:
    short = [".".join(re.findall(r"\d+", name)) for name in blocks]
    return short if all(short) and len(set(short)) == len(short) else list(blocks)


def describe(run: Path, record: Record) -> tuple[dict[str, str], Config]:
    """What the page says of the run, in order, and the run's configuration.

    Raises:
        UserError: there is no configuration, or it cannot be read.
    """
    import yaml

    from efficient_ft.config import check

    try:
        config = check(yaml.safe_load((run / "config.yaml").read_text(encoding="utf-8")))
    except (OSError, AttributeError, TypeError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise UserError(f"{run / 'config.yaml'}: cannot be read ({str(error).splitlines()[0]}).") from error
    data: str = config.data.name
    if data == "folder":
        data = os.path.basename(os.path.normpath(config.data.root))
    if config.tasks:
        data = ", ".join(config.tasks) + " in turn"
    started = "" if config.model.pretrained or config.model.weights else " (from random weights)"
    facts = {
        "Method": " + ".join(f"{name}{_settings(settings)}" for name, settings in config.method.items()),
        "Model": config.model.name + started,
        "Data": data,
    }
    results = run / "results.json"
    if results.is_file():
        found = json.loads(results.read_text(encoding="utf-8"))
        accuracy = found["accuracy"]
        mean = "mean of the tasks: " if config.tasks else ""
        facts["Accuracy"] = f"{mean}{accuracy['best']:.2%} ({accuracy['split']}, best), {accuracy['last']:.2%} (last)"
        tested = found["data"]["accuracy"].get("test")
        if accuracy["split"] != "test" and tested is not None:
            facts["Accuracy"] += f", {tested:.2%} (test, best)"
    else:
        facts["Accuracy"] = "the run has not finished"
    steps = record.steps
    facts["Recorded"] = f"{len(steps)} optimizer steps, from {steps[0]} to {steps[-1]}; batch {config.data.batch_size}"
    return facts, config


def _settings(settings: dict[str, Any]) -> str:
    return f" ({', '.join(f'{k}={v}' for k, v in settings.items())})" if settings else ""


# ---------------------------------------------------------------------------------------------- figures
@dataclass(frozen=True)
class Drawing:
    """One figure.

    Attributes:
        file: its name.
        alt: what it shows, for who cannot see it.
        caption: what the numbers are.
    """

    file: str
    title: str
    alt: str
    caption: str
    figure: Figure

    @cached_property
    def png(self) -> bytes:
        stream = io.BytesIO()
        self.figure.savefig(stream, format="png", dpi=DPI, bbox_inches="tight", metadata={"Software": None})
        return stream.getvalue()

    def write(self, path: Path) -> None:
        path.write_bytes(self.png)


def _figure(width: float, height: float, columns: int = 1, **kwargs: Any) -> tuple[Figure, list[Axes]]:
    from matplotlib.figure import Figure

    figure = Figure(figsize=(width, height), layout="constrained")
    axes = figure.subplots(1, columns, squeeze=False, **kwargs)
    return figure, list(axes[0])


def _colours(count: int) -> Any:
    """From the first block (dark) to the last (light, but not too light for white paper)."""
    from matplotlib import colormaps

    return colormaps["viridis"](np.linspace(0, 0.88, count))


def _per_block(axes: Axes, record: Record, room: int = 90) -> None:
    """The blocks along x, upright where so many letters have room."""
    labels, count = record.labels, len(record.labels)
    every = -(-count // MOST_LABELS)
    places = range(0, count, every)
    turned = max(map(len, labels)) * len(places) > room
    axes.set_xticks(
        places, [labels[i] for i in places], rotation=60 if turned else 0, ha="right" if turned else "center"
    )
    axes.set_xlim(-0.7, count - 0.3)
    axes.set_xlabel("block")
    axes.grid(axis="x", visible=False)


def _bars(axes: Axes, record: Record, heights: np.ndarray, texts: Sequence[str], inside: bool = False) -> None:
    """A bar for each block, with its number above it or at its foot."""
    axes.bar(range(len(heights)), np.nan_to_num(heights), color="#9db4dc", width=0.78)
    if len(heights) <= MOST_LABELS:
        for i, (height, text) in enumerate(zip(np.nan_to_num(heights), texts, strict=True)):
            place = (i, 0 if inside else height)
            axes.annotate(text, place, (0, 4), textcoords="offset points", ha="center", fontsize=9.5)
    _per_block(axes, record)


def _whole_steps(axes: Axes) -> None:
    """The optimizer steps along x."""
    from matplotlib.ticker import MaxNLocator

    axes.xaxis.set_major_locator(MaxNLocator(integer=True))
    axes.set_xlabel("optimizer step")


def draw_budgets(record: Record) -> Drawing | None:
    """Lines over the steps, each with its block at its end."""
    if record.budgets is None:
        return None
    height = max(4.8, 1.2 + 0.17 * len(record.blocks))
    figure, (axes,) = _figure(8.6, height)
    shown, colours = record.thinned, _colours(len(record.blocks))
    for i, colour in enumerate(colours):
        axes.plot(
            record.steps[shown],
            record.budgets[shown, i],
            color=colour,
            linewidth=1.6,
            marker="o" if len(shown) < 3 else "",
        )
    low, high = np.nanmin(record.budgets), np.nanmax(record.budgets)
    margin = max(0.02, 0.06 * (high - low))
    axes.set_ylim(low - margin, high + margin)
    axes.set(ylabel="budget", title="Budget of each block")
    _whole_steps(axes)
    _label_ends(axes, record, record.budgets[-1], colours, height)
    return Drawing(
        "budgets.png",
        "Budgets over time",
        f"Lines over the optimizer steps, one for each block. At the last one, step {record.steps[-1]}:"
        f" {_listed(record.labels, record.budgets[-1], '.3f')}.",
        "The share of the incoming patch tokens that flows on behind each block, in the step it held for. Dark: the"
        " first blocks, light: the last ones.",
        figure,
    )


def _label_ends(axes: Axes, record: Record, values: np.ndarray, colours: Any, height: float) -> None:
    """The blocks' names beside the ends of their lines, moved apart where they would lie on each other.

    Args:
        height: of the figure, in inches.
    """
    low, high = axes.get_ylim()
    size = 10 if len(values) <= MOST_LABELS else 8
    gap = (high - low) * 1.4 * size / 72 / (height - 1)
    order = np.argsort(values, kind="stable")
    places = values[order].astype(float)
    for i in range(1, len(places)):
        places[i] = max(places[i], places[i - 1] + gap)
    places[-1] = min(places[-1], high)
    for i in range(len(places) - 2, -1, -1):  # down again where the stack would stand above the figure
        places[i] = min(places[i], places[i + 1] - gap)
    for block, place in zip(order, places, strict=True):
        line = {
            "arrowstyle": "-",
            "color": colours[block],
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
            color=colours[block],
            fontsize=size,
            va="center",
            annotation_clip=False,
            arrowprops=line,
        )
    axes.margins(x=0)
    axes.text(1.06, 1.03, "block", transform=axes.transAxes, fontsize=10)


def draw_trained(record: Record) -> Drawing:
    """Bars: the share of the recorded steps in which each block trained."""
    shares = record.trained.mean(0)
    figure, (axes,) = _figure(8.6, 3.8)
    _bars(axes, record, 100 * shares, [f"{share:.0%}".rstrip("%") for share in shares])
    axes.set(ylim=(0, 108), ylabel="% of the recorded steps", title="How often each block trained")
    return Drawing(
        "trained.png",
        "Training frequency",
        f"Bars, one for each block: {_listed(record.labels, shares, '.0%')}.",
        "The share of the recorded steps in which something in the block trained"
        f" ({record.trained.sum(1).mean():.3g} of {len(record.blocks)} blocks in a step, on average).",
        figure,
    )


def draw_tokens(record: Record) -> Drawing:
    """Bars: the mean over the recorded steps, from the fewest to the most."""
    mean, least, most = (f(record.tokens) for f in (_mean, _least, _most))
    figure, (axes,) = _figure(8.6, 3.8)
    _bars(axes, record, mean, [_short(value) for value in mean], inside=True)
    varies = np.nan_to_num(most - least) > 0
    if varies.any():
        at = np.flatnonzero(varies)
        axes.errorbar(
            at,
            mean[at],
            [mean[at] - least[at], most[at] - mean[at]],
            fmt="none",
            ecolor="#333333",
            capsize=3,
            linewidth=1,
        )
    axes.set(ylim=(0, 1.12 * np.nanmax(most, initial=1)), ylabel="tokens of an image", title="Tokens behind each block")
    whiskers = (
        " The bar is the mean over the recorded steps, the line goes from the fewest to the most."
        if varies.any()
        else ""
    )
    return Drawing(
        "tokens.png",
        "Tokens behind each block",
        f"Bars, one for each block: {_listed(record.labels, mean, '.4g')}.",
        f"In training, class and fused tokens included (positions of the map, in networks without tokens).{whiskers}",
        figure,
    )


def draw_magnitudes(record: Record) -> Drawing:
    """The beginning and the end of the record beside each other; and all of it as a heat map."""
    first, last, called = record.ends
    shown = record.thinned
    several = len(shown) > 2
    figure, axes = _figure(
        11.6 if several else 8.6, 4.4, 2 if several else 1, width_ratios=[1, 1.15] if several else [1]
    )
    start, end = _mean(record.magnitudes[first]), _mean(record.magnitudes[last])
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
        every = -(-len(places) // MOST_LABELS)
        axes[1].set_yticks(places[::every], record.labels[::every])
        axes[1].grid(visible=False)
        axes[1].set(ylabel="block", title="… over time")
        _whole_steps(axes[1])
        figure.colorbar(mesh, ax=axes[1])
    alone = record.compared < record.tokens / 2
    where = [
        f"block {label} in {n} of {len(alone)} records"
        for label, n in zip(record.labels, alone.sum(0), strict=True)
        if n
    ]
    special = (
        f" Of the class token (and its like) alone, since which of the others came out is not told: {', '.join(where)}."
        if where
        else ""
    )
    return Drawing(
        "magnitudes.png",
        "Relative magnitudes",
        f"Lines over the blocks for the {called} at the beginning and at the end"
        + (", and a heat map of block and optimizer step" if several else "")
        + f". At the end: {_listed(record.labels, end, '.3f')}.",
        "How much a block adds to what flows through it: ‖f(x)‖ / ‖f(x) + x‖, with f(x) + x its output and f(x) the"
        " difference to its input, the mean over images and over the tokens that went in and come out again."
        f" Small: the block leaves them as they are.{special}",
        figure,
    )


def _mean(values: np.ndarray) -> np.ndarray:
    """Over the steps (T, B) → (B,); not a number where there is none."""
    there = ~np.isnan(values)
    sums, counts = np.where(there, values, 0).sum(0), there.sum(0)
    return np.where(counts > 0, sums / np.maximum(counts, 1), np.nan)


def _least(values: np.ndarray) -> np.ndarray:
    return np.fmin.reduce(values, axis=0)


def _most(values: np.ndarray) -> np.ndarray:
    return np.fmax.reduce(values, axis=0)


def _short(value: float) -> str:
    """Three digits, or all before the point."""
    return "–" if np.isnan(value) else f"{value:.0f}" if value >= 100 or value == round(value) else f"{value:.1f}"


def _listed(labels: Sequence[str], values: np.ndarray, form: str) -> str:
    return ", ".join(
        f"{label}: {'–' if np.isnan(value) else format(value, form)}"
        for label, value in zip(labels, values, strict=True)
    )


# ---------------------------------------------------------------------------------------------- kept tokens
@dataclass(frozen=True)
class Kept:
    """Images, and which of their patches are still there behind the blocks that drop some.

    Attributes:
        pixels: (N, height, width, 3) from 0 to 1, as the network sees them, without normalisation.
        classes: N names.
        blocks: the labels of the blocks that drop tokens.
        masks: for each of these (N, H, W), true where the patch is kept.
        fused: for each of these, how many fused tokens flow beside them.
        shown: what kind of forward pass this is, for the caption.
    """

    pixels: np.ndarray
    classes: list[str]
    blocks: list[str]
    masks: list[np.ndarray]
    fused: list[int]
    shown: str


def kept_tokens(run: Path, config: Config, count: int) -> Kept:
    """Send the first images of the run's evaluation split (of its first task) through the network that it has left.

    Where evaluation lets all tokens flow on and training does not (ALaST), blocks drop as in training, by the budgets
    of the run's checkpoint, with dropout and drop path off.

    Raises:
        UserError: weights or data are not there, or no tokens are dropped, or they have no places any more.
    """
    import torch

    from efficient_ft.data import missing_data, open_data
    from efficient_ft.models.view import view
    from efficient_ft.training import checkpoint, export

    trained = export.load(run)
    missing = missing_data(config.data)
    if missing is not None:
        raise UserError(missing)
    data = config.data.model_copy(update={"num_workers": 0, "eval_batch_size": count})
    images = open_data(data, trained.input, config.seed)
    batch, labels = next(iter(images.eval_loader(images.best_split)))
    model, seen = trained.model, view(trained.model)
    of_task = f" of {next(iter(config.tasks))}" if config.tasks else ""
    passes = (
        f"The first {len(batch)} images of the {images.best_split} split{of_task}, seen by the weights of"
        " model.safetensors"
    )
    shown = f"{passes}, as in evaluation."
    drops = _drops(model, seen.blocks, batch)
    if not drops:
        held = checkpoint.read(run / checkpoint.NAME) if (methods := _budgeted(config)) else {}
        for method in methods:
            method.load_state_dict(held["callbacks"]["MethodCallback"][method.state_key])
            method.apply(model)
            for name in seen.blocks:  # the blocks alone, and not the dropout in them
                model.get_submodule(name).training = True
            shown = (
                f"{passes}, with tokens dropped as in training by the budgets after step {held['global_step']}, dropout"
                " off. In evaluation all tokens flow on."
            )
        drops = _drops(model, seen.blocks, batch)
    if not drops:
        raise UserError("The methods of this run drop no tokens.")
    (grid,) = {
        layer.tokens.grid
        for layer in seen.layers
        if layer.tokens is not None and layer.tokens.form == "tokens" and layer.name.startswith(tuple(seen.blocks))
    }
    names = _labels(seen.blocks)
    mean, std = (torch.tensor(v).view(1, -1, 1, 1) for v in (trained.input.mean, trained.input.std))
    pixels = (batch * std + mean).clamp(0, 1).permute(0, 2, 3, 1).expand(-1, -1, -1, 3).numpy()
    positions = grid[0] * grid[1]
    masks = []
    for places in drops.values():
        mask = np.zeros((len(places), positions + 1), dtype=bool)  # the last for all that were fused
        np.put_along_axis(mask, np.minimum(places, positions), True, axis=1)
        masks.append(mask[:, :positions].reshape(-1, *grid))
    return Kept(
        pixels,
        [trained.class_names[int(label)] for label in labels],
        [names[index] for index in drops],
        masks,
        [int((places >= positions).sum(1).max()) for places in drops.values()],
        shown,
    )


def _budgeted(config: Config) -> list[Method]:
    """Those of the run's methods whose budgets let fewer tokens flow on."""
    from efficient_ft.methods.build import build_methods

    return [method for method in build_methods(config) if "budgets" in method.step_stats()]


def _drops(model: Any, blocks: Sequence[str], batch: Any) -> dict[int, np.ndarray]:
    """By the block's index, (N, K) places of the tokens that flow on behind the blocks that drop some.

    Raises:
        UserError: nobody knows where the tokens are.
    """
    import torch

    from efficient_ft.record.step_stats import Passed, watched

    drops: dict[int, np.ndarray] = {}

    def see(index: int, passed: Passed) -> None:
        if passed.after is None or passed.y.shape[1] == passed.x.shape[1]:
            return
        if passed.after.grid_index_BL is None:
            raise UserError(
                "The tokens of this run have no places in the image any more: they are merged, or left out at random."
            )
        drops[index] = passed.after.grid_index_BL.numpy()

    with torch.no_grad(), watched(model, blocks, see):
        model(batch)
    return drops


def draw_kept(kept: Kept) -> Drawing:
    """A row for each image: itself, and behind each drop with the dropped patches dimmed."""
    count = len(kept.blocks)
    chosen = np.unique(np.linspace(0, count - 1, min(count, MOST_DROPS)).round().astype(int))
    images, (height, width) = len(kept.pixels), kept.pixels.shape[1:3]
    columns, side = 1 + len(chosen), 1.95
    from matplotlib.figure import Figure

    figure = Figure(figsize=(columns * side, 0.45 + images * side * height / width), layout="constrained")
    axes = figure.subplots(images, columns, squeeze=False)
    patches = kept.masks[0][0].size
    for row in range(images):
        pictures = [kept.pixels[row], *(_dimmed(kept.pixels[row], kept.masks[i][row]) for i in chosen)]
        for place, picture in zip(axes[row], pictures, strict=True):
            place.imshow(picture, interpolation="nearest")
            place.set(xticks=[], yticks=[])
            place.grid(visible=False)
            place.spines[:].set_visible(False)
        axes[row, 0].set_ylabel(_cut(kept.classes[row], 20), fontsize=10)
    titles = ["image", *(f"behind block {kept.blocks[i]}:\n{_counted(kept.masks[i])} of {patches}" for i in chosen)]
    for place, title in zip(axes[0], titles, strict=True):
        place.set_title(title, fontsize=10)
    left_out = f" {count} blocks drop tokens; {len(chosen)} of them are shown." if count > len(chosen) else ""
    fused = (
        f" Beside them flow up to {max(kept.fused)} fused tokens, made of the dropped ones." if max(kept.fused) else ""
    )
    steps = ", ".join(f"block {kept.blocks[i]}: {_counted(kept.masks[i])} of {patches}" for i in chosen)
    return Drawing(
        "kept_tokens.png",
        "Kept tokens",
        f"{images} images ({', '.join(kept.classes)}), each beside itself with the dropped patches darkened. Kept"
        f" behind {steps}.",
        f"Dark blue patches are dropped. {kept.shown}{fused}{left_out}",
        figure,
    )


def _dimmed(pixels: np.ndarray, mask: np.ndarray) -> np.ndarray:
    """Pixels (height, width, 3), dark where the patch is not in the mask (H, W)."""
    height, width = pixels.shape[:2]
    rows, columns = np.arange(height) * mask.shape[0] // height, np.arange(width) * mask.shape[1] // width
    return np.where(mask[rows][:, columns, None], pixels, DIMMED * pixels + (1 - DIMMED) * np.array(TINT))


def _counted(masks: np.ndarray) -> str:
    counts = masks.sum((1, 2))
    return str(counts[0]) if (counts == counts[0]).all() else f"{counts.min()}–{counts.max()}"


def _cut(text: str, most: int) -> str:
    return text if len(text) <= most else f"{text[: most - 1]}…"


# ---------------------------------------------------------------------------------------------- the page
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
    """One HTML page with the figures inside it."""
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
    """The header, and a row for each block: what is drawn, at the beginning and at the end of the record."""
    first, last, _ = record.ends
    columns: dict[str, list[str]] = {
        "block": record.blocks,
        "trained": [f"{share:.1%}" for share in record.trained.mean(0)],
        "tokens behind it": [_short(value) for value in _mean(record.tokens)],
    }
    numbers: dict[str, np.ndarray | None] = {"budget": record.budgets, "relative magnitude": record.magnitudes}
    for name, values in numbers.items():
        for when, part in (("first", first), ("last", last)):
            if values is not None:
                columns[f"{name}, {when}"] = ["–" if np.isnan(v) else f"{v:.4f}" for v in _mean(values[part])]
    columns["tokens compared"] = [_short(value) for value in _mean(record.compared)]
    return list(columns), [list(row) for row in zip(*columns.values(), strict=True)]


def _row(cell: str, texts: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{cell}>{escape(text)}</{cell}>" for text in texts) + "</tr>"


if __name__ == "__main__":
    sys.exit(main())
