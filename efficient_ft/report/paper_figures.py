"""Figures of papers that are drawn from the records of runs. Each function returns the chart of one figure."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.text import spelled
from efficient_ft.record.collection import (
    NUMBERS,
    Collection,
    Run,
    groups,
    heading,
    in_plain_numbers,
    metric_of,
    metrics_of,
    varying,
)
from efficient_ft.record.results import final_accuracy
from efficient_ft.record.rows import MetricsFile
from efficient_ft.report.charts import Chart, Panel, Series
from efficient_ft.report.record import Record, read
from efficient_ft.report.runs import method_names


class Runs:
    """Finished runs, with methods that select the data for the figures."""

    def __init__(self, found: Collection) -> None:
        self.found = found
        self._names = {
            run.path: name for run, name in zip(found.runs, method_names(found.runs, "method."), strict=True)
        }

    @cached_property
    def metric(self) -> str:
        """The name of the metric of all runs.

        Raises:
            UserError: If the runs have different metrics, which cannot share an axis.
        """
        metric, *others = metrics_of(self.found.runs)
        if others:
            found = [
                f"{spelled(one)} ({', '.join(run.folder for run in self.found.runs if metric_of(run.results) == one)})"
                for one in (metric, *others)
            ]
            raise UserError(
                f"This figure requires runs with the same metric, got {', '.join(found)}. Pass the folders of runs with"
                " one of these metrics."
            )
        return metric

    @property
    def axis(self) -> str:
        """The label of an axis with the metric."""
        return heading(self.metric)

    def by_setting(self, method: str, key: str) -> list[tuple[float, list[Run]]]:
        """Return the runs that use `method`, grouped by the value of the setting `key`, in ascending order.

        Raises:
            UserError: If the setting has fewer than two different values.
        """
        found: dict[float, list[Run]] = defaultdict(list)
        for run in self.found.runs:
            value = run.config.method.get(method, {}).get(key)
            if value is not None:
                found[value].append(run)
        if len(found) < 2:
            raise UserError(
                f"This figure requires runs with at least two values of method.{method}.{key}, got {len(found)}. Run a"
                f" sweep: efficient-ft -m method={method} method.{method}.{key}=..."
            )
        return sorted(found.items())

    def recorded(self) -> list[tuple[str, Record]]:
        """Return the names and records of runs with step statistics. Raise a `UserError` if there are no such runs."""
        found = []
        for run in self.found.runs:
            with suppress(UserError):  # not recorded
                found.append((self.name(run), read(run.path)))
        if not found:
            raise UserError("This figure requires step statistics. Train with step_stats.interval=1.")
        return found

    def name(self, run: Run) -> str:
        """Return the name of a run, which consists of its methods and the method settings that differ between runs."""
        return self._names[run.path]

    def by_name(self) -> dict[str, list[Run]]:
        """Return a dict from names to lists of runs."""
        found: dict[str, list[Run]] = defaultdict(list)
        for run in self.found.runs:
            found[self.name(run)].append(run)
        return found


def _mean(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    """Return the mean of a quantity over runs that differ only in the seed. For each seed, only the latest run is used.

    Raises:
        UserError: If the runs differ in other settings or in their images.
    """
    other = next((run for run in runs if run.group != runs[0].group), None)
    if other is not None:
        names = ("model.name", "data.name", *varying([runs[0], other]))
        one, two = runs[0].settings, other.settings
        differs = [f"{name} ({one.get(name)}, {two.get(name)})" for name in names if one.get(name) != two.get(name)]
        raise UserError(
            f"The runs {runs[0].folder} and {other.folder} would be one point of this figure, but differ in"
            f" {', '.join(differs) or 'their images'}. Runs with different settings are never averaged. Pass the"
            " folders of runs that differ only in the seed and in the settings that the figure compares."
        )
    (group,) = groups(runs)
    return float(np.mean([of(run) for run in group]))


def _number(column: str) -> Callable[[Run], float]:
    """Return the function that returns the number of a run in the column `column` of `NUMBERS`."""
    return lambda run: NUMBERS[column](run.results)


def _in_units(value: float, run: Run) -> float:
    """Convert a metric to the unit of its axis: percent, or no unit for R²."""
    return value if in_plain_numbers(run.results) else 100 * value


def _accuracy(run: Run) -> float:
    """Return the final metric of a run in the unit of its axis."""
    return round(_in_units(final_accuracy(run.results["accuracy"]), run), 4)


_backward, _saved = _number("backward MFLOPs/sample"), _number("saved MiB/sample")
_peak, _seconds = _number("peak MiB"), _number("seconds")


# ---------------------------------------------------------------------------------------------- LBP-WHT
def accuracy_by_order(runs: Runs) -> Chart:
    """LBP-WHT, Figure 3: accuracy versus FLOPs of the backward pass.

    A line connects the results of LBP-WHT with different orders.
    """
    lines = [(_mean(group, _backward), _mean(group, _accuracy)) for _, group in runs.by_setting("lbp_wht", "order")]
    others = defaultdict(list)
    for run in runs.found.runs:
        if "lbp_wht" not in run.config.method:
            others[runs.name(run)].append(run)
    series = [Series("LBP-WHT", *zip(*lines, strict=True))]
    series += [Series(name, [_mean(of, _backward)], [_mean(of, _accuracy)]) for name, of in others.items()]
    return Chart("Accuracy by order", [Panel("", "backward MFLOPs per image", runs.axis, series)])


def marginal_accuracy(runs: Runs) -> Chart:
    """LBP-WHT, Figure 4: accuracy gain per GFLOP of the backward pass, which is the slope of Figure 3."""
    points = [
        (order, _mean(group, _backward), _mean(group, _accuracy))
        for order, group in runs.by_setting("lbp_wht", "order")
    ]
    slopes = [(b[0], (b[2] - a[2]) / (b[1] - a[1]) * 1e3) for a, b in pairwise(points) if b[1] != a[1]]
    if not slopes:
        raise UserError("The backward FLOPs of the runs do not differ, so the slope is undefined.")
    series = Series("LBP-WHT", *zip(*slopes, strict=True))
    return Chart("Marginal accuracy", [Panel("", "order", f"{runs.axis} per backward GFLOP", [series])])


# ---------------------------------------------------------------------------------------------- Back Razor
def accuracy_by_sparsity(runs: Runs) -> Chart:
    """Back Razor, Figure 3: accuracy and saved bytes against sparsity.

    The figure shows separate series for runs that prune only in the backward pass and runs that prune in both passes.
    """
    runs.by_setting("back_razor", "sparsity")
    found: dict[str, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs.found.runs:
        own = run.config.method.get("back_razor", {})
        if own.get("sparsity") is not None:
            found[own["prune"]][own["sparsity"]].append(run)
    names = {"backward": "backward only", "both": "forward and backward"}

    def series(of: Callable[[Run], float]) -> list[Series]:
        return [
            Series(names[prune], sorted(by), [_mean(by[sparsity], of) for sparsity in sorted(by)])
            for prune, by in found.items()
        ]

    return Chart(
        "Accuracy and memory by sparsity",
        [Panel(spelled(runs.metric), "sparsity", runs.axis, series(_accuracy)),
         Panel("memory", "sparsity", "saved MiB per image", series(_saved))],
    )  # fmt: skip


def loss_curves(runs: Runs) -> Chart:
    """Back Razor, Figure 4: training loss of each run."""
    series, notes = _curves(runs, "step", lambda run: "train_loss")
    return Chart("Training loss", [Panel("", "step", "loss", series)], notes=notes)


def _curves(
    runs: Runs,
    x: str,
    y: Callable[[Run], str],
    scale: float = 1.0,
    in_units: Callable[[float, Run], float] | None = None,
) -> tuple[list[Series], list[str]]:
    """Return the training curve of each run, and notes that name the runs without a curve.

    Args:
        runs: the runs.
        x: key of the x values in metrics.jsonl. The values are divided by `scale`.
        y: function that returns the key of the y values of a run.
        scale: divisor of the x values.
        in_units: function that converts a y value of a run.

    Raises:
        UserError: If no run recorded both values.
    """
    found, missing = list[Series](), list[Run]()
    for run in runs.found.runs:
        key = y(run)
        points = [
            (row[x] / scale, row[key] if in_units is None else in_units(row[key], run))
            for row in MetricsFile(run.path).read()
            if row.get(key) is not None and x in row
        ]
        if points:
            found.append(Series(runs.name(run), *zip(*points, strict=True)))
        else:
            missing.append(run)
    if not missing:
        return found, []
    keys = " or ".join(sorted(set(map(y, missing))))
    if not found:
        raise UserError(f"No run recorded both {x} and {keys}.")
    names = ", ".join(run.folder for run in missing)
    return found, [f"These runs have no curve, because they did not record both {x} and {keys}: {names}."]


def _points(runs: Runs, of: Callable[[Run], float]) -> list[Series]:
    return [Series(name, [_mean(own, of)], [_mean(own, _accuracy)]) for name, own in runs.by_name().items()]


def _metric_curves(runs: Runs, x: str, scale: float = 1.0) -> tuple[list[Series], list[str]]:
    """Return the curve of the metric of each run on the split on which its best epoch was selected, and notes."""
    metric, of_split = runs.metric, defaultdict(list)
    for run in runs.found.runs:
        of_split[run.results["accuracy"]["split"]].append(run.folder)
    series, notes = _curves(runs, x, lambda run: f"{run.results['accuracy']['split']}_{metric}", scale, _in_units)
    if len(of_split) > 1:
        splits = ", ".join(f"{split} ({', '.join(folders)})" for split, folders in of_split.items())
        notes.append(f"The curves show the {spelled(metric)} on different splits: {splits}.")
    return series, notes


# ---------------------------------------------------------------------------------------------- ALaST
def relative_to_full(runs: Runs) -> Chart:
    """ALaST, Figure 5: total FLOPs, peak memory, time and accuracy relative to full fine-tuning."""
    full = [run for run in runs.found.runs if list(run.config.method) == ["full"]]
    if not full:
        raise UserError("This figure requires a run of full fine-tuning (method=full).")
    numbers: Mapping[str, Callable[[Run], float]] = {
        "FLOPs": lambda run: run.results["totals"]["flops"],
        "memory": _peak,
        "time": _seconds,
        spelled(runs.metric): _accuracy,
    }
    others = {name: own for name, own in runs.by_name().items() if any(run not in full for run in own)}
    if not others:
        raise UserError("This figure requires runs of other methods in addition to full fine-tuning.")
    if (value := _mean(full, _accuracy)) <= 0:
        raise UserError(
            f"{full[0].folder}: the {spelled(runs.metric)} of full fine-tuning is {value:g}, so relative values are"
            " undefined."
        )
    series = [
        Series(name, list(numbers), [_mean(own, of) / _mean(full, of) for of in numbers.values()])
        for name, own in others.items()
    ]
    return Chart("Relative to full fine-tuning", [Panel("", "", "of full fine-tuning", series, "bars")])


def accuracy_during_training(runs: Runs) -> Chart:
    """ALaST, Figure 6: accuracy during training against FLOPs and time, and accuracy against the peak memory."""
    (flops, notes), (time, _) = _metric_curves(runs, "flops", 1e12), _metric_curves(runs, "seconds")
    return Chart(
        "Accuracy during training",
        [Panel("FLOPs", "TFLOPs so far", runs.axis, flops),
         Panel("memory", "peak MiB", runs.axis, _points(runs, _peak), "points"),
         Panel("time", "seconds so far", runs.axis, time)],
        notes=notes,
    )  # fmt: skip


def accuracy_by_layers(runs: Runs) -> Chart:
    """ALaST, Figure 8: accuracy against FLOPs for different numbers of layers that are trained in a step."""
    runs.by_setting("alast", "num_layers")
    series, notes = _metric_curves(runs, "flops", 1e12)
    return Chart("Accuracy over FLOPs", [Panel("", "TFLOPs so far", runs.axis, series)], notes=notes)


def layer_frequency(runs: Runs) -> Chart:
    """ALaST, Figure 9: fraction of the recorded steps in which each block was trained."""
    series = [Series(name, record.labels, record.trained.mean(0).tolist()) for name, record in runs.recorded()]
    return Chart("How often each block was trained", [Panel("", "block", "fraction of steps", series, "bars")])


def layer_budgets(runs: Runs) -> Chart:
    """ALaST, Figure 10: budget of each block during training, with one panel for each run."""
    panels = []
    for name, record in runs.recorded():
        if record.budgets is not None:
            kept = record.thinned
            series = [
                Series(label, record.steps[kept].tolist(), record.budgets[kept, b].tolist())
                for b, label in enumerate(record.labels)
            ]
            panels.append(Panel(name, "step", "budget", series))
    if not panels:
        raise UserError("The methods of these runs have no budgets. Train with method=alast and step_stats.interval=1.")
    return Chart("Budgets over training", panels[:4], notes=_left_out(panels, 4))


def frequency_and_budgets(runs: Runs) -> Chart:
    """ALaST, Figure 7: training frequency of each block, and budget of each block during training."""
    budgets = layer_budgets(runs).panels
    panels = [*layer_frequency(runs).panels, *budgets[:1]]
    return Chart("Frequency and budgets of the blocks", panels, notes=_left_out(budgets, 1))


def _left_out(panels: Sequence[Panel], drawn: int) -> list[str]:
    names = [panel.title for panel in panels[drawn:]]
    return [f"The budgets of {', '.join(names)} are not drawn. Pass each of these run folders alone."] if names else []


# ---------------------------------------------------------------------------------------------- BSR
def accuracy_time_memory(runs: Runs) -> Chart:
    """BSR, Figure 1: accuracy against training time and against peak memory, with one point for each method."""
    time = Panel("time", "seconds of training", runs.axis, _points(runs, _seconds), "points")
    memory = Panel("memory", "peak MiB", runs.axis, _points(runs, _peak), "points")
    return Chart("Accuracy, time and memory", [time, memory])


def accuracy_and_memory(runs: Runs) -> Chart:
    """BSR, Figure 5: accuracy and peak memory of each method for each model."""
    models = list(dict.fromkeys(run.config.model.name for run in runs.found.runs))
    methods = list(dict.fromkeys(map(runs.name, runs.found.runs)))

    def bars(of: Callable[[Run], float]) -> list[Series]:
        series = []
        for method in methods:
            own = {
                m: [r for r in runs.found.runs if (runs.name(r), r.config.model.name) == (method, m)] for m in models
            }
            series.append(Series(method, [m for m in models if own[m]], [_mean(own[m], of) for m in models if own[m]]))
        return series

    accuracy = Panel(spelled(runs.metric), "", runs.axis, bars(_accuracy), "bars")
    return Chart("Accuracy and memory", [accuracy, Panel("memory", "", "peak MiB", bars(_peak), "bars")])


def embeddings_before_and_after(runs: Runs) -> Chart:
    """BSR, Figure 4: distribution of the values of embeddings and class token before and after fine-tuning.

    The embeddings are the patch embedding and the position embedding.
    """
    from efficient_ft.models import factory
    from efficient_ft.training.output import export

    run = runs.found.runs[0]
    if not (run.path / export.NAME).is_file():
        raise UserError(f"{run.folder} contains no {export.NAME} with the fine-tuned weights. Repeat the run.")
    missing = factory.missing_weights(run.config.model)
    if missing is not None:
        raise UserError(missing)
    after = export.load(run.path).model.state_dict()
    before = factory.create_model(run.config.model, 2).state_dict()
    named = {"patch_embed.proj.weight": "patch embedding", "pos_embed": "positions", "cls_token": "class token"}
    panels = [
        Panel(title, "value", "density", [_density("pretrained", before[key]), _density("fine-tuned", after[key])])
        for key, title in named.items()
        if key in before and key in after
    ]
    if not panels:
        raise UserError(f"The model {run.config.model.name} has no patch embedding, position embedding or class token.")
    return Chart(f"Embeddings before and after fine-tuning: {runs.name(run)}", panels)


def _density(name: str, values: Any) -> Series:
    density, edges = np.histogram(values.detach().float().flatten().numpy(), bins=60, density=True)
    return Series(name, ((edges[1:] + edges[:-1]) / 2).tolist(), density.tolist())


#: Functions that draw figures from runs. The keys are the names in `papers.published.figures`.
FIGURES: dict[str, Callable[[Runs], Chart]] = {
    "lbp_wht/figure_3": accuracy_by_order,
    "lbp_wht/figure_4": marginal_accuracy,
    "back_razor/figure_3": accuracy_by_sparsity,
    "back_razor/figure_4": loss_curves,
    "alast/figure_5": relative_to_full,
    "alast/figure_6": accuracy_during_training,
    "alast/figure_7": frequency_and_budgets,
    "alast/figure_8": accuracy_by_layers,
    "alast/figure_9": layer_frequency,
    "alast/figure_10": layer_budgets,
    "bsr/figure_1": accuracy_time_memory,
    "bsr/figure_4": embeddings_before_and_after,
    "bsr/figure_5": accuracy_and_memory,
}


def paper_figure(name: str, found: Collection) -> Chart:
    """Return the chart of a figure. Raise a `UserError` if the figure does not exist or data is missing in the runs."""
    if name not in FIGURES:
        raise SettingError("figure", name, FIGURES)
    return FIGURES[name](Runs(found))
