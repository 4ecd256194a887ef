"""The figures of the papers, from the records of runs: each function takes runs and gives the chart."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np

from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.record.collection import Collection, Run, groups, varying
from efficient_ft.record.results import flatten
from efficient_ft.record.rows import MetricsFile
from efficient_ft.report.charts import Chart, Panel, Series
from efficient_ft.report.record import Record, read
from efficient_ft.report.runs import accuracy_of, method_names

ACCURACY = "accuracy (%)"


class Runs:
    """Finished runs, with the settings and rows that figures need.

    Args:
        found: the runs.
    """

    def __init__(self, found: Collection) -> None:
        self.found = found
        self._names = {
            run.path: name for run, name in zip(found.runs, method_names(found.runs, "method."), strict=True)
        }

    def setting(self, run: Run, method: str, key: str) -> Any:
        """A setting of a run's method; None: the run has not this method."""
        return run.config.method.get(method, {}).get(key)

    def by_setting(self, method: str, key: str) -> list[tuple[float, list[Run]]]:
        """The runs with `method` by the value of a setting, in its order, seeds together.

        Raises:
            UserError: fewer than two values.
        """
        found: dict[float, list[Run]] = defaultdict(list)
        for run in self.found.runs:
            value = self.setting(run, method, key)
            if value is not None:
                found[value].append(run)
        if len(found) < 2:
            raise UserError(
                f"This figure needs runs with two values of method.{method}.{key} or more, got {len(found)}. A sweep"
                f" makes them: efficient-ft -m method={method} method.{method}.{key}=..."
            )
        return sorted(found.items())

    def rows(self, run: Run) -> list[dict[str, Any]]:
        """The metrics rows of a run."""
        return MetricsFile(run.path).read()

    def record(self, run: Run) -> Record | None:
        """The step statistics of a run; None: it has none."""
        try:
            return read(run.path)
        except UserError:
            return None

    def recorded(self) -> list[tuple[str, Record]]:
        """Names and step statistics of the runs that have some.

        Raises:
            UserError: none has.
        """
        found = [(self.name(run), record) for run in self.found.runs if (record := self.record(run)) is not None]
        if not found:
            raise UserError("This figure needs step statistics: train with step_stats.interval=1 (or n).")
        return found

    def name(self, run: Run) -> str:
        """The methods of a run, and the settings that tell it from the others."""
        return self._names[run.path]


def _mean(runs: Sequence[Run], of: Callable[[Run], float]) -> float:
    """The mean over the seeds; of two runs with the same seed, the later one.

    Raises:
        UserError: the runs differ in more than their seed.
    """
    other = next((run for run in runs if run.group != runs[0].group), None)
    if other is not None:
        names = ("model.name", "data.name", *varying([runs[0], other]))
        one, two = (flatten(run.config.model_dump(mode="json")) for run in (runs[0], other))
        differs = [f"{name} ({one.get(name)}, {two.get(name)})" for name in names if one.get(name) != two.get(name)]
        raise UserError(
            f"{runs[0].folder} and {other.folder} would be one point of this figure, but differ in"
            f" {', '.join(differs) or 'where their images are'}: runs of different settings are never averaged. Pass"
            " the folders of runs that differ only in the seed and in what the figure shows."
        )
    (group,) = groups(runs)
    return float(np.mean([of(run) for run in group]))


def _backward(run: Run) -> float:
    return run.results["cost"]["executed"]["backward_flops"] / 1e6


def _saved(run: Run) -> float:
    return run.results["cost"]["executed"]["saved_bytes"] / 2**20


def _peak(run: Run) -> float:
    return run.results["cost"]["measured"]["peak_bytes"] / 2**20


# ---------------------------------------------------------------------------------------------- LBP-WHT
def accuracy_by_order(runs: Runs) -> Chart:
    """LBP-WHT, Figure 3: accuracy against FLOPs of the backward pass, a line through the orders."""
    lines = [(_mean(group, _backward), _mean(group, accuracy_of)) for _, group in runs.by_setting("lbp_wht", "order")]
    others = defaultdict(list)
    for run in runs.found.runs:
        if "lbp_wht" not in run.config.method:
            others[runs.name(run)].append(run)
    series = [Series("LBP-WHT", *zip(*lines, strict=True))]
    series += [Series(name, [_mean(of, _backward)], [_mean(of, accuracy_of)]) for name, of in others.items()]
    return Chart("Accuracy by order", [Panel("", "backward MFLOPs per image", ACCURACY, series)])


def marginal_accuracy(runs: Runs) -> Chart:
    """LBP-WHT, Figure 4: the slope of Figure 3, accuracy gained per GFLOP of the backward pass."""
    points = [
        (order, _mean(group, _backward), _mean(group, accuracy_of))
        for order, group in runs.by_setting("lbp_wht", "order")
    ]
    slopes = [(b[0], (b[2] - a[2]) / (b[1] - a[1]) * 1e3) for a, b in pairwise(points) if b[1] != a[1]]
    if not slopes:
        raise UserError("The runs' backward FLOPs do not differ, so there is no slope.")
    series = Series("LBP-WHT", *zip(*slopes, strict=True))
    return Chart("Marginal accuracy", [Panel("", "order", "points per backward GFLOP", [series])])


# ---------------------------------------------------------------------------------------------- Back Razor
def accuracy_by_sparsity(runs: Runs) -> Chart:
    """Back Razor, Figure 3: accuracy and kept bytes by sparsity, pruning the backward pass alone or both."""
    runs.by_setting("back_razor", "sparsity")
    found: dict[str, dict[float, list[Run]]] = defaultdict(lambda: defaultdict(list))
    for run in runs.found.runs:
        sparsity = runs.setting(run, "back_razor", "sparsity")
        if sparsity is not None:
            found[runs.setting(run, "back_razor", "prune")][sparsity].append(run)
    names = {"backward": "backward only", "both": "forward and backward"}

    def series(of: Callable[[Run], float]) -> list[Series]:
        return [
            Series(names[prune], sorted(by), [_mean(by[sparsity], of) for sparsity in sorted(by)])
            for prune, by in found.items()
        ]

    return Chart(
        "Accuracy and memory by sparsity",
        [Panel("accuracy", "sparsity", ACCURACY, series(accuracy_of)),
         Panel("memory", "sparsity", "kept MiB per image", series(_saved))],
    )  # fmt: skip


def loss_curves(runs: Runs) -> Chart:
    """Back Razor, Figure 4: the training loss of each run."""
    return Chart("Training loss", [Panel("", "step", "loss", _curves(runs, "step", "train_loss"))])


def _curves(runs: Runs, x: str, y: str, scale: float = 1.0, times: float = 1.0) -> list[Series]:
    """A curve over training for each run.

    Raises:
        UserError: no run has recorded both.
    """
    found = []
    for run in runs.found.runs:
        points = [(row[x] / scale, row[y] * times) for row in runs.rows(run) if row.get(y) is not None and x in row]
        if points:
            found.append(Series(runs.name(run), *zip(*points, strict=True)))
    if not found:
        raise UserError(f"No run has recorded {y} by {x}.")
    return found


def _split(runs: Runs) -> str:
    return f"{runs.found.runs[0].results['accuracy']['split']}_accuracy"


# ---------------------------------------------------------------------------------------------- ALaST
def relative_to_full(runs: Runs) -> Chart:
    """ALaST, Figure 5: FLOPs of the run, peak memory, time and accuracy relative to full fine-tuning."""
    full = [run for run in runs.found.runs if list(run.config.method) == ["full"]]
    if not full:
        raise UserError("This figure needs a run of full fine-tuning, method=full, next to the others.")
    numbers: Mapping[str, Callable[[Run], float]] = {
        "FLOPs": lambda run: run.results["totals"]["flops"],
        "memory": _peak,
        "time": lambda run: run.results["totals"]["seconds"],
        "accuracy": accuracy_of,
    }
    names = dict.fromkeys(runs.name(run) for run in runs.found.runs if run not in full)
    if not names:
        raise UserError("This figure needs runs of other methods next to full fine-tuning.")
    if _mean(full, accuracy_of) == 0:
        raise UserError(f"{full[0].folder}: full fine-tuning has an accuracy of 0, so that nothing is relative to it.")
    series = []
    for name in names:
        own = [run for run in runs.found.runs if runs.name(run) == name]
        series.append(Series(name, list(numbers), [_mean(own, of) / _mean(full, of) for of in numbers.values()]))
    return Chart("Relative to full fine-tuning", [Panel("", "", "of full fine-tuning", series, "bars")])


def accuracy_during_training(runs: Runs) -> Chart:
    """ALaST, Figure 6: accuracy over training against FLOPs and time, and against the peak memory of the runs."""
    split = _split(runs)
    names: dict[str, list[Run]] = defaultdict(list)
    for run in runs.found.runs:
        names[runs.name(run)].append(run)
    memory = [Series(name, [_mean(of, _peak)], [_mean(of, accuracy_of)]) for name, of in names.items()]
    return Chart(
        "Accuracy during training",
        [Panel("FLOPs", "TFLOPs so far", ACCURACY, _curves(runs, "flops", split, 1e12, 100)),
         Panel("memory", "peak MiB", ACCURACY, memory, "points"),
         Panel("time", "seconds so far", ACCURACY, _curves(runs, "seconds", split, 1, 100))],
    )  # fmt: skip


def accuracy_by_layers(runs: Runs) -> Chart:
    """ALaST, Figure 8: accuracy over FLOPs for each number of layers that train in a step."""
    runs.by_setting("alast", "num_layers")
    series = _curves(runs, "flops", _split(runs), 1e12, 100)
    return Chart("Accuracy over FLOPs", [Panel("", "TFLOPs so far", ACCURACY, series)])


def layer_frequency(runs: Runs) -> Chart:
    """ALaST, Figure 9: the share of the recorded steps in which each block trained."""
    series = [Series(name, record.labels, record.trained.mean(0).tolist()) for name, record in runs.recorded()]
    return Chart("How often each block trained", [Panel("", "block", "share of the steps", series, "bars")])


def layer_budgets(runs: Runs) -> Chart:
    """ALaST, Figure 10: the budget of each block over training, a panel for each run."""
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
        raise UserError("The methods of these runs have no budgets. Train with method=alast step_stats.interval=1.")
    return Chart("Budgets over training", panels[:4], notes=_left_out(panels, 4))


def frequency_and_budgets(runs: Runs) -> Chart:
    """ALaST, Figure 7: how often each block trained, and its budget over training."""
    budgets = layer_budgets(runs).panels
    panels = [*layer_frequency(runs).panels, *budgets[:1]]
    return Chart("Frequency and budgets of the blocks", panels, notes=_left_out(budgets, 1))


def _left_out(panels: Sequence[Panel], drawn: int) -> list[str]:
    names = [panel.title for panel in panels[drawn:]]
    return [f"Not drawn: the budgets of {', '.join(names)}. Pass their folders alone."] if names else []


# ---------------------------------------------------------------------------------------------- BSR
def accuracy_time_memory(runs: Runs) -> Chart:
    """BSR, Figure 1: accuracy against training time and against peak memory, a point for each method."""
    names: dict[str, list[Run]] = defaultdict(list)
    for run in runs.found.runs:
        names[runs.name(run)].append(run)

    def points(of: Callable[[Run], float]) -> list[Series]:
        return [Series(name, [_mean(own, of)], [_mean(own, accuracy_of)]) for name, own in names.items()]

    return Chart(
        "Accuracy, time and memory",
        [Panel("time", "seconds of training", ACCURACY, points(lambda run: run.results["totals"]["seconds"]), "points"),
         Panel("memory", "peak MiB", ACCURACY, points(_peak), "points")],
    )  # fmt: skip


def accuracy_and_memory(runs: Runs) -> Chart:
    """BSR, Figure 5: accuracy and peak memory of each method, by model."""
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

    return Chart(
        "Accuracy and memory",
        [
            Panel("accuracy", "", ACCURACY, bars(accuracy_of), "bars"),
            Panel("memory", "", "peak MiB", bars(_peak), "bars"),
        ],
    )


def embeddings_before_and_after(runs: Runs) -> Chart:
    """BSR, Figure 4: distributions of patch embedding, positions and class token, pretrained and fine-tuned."""
    from efficient_ft.models import factory
    from efficient_ft.training.output import export

    run = runs.found.runs[0]
    if not (run.path / export.NAME).is_file():
        raise UserError(f"{run.folder} holds no {export.NAME}: the fine-tuned weights are gone. Train again.")
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
        raise UserError(f"{run.config.model.name} has no patch embedding, positions or class token.")
    return Chart(f"Embeddings before and after fine-tuning: {runs.name(run)}", panels)


def _density(name: str, values: Any) -> Series:
    density, edges = np.histogram(values.detach().float().flatten().numpy(), bins=60, density=True)
    return Series(name, ((edges[1:] + edges[:-1]) / 2).tolist(), density.tolist())


#: The figures drawn from runs, by the name that `papers.published.figures` has.
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
    """The chart of a paper's figure from the runs `found`.

    Raises:
        SettingError: no such figure.
        UserError: the runs lack what the figure shows.
    """
    if name not in FIGURES:
        raise SettingError("figure", name, FIGURES)
    return FIGURES[name](Runs(found))
