"""Numbers within sentences: ``<!-- = NAME ARGUMENT... -->1.09<!-- / -->``."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterable
from typing import Any

from docsgen import curves, markdown, printed, records, studies

VALUES: dict[str, Callable[..., str]] = {}


def value(function: Callable[..., str]) -> Callable[..., str]:
    """Make a function available in markers under its own name, with - for _."""
    VALUES[function.__name__.strip("_").replace("_", "-")] = function
    return function


@value
def time(file: str, recipe: str, part: str = "step") -> str:
    """The ratio to the baseline's time: ``time memory back_razor``."""
    return markdown.times(records.time(file, recipe, part))


@value
def extra(file: str, recipe: str) -> str:
    """How much longer a step takes than the baseline's, in percent."""
    return f"{100 * (records.time(file, recipe) - 1):.0f} %"


@value
def extra_range(file: str, *recipes: str) -> str:
    """The same of several recipes: lowest to highest."""
    more = sorted(100 * (records.time(file, recipe) - 1) for recipe in recipes)
    return f"{markdown.span(more[0], more[-1])} %"


@value
def faster(file: str, recipe: str, part: str = "step", digits: str = "1") -> str:
    """How many times faster than the baseline."""
    return f"{records.faster(file, recipe, part):.{digits}f}"


@value
def duration(file: str, recipe: str, part: str = "step") -> str:
    """The median time of a part of the step."""
    return markdown.duration(records.seconds(file, recipe, part))


@value
def saved(file: str, recipe: str, digits: str = "1") -> str:
    """MiB kept for the backward pass, per image."""
    return f"{records.saved(file, recipe):.{digits}f}"


@value
def adapters_saved(recipe: str, statistics: str = "frozen") -> str:
    """MiB kept of the whole batch on the ResNet-50 of peft#2196."""
    return f"{records.adapters_saved(recipe, statistics):.0f}"


@value
def peak(file: str, recipe: str) -> str:
    """MiB at the peak of the batch."""
    return f"{records.peak(file, recipe):.0f}"


@value
def above_interpreter(file: str, recipe: str) -> str:
    """MiB of the process at its peak, without the interpreter and its libraries."""
    return f"{records.above_interpreter(file, recipe):.0f}"


@value
def less_saved(file: str, recipe: str, other: str) -> str:
    """By how much less is kept than in another recipe, in percent."""
    return f"{100 * (1 - records.saved(file, recipe) / records.saved(file, other)):.0f} %"


@value
def less_peak(file: str, recipe: str, other: str) -> str:
    """How many times smaller the peak is than another recipe's."""
    return f"{records.peak(file, other) / records.peak(file, recipe):.1f}"


@value
def backward(file: str, recipe: str) -> str:
    """Executed backward MFLOPs per image."""
    return f"{records.recipe(file, recipe)['executed']['backward_flops'] / 1e6:.0f}"


@value
def cosine(file: str, recipe: str) -> str:
    """Cosine of the gradient of all blocks to the exact one, mean over the batches."""
    return markdown.cosine(records.recipe(file, recipe)["cosine"]["blocks"]["mean"])


@value
def overhead(job: str) -> str:
    """Overhead of the framework on a step of a bare loop, in percent with quartiles: ``overhead default``."""
    added = records.load("loop")["jobs"][job]["overhead_percent"]
    signed = [f"{added[key]:.1f}".replace("-", "−") for key in ("median", "q1", "q3")]
    return f"{signed[0]} % [{signed[1]} to {signed[2]}]"


@value
def bare_step(job: str) -> str:
    """A step of the bare loop."""
    return markdown.duration(records.load("loop")["jobs"][job]["bare loop"]["median"])


def projector(state: str, grid: int, method: str, order: int) -> dict:
    """One result of the comparison of projectors."""
    return next(
        r
        for r in records.load("projectors")["results"]
        if (r["state"], r["grid"], r["method"], r["order"]) == (state, [grid, grid], method, order)
    )


def error(result: dict) -> float:
    """Relative error of the whole gradient, the mean over the batches."""
    return result["batch"]["network"]["error"]["mean"]


def _ratios(method: str, other: str, states: str, grids: str) -> Iterable[float]:
    for state in states.split(","):
        for grid in grids.split(","):
            for order in (4, 6):
                yield error(projector(state, int(grid), method, order)) / error(
                    projector(state, int(grid), other, order)
                )


@value
def error_below(method: str, other: str, states: str, grids: str) -> str:
    """By how much a projector's error is below another's, in percent: lowest to highest over states, grids, orders."""
    below = sorted(100 * (1 - ratio) for ratio in _ratios(method, other, states, grids))
    return f"{markdown.span(below[0], below[-1])} %"


@value
def error_change(method: str, other: str, states: str, grids: str) -> str:
    """The change of a projector's error against another's, in percent with sign: lowest to highest."""
    change = sorted(100 * (ratio - 1) for ratio in _ratios(method, other, states, grids))
    signed = [f"{c:+.0f}".replace("-", "−") for c in (change[0], change[-1])]
    return f"{signed[0]} to {signed[1]} %"


@value
def load_range() -> str:
    """The load averages that the benchmarks record, lowest to highest."""
    loads = sorted(
        data["environment"]["load"]
        for data in map(records.load, records.FILES)
        if isinstance(data.get("environment"), dict) and data["environment"].get("load") is not None
    )
    return f"{loads[0]:.2f} to {loads[-1]:.2f}"


@value
def busy() -> str:
    """The load above which `efficient-ft bench` warns."""
    return str(records.BUSY)


@value
def rule(table: str, row: str, column: str = "memory") -> str:
    """A number of the published-rule record: ``rule back_razor/1 tinytl``; columns memory, published, ..."""
    rows = next(t["rows"] for t in records.load("published")["tables"] if t["table"] == table)
    number = next(r[column] for r in rows if r["row"] == row)
    return f"{number:.0f}" if isinstance(number, float) else str(number)


@value
def saving(file: str, recipe: str) -> str:
    """By how much a step is shorter than the baseline's, in percent."""
    return f"{100 * (1 - records.time(file, recipe)):.0f} %"


@value
def rule_exact(table: str, row: str, column: str = "memory") -> str:
    """The same as `rule`, with two decimals."""
    rows = next(t["rows"] for t in records.load("published")["tables"] if t["table"] == table)
    return f"{next(r[column] for r in rows if r['row'] == row):.2f}"


@value
def printed_loss(table: str, baseline: str, row: str) -> str:
    """Percentage points that a row of a printed table is below another, lowest to highest over the data sets."""
    rows = {one.name: one.cells for one in printed.rows(table)}
    lost = sorted(float(rows[baseline][name].printed) - float(rows[row][name].printed) for name in rows[baseline])
    return " to ".join(f"{round(points, 1) + 0.0:.1f}".replace("-", "−") for points in (lost[0], lost[-1]))


@value
def study_accuracy(name: str, row: str) -> str:
    """Mean test accuracy of a row of a study, in percent: ``study-accuracy deit_tiny_caltech101 full``."""
    return f"{_point(name, row)['accuracy']:.1f}"


@value
def study_run(name: str, row: str, tuned: str, seed: str | None = None) -> str:
    """Test accuracy of one run, in percent: ``study-run NAME head 0.001 2``; without a seed, one of the search."""
    records = studies.records(name)
    wanted = records.study.tune.seed if seed is None else int(seed)
    found = records.of_the_search(records.run(row, float(tuned), wanted))
    assert found is not None, f"{name} has no record of {row} at {tuned} with its present settings"
    return f"{studies.test_accuracy(found):.1f}"


@value
def study_run_with(name: str, row: str, tuned: str, setting: str) -> str:
    """As study-run, of the record with a setting that the study ignores: ``… trainer.precision=bf16``."""
    records = studies.records(name)
    (found,) = (
        one for one in records.runs
        if (one["row"], one["value"], one["seed"]) == (row, float(tuned), records.study.tune.seed)
        and setting in one["settings"]
    )  # fmt: skip
    return f"{studies.test_accuracy(found):.1f}"


@value
def study_times(name: str, row: str, cost: str) -> str:
    """How many times less than full fine-tuning a row costs: ``flops`` of the run or bytes ``saved``."""
    return f"{_point(name, 'full')[cost] / _point(name, row)[cost]:.1f}"


@value
def curve_faster(network: str, recipe: str, other: str) -> str:
    """How many times less time all epochs of a recipe take than those of another one."""
    one, two = curves.pair(network, recipe, other)
    return f"{two.seconds / one.seconds:.1f}"


@value
def curve_points(network: str, recipe: str, other: str) -> str:
    """By how many points a recipe's accuracy after the last epoch is above another one's."""
    one, two = curves.pair(network, recipe, other)
    return f"{100 * (statistics.mean(one.last) - statistics.mean(two.last)):+.1f}".replace("-", "−")


def _point(name: str, row: str) -> dict[str, Any]:
    found = next((point for point in studies.study_points(name) if point["row"] == row), None)
    if found is None:
        raise ValueError(f"{row} of the study {name} is not tuned")
    return found


@value
def default_job() -> str:
    """The default job's accuracy on the test images over all runs: mean, lowest and highest."""
    tested = [100 * run["test"] for run in records.load("default_job")["runs"]]
    return f"{statistics.mean(tested):.1f} % [{min(tested):.1f} … {max(tested):.1f}]"


@value
def default_job_runs() -> str:
    """Which runs these are: seeds and numbers of threads."""
    runs = records.load("default_job")["runs"]
    seeds, threads = (sorted({run[key] for run in runs}) for key in ("seed", "threads"))
    return f"{len(seeds)} seeds, each with {' and '.join(map(str, threads))} threads"
