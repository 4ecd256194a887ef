"""Numbers within sentences: ``<!-- = NAME ARGUMENT... -->1.09<!-- / -->``."""

from __future__ import annotations

import statistics
from collections.abc import Callable

from docsgen import curves, records, studies
from docsgen.markdown import duration
from efficient_ft.core.format import format_ratio
from efficient_ft.papers.published import published_table


def signed(*numbers: float, form: str = ".1f") -> list[str]:
    """Format numbers with a real minus sign and without a negative zero."""
    digits = int(form.strip("+.f"))
    return [format(round(number, digits) + 0.0, form).replace("-", "−") for number in numbers]  # no −0.0


def _overhead(job: str) -> str:
    added = records.load("loop")["jobs"][job]["overhead_percent"]
    median, low, high = signed(added["median"], added["q1"], added["q3"])
    return f"{median} % [{low} to {high}]"


def _rule(table: str, row: str, column: str = "memory", form: str = ".0f") -> str:
    rows = next(t["rows"] for t in records.load("published")["tables"] if t["table"] == table)
    number = next(r[column] for r in rows if r["row"] == row)
    return format(number, form) if isinstance(number, float) else str(number)


def _executed(table: str, row: str, column: str = "train_memory_mb") -> float:
    cells = records.load("costs")["cells"]
    (found,) = (c["executed"] for c in cells if (c["table"], c["row"], c["column"]) == (table, row, column))
    return float(found)


def _layer(shape: str, variant: str) -> str:
    flops = records.load("layer")["shapes"][shape][variant]["backward_flops"]
    return f"{flops / 1e6:.1f}"


def _layer_faster(order: str) -> str:
    shapes = [of for shape, of in records.load("layer")["shapes"].items() if not shape.endswith(" bf16")]
    ratios = [of[f"order {order}"]["measured"]["backward"]["times_faster"]["median"] for of in shapes]
    return f"{min(ratios):.1f} to {max(ratios):.1f}"


def _printed_loss(table: str, baseline: str, row: str) -> str:
    rows = {one.name: one.cells for one in published_table(table).rows}
    lost = sorted(float(rows[baseline][name].printed) - float(rows[row][name].printed) for name in rows[baseline])
    return " to ".join(signed(lost[0], lost[-1]))


def _curve(network: str, recipe: str, other: str) -> tuple[float, float]:
    one, two = (curves.recipes(network)[name] for name in (recipe, other))
    gained = 100 * (statistics.mean(curves.last(one)) - statistics.mean(curves.last(two)))
    return curves.seconds(two) / curves.seconds(one), gained


def _default_job() -> str:
    tested = [100 * run["test"] for run in records.load("default_job")["runs"]]
    return f"{statistics.mean(tested):.1f} % [{min(tested):.1f} … {max(tested):.1f}]"


#: Dict from names of memory sizes to functions that return the size for FILE RECIPE.
_BYTES = {"saved": records.saved, "peak": records.peak}

#: Dict from names in markers to functions that return numbers as text. FILE is a short name in `records.FILES`, and
#: RECIPE is a recipe of this file. Times are relative to the baseline of the file.
VALUES: dict[str, Callable[..., str]] = {
    # times: FILE RECIPE [PART]
    "time": lambda file, recipe, part="step": format_ratio(records.time(file, recipe, part)),
    "extra": lambda file, recipe: f"{100 * (records.time(file, recipe) - 1):.0f} %",
    "faster": lambda file, recipe, part="step", digits="1": f"{records.faster(file, recipe, part):.{digits}f}",
    "duration": lambda file, recipe, part="step": duration(records.seconds(file, recipe, part)),
    # one linear layer: ORDER; SHAPE VARIANT
    "layer-faster": _layer_faster,
    "layer-mflops": _layer,
    # bytes: FILE RECIPE
    "saved": lambda file, recipe, digits="1": f"{records.saved(file, recipe):.{digits}f}",
    "peak": lambda file, recipe: f"{records.peak(file, recipe):.0f}",
    "peak-ratio": lambda file, recipe, baseline="full": format_ratio(
        records.peak(file, recipe) / records.peak(file, baseline)
    ),
    "above-interpreter": lambda file, recipe: f"{records.above_interpreter(file, recipe):.0f}",
    "adapters-saved": lambda recipe, statistics="frozen": f"{records.adapters_saved(recipe, statistics):.0f}",
    # times fewer bytes: FILE RECIPE BASELINE saved or peak
    "fewer": lambda file, recipe, baseline, what: f"{_BYTES[what](file, baseline) / _BYTES[what](file, recipe):.1f}",
    # gradients
    "cosine": records.cosine,
    # the framework and the machine
    "overhead": _overhead,
    "bare-step": lambda job: duration(records.load("loop")["jobs"][job]["bare loop"]["median"]),
    # published tables: TABLE ROW [COLUMN]
    "rule": _rule,
    "rule-exact": lambda table, row, column="memory": _rule(table, row, column, ".2f"),
    "printed-loss": _printed_loss,
    "executed": lambda table, row, *column: f"{_executed(table, row, *column):.0f}",
    "executed-ratio": lambda table, row, other, *column: (
        f"{_executed(table, row, *column) / _executed(table, other, *column):.2f}"
    ),
    # studies and runs
    "study-accuracy": lambda study, row: f"{studies.point(study, row)['accuracy']:.1f}",
    "study-rows": studies.accuracies,
    "study-seed": studies.accuracies_of_seed,
    "study-epoch": studies.after_epoch,
    "study-loss": studies.loss_after_epoch,
    "study-difference": lambda study, row: signed(
        studies.point(study, row)["accuracy"] - studies.point(study, "full")["accuracy"], form="+.1f"
    )[0],
    "study-times": lambda study, row, cost: (
        f"{studies.point(study, 'full')[cost] / studies.point(study, row)[cost]:.1f}"
    ),
    "half-agrees": studies.half_agrees,
    "curve-faster": lambda *recipes: f"{_curve(*recipes)[0]:.1f}",
    "curve-points": lambda *recipes: signed(_curve(*recipes)[1], form="+.1f")[0],
    "default-job": _default_job,
    # accuracy in bf16 minus accuracy in fp32: STUDY [ROW...], without these rows
    "precision-difference": lambda *of: studies.mean_and_error(studies.precision_differences(*of)),
    "precision-pairs": lambda *of: str(len(studies.precision_differences(*of))),
}
