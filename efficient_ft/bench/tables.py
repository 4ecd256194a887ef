"""Format reports of benchmarks as text tables.

All ratios are recipe / baseline ("× the time", "× the FLOPs"). If a ratio is below 1, the recipe has the smaller value.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from efficient_ft.core.format import (
    format_bytes,
    format_digits,
    format_number,
    format_percent,
    format_ratio,
    format_seconds,
)
from efficient_ft.core.sheet import Cell, Column, render
from efficient_ft.core.text import paragraph, table
from efficient_ft.record.environment import busy_note

PROCESS_MEMORY = (
    "growth of the process memory since the start of the first step. Each recipe runs in a separate process. The"
    " counted value is the peak of the live tensors and the optimizer's state, without the model and the batch."
)
RATIOS = "Times in ms are medians [quartiles]. Ratios (×) are recipe / baseline: 0.50× means half the time."

#: Name, rank (see `core.sheet.Column`) and cells of each column.
_Columns = list[tuple[str, int, list[Cell]]]

_Format = Callable[[_Columns], str]


def report_text(report: Mapping[str, Any], columns: Sequence[str] = (), form: str = "text") -> str:
    """Return the tables and notes of a report.

    Args:
        report: Report of a benchmark, or contents of a file in ``benchmarks``.
        columns: Columns of the tables (see `core.sheet.render`). If `columns` is empty, the columns that fit the
            terminal are shown.
        form: Output format, one of `core.sheet.FORMS`.

    Raises:
        SettingError: If a column does not exist.
    """
    kinds: dict[str, Callable[[Mapping[str, Any], _Format], str]] = {
        "step": _step,
        "memory": _memory,
        "layer": _layer,
        "loop": _loop,
        "gradient": _gradient,
        "optimizer": _optimizer,
        "overhead": _overhead,
    }
    timed = report["kind"] != "gradient"
    busy = busy_note(report.get("environment", {})) if timed else None
    notes = [*report.get("notes", ()), *([busy] if busy else [])]
    shown = kinds[report["kind"]](report, partial(_table, chosen=columns, form=form))
    return "\n".join([shown, *(paragraph(f"note: {note}", "  ") for note in notes)])


def _table(columns: _Columns, chosen: Sequence[str], form: str) -> str:
    """Format a table with these columns, ordered by importance. The first column contains the names of the rows."""
    header = [name for name, _, _ in columns]
    shown = {name: Column(rank, words=number == 0) for number, (name, rank, _) in enumerate(columns)}
    rows = [list(row) for row in zip(*(cells for *_, cells in columns), strict=True)]
    return render(header, rows, form, columns=shown, chosen=chosen)


def _step(report: Mapping[str, Any], table_of: _Format) -> str:
    recipes, batch = report["recipes"], report["batch"]
    measured_process = any("process" in record for record in recipes.values())
    every = list(recipes.values())
    parts = [record["measured"] for record in every]
    counts = [record["executed"] for record in every]
    baselines = [record.get("baseline", report["baseline"]) for record in every]  # old records have one baseline
    bases = [recipes[name]["executed"] for name in baselines]
    flops: list[Cell] = [
        _ratio(of["backward_flops"], base["backward_flops"]) for of, base in zip(counts, bases, strict=True)
    ]

    def ms(part: str) -> list[Cell]:
        return [_ms(of[part]) if part in of else "–" for of in parts]

    columns: _Columns = [
        ("recipe", 0, list(recipes)),
        ("step ms", 0, ms("step")),
        ("× the step time", 0, [_time_ratio(of["step"]) for of in parts]),
        ("backward ms", 2, ms("backward")),
        ("× the backward time", 1, [_time_ratio(of["backward"]) for of in parts]),
        ("× the backward FLOPs", 1, flops),
        ("saved", 1, [format_bytes(of["saved_bytes"] * batch) for of in counts]),
        ("peak", 2, [format_bytes(of["peak_bytes"]) for of in every]),
    ]
    if measured_process:
        process = [_used(record.get("process")) for record in every]
        # present with --memory-steps
        columns += [("process", 0, [a for a, _ in process]), ("process / counted", 4, [b for _, b in process])]
    columns += [
        ("backward FLOPs / image", 3, [format_number(of["backward_flops"]) for of in counts]),
        ("forward ms", 3, ms("forward")),
        ("frozen prefix ms", 4, ms("prefix")),
        ("its bare inference ms", 5, ms("prefix inference")),
    ]
    attention = ", unfused attention" if report.get("attention") == "unfused" else ""
    rounds = len(parts[-1]["step"]["seconds"])
    title = f"{report['model']}, batch {batch}, {report['dtype']}{attention}, {rounds} rounds"
    explained = [
        f"{title}; baseline: {' and '.join(dict.fromkeys(baselines))}",
        RATIOS,
        "FLOPs and saved bytes (of the batch) are counted from the executed operations.",
    ]
    if measured_process:
        explained.append(f"process: {PROCESS_MEMORY}")
    return "\n".join([*map(paragraph, explained), "", table_of(columns)])


def _used(record: Mapping[str, Any] | None) -> tuple[str, str]:
    """Return the memory growth of a recipe's process, and the ratio of this growth to the counted bytes."""
    if record is None:
        return "–", "–"
    growth, counted = record["memory"]["growth_bytes"], record["counted_bytes"]
    return format_bytes(growth), format_ratio(growth / counted) if counted else "–"


def _memory(report: Mapping[str, Any], table_of: _Format) -> str:
    recipes = report["recipes"]
    measured = {name: record for name, record in recipes.items() if "memory" in record}
    device = any(record["memory"]["device"] for record in measured.values())

    def each(show: Callable[[Mapping[str, Any]], str]) -> list[Cell]:
        return [show(record) if name in measured else "–" for name, record in recipes.items()]

    columns: _Columns = [
        ("recipe", 0, list(recipes)),
        ("used by the steps", 0, each(lambda of: _used(of)[0])),
        ("counted peak", 0, each(lambda of: format_bytes(of["counted_bytes"]))),
        ("used / counted", 1, each(lambda of: _used(of)[1])),
        ("step time", 1, each(lambda of: format_seconds(of["step_seconds"]))),
    ]
    if device:
        columns += [
            (key, 1, each(lambda of, key=key: format_bytes(of["memory"]["device"][f"{key}_bytes"])))  # type: ignore[misc]
            for key in ("allocated", "reserved")
        ]
    columns += [
        ("interpreter", 3, each(lambda of: format_bytes(of["interpreter_bytes"]))),
        ("with model", 3, each(lambda of: format_bytes(of["with_model_bytes"]))),
        ("process memory before the steps", 2, each(lambda of: format_bytes(of["memory"]["before_bytes"]))),
    ]
    about = [report["dtype"], *sorted({record["optimizer"] for record in measured.values()})]
    about += ["unfused attention"] if report["attention"] == "unfused" else []
    reserved = "highest number of bytes that PyTorch reserves on the device, without the model and the batch."
    where = reserved if device else PROCESS_MEMORY
    explained = (
        f"{report['model']}, batch {report['batch']}, {', '.join(about)}",
        f"used by the steps: {where}",
        "The columns interpreter and with model show the resident memory before and after the model is built. The"
        " process memory before the steps also includes the compiler of the packing kernels.",
    )
    return "\n".join([*map(paragraph, explained), "", table_of(columns)])


def _layer(report: Mapping[str, Any], table_of: _Format) -> str:
    texts = [paragraph(RATIOS)]
    for shape, functions in report["shapes"].items():
        exact = functions["exact"]["backward_flops"]
        every = list(functions.values())
        columns: _Columns = [
            ("function", 0, list(functions)),
            ("backward ms", 0, [_ms(of["measured"]["backward"]) for of in every]),
            ("× the backward time", 0, [_time_ratio(of["measured"]["backward"]) for of in every]),
            ("× the backward FLOPs", 1, [_ratio(of["backward_flops"], exact) for of in every]),
            ("backward FLOPs / image", 3, [format_number(of["backward_flops"]) for of in every]),
            ("forward ms", 2, [_ms(of["measured"]["forward"]) for of in every]),
            ("× the forward time", 2, [_time_ratio(of["measured"]["forward"]) for of in every]),
        ]
        settings = ", ".join(str(report[name]) for name in ("dtype", "layout", "projector"))
        title = f"{shape}, batch {report['batch']}, {settings}; baseline: exact"
        texts.append(f"{paragraph(title)}\n{table_of(columns)}")
        if all("profile" in of for of in functions.values()):
            texts.append(_layer_profile(functions))
    return "\n\n".join(texts)


def _layer_profile(functions: Mapping[str, Any]) -> str:
    peak = functions["exact"]["profile"]["peak_flops_per_second"]
    rows = [["function", "products ms", "GFLOP/s", "passes ms", "rest ms", "calls"]]
    for name, of in functions.items():
        profile = of["profile"]
        times = [format_digits(profile[part] * 1e3, 3) for part in ("products", "passes", "rest")]
        rows.append([name, times[0], f"{profile['rate'] / 1e9:.0f}", *times[1:], f"{profile['calls']:.0f}"])
    below = (
        f"A matrix product of size 1024³ reaches {peak / 1e9:.0f} GFLOP/s on this machine. The columns show the time of"
        " matrix products and convolutions (products), the time of other operators (passes), the time of dispatch and"
        " Python (rest), and the number of operator calls (calls)."
    )
    return f"{table(rows)}\n{paragraph(below)}"


def _percent(of: Mapping[str, float]) -> str:
    median, low, high = (format_percent(of[part] / 100) for part in ("median", "q1", "q3"))
    return f"{median} [{low} to {high}]"


def _loop(report: Mapping[str, Any], table_of: _Format) -> str:
    texts = []
    for job, of in report["jobs"].items():
        model = "".join(f", {of[name]}" for name in ("model", "dtype") if name in of)
        rounds = len(of["framework"]["seconds"])
        names = [name for name in ("bare loop", "framework", "data wait") if name in of]
        lines = [table([["loop", "ms per step"], *([name, _ms(of[name])] for name in names)])]
        if over := of.get("overhead_percent"):
            lines.append(paragraph(f"The framework adds {_percent(over)} to the time of a step."))
        if waits := of.get("data_wait_percent"):
            lines.append(paragraph(f"Without workers, the data wait is {_percent(waits)} of a step."))
        baseline = "; baseline: bare loop" if over else ""
        title = paragraph(f"{job}{model}, batch {of['batch']}, {rounds} rounds{baseline}")
        texts.append("\n".join([title, *lines]))
    return "\n\n".join(texts)


def _gradient(report: Mapping[str, Any], table_of: _Format) -> str:
    every = list(report["recipes"].values())

    def cosine(of: str) -> list[Cell]:
        return [f"{record['cosine']['blocks'][of]:.4f}" for record in every]

    columns: _Columns = [
        ("recipe", 0, list(report["recipes"])),
        ("cosine", 0, cosine("mean")),
        ("min", 1, cosine("min")),
        ("max", 1, cosine("max")),
        ("relative error", 1, [f"{record['error']['blocks']['mean']:.4f}" for record in every]),
        ("saved / image", 1, [format_bytes(record["executed"]["saved_bytes"]) for record in every]),
    ]
    height, width = report["size"]
    title = (
        f"{report['model']}, {height}×{width}, {report['batches']} batches of {report['batch']} images. The table"
        " compares the gradients of the blocks' trained parameters with the exact gradients."
    )
    return f"{paragraph(title)}\n\n{table_of(columns)}"


def _optimizer(report: Mapping[str, Any], table_of: _Format) -> str:
    every = report["optimizers"]
    cases = next(iter(every.values()))["cases"]
    columns: _Columns = [("optimizer", 0, list(every))]
    for number, case in enumerate(cases):
        columns.append((case, number, [f"{format_digits(o['cases'][case]['largest'], 3)}×" for o in every.values()]))
    for case in cases:
        columns.append((f"error, {case}", 9, [f"{o['cases'][case]['error']:.3f}" for o in every.values()]))
    columns += [
        (f"last steps, {case}", 3, [f"{o['cases'][case]['size']:.2f}×" for o in every.values()]),
        ("bytes / value", 1, [f"{o['bytes_per_value']:.3f}" for o in every.values()]),
        ("step, ms", 2, [_ms(o["measured"]["step"]) for o in every.values()]),
    ]
    title = (
        f"The columns of the cases show the largest step divided by the largest step of {report['baseline']} on the"
        " same gradients. error: relative error of all steps. last steps: norm of the last tenth of the steps, divided"
        " by the norm for the baseline. step: time of a step for a parameter of shape 768×3072."
    )
    return f"{paragraph(title)}\n\n{table_of(columns)}"


def _overhead(report: Mapping[str, Any], table_of: _Format) -> str:
    recipes = report["recipes"]
    every, base = list(recipes.values()), recipes[report["baseline"]]["python_calls"]
    parts = [record["measured"] for record in every]
    columns: _Columns = [
        ("recipe", 0, list(recipes)),
        ("forward + backward ms", 0, [_ms(of["both"]) for of in parts]),
        ("× the time", 0, [_time_ratio(of["both"]) for of in parts]),
        ("× the forward time", 1, [_time_ratio(of["forward"]) for of in parts]),
        ("× the backward time", 1, [_time_ratio(of["backward"]) for of in parts]),
        ("× the Python calls", 2, [_ratio(record["python_calls"], base) for record in every]),
        ("Python calls", 3, [f"{record['python_calls']}" for record in every]),
        ("forward ms", 4, [_ms(of["forward"]) for of in parts]),
        ("backward ms", 4, [_ms(of["backward"]) for of in parts]),
    ]
    rounds = len(parts[-1]["both"]["seconds"])
    title = f"{report['model']}, batch {report['batch']}, {report['dtype']}, {rounds} rounds"
    explained = (
        f"{title}; baseline: {report['baseline']}",
        RATIOS,
        "The arithmetic of this network takes almost no time. The times show the overhead of operations.",
    )
    return "\n".join([*map(paragraph, explained), "", table_of(columns)])


def _ms(value: Mapping[str, float]) -> str:
    median, low, high = (format_digits(value[part] * 1e3, 3) for part in ("median", "q1", "q3"))
    return f"{median} [{low}–{high}]"


def _time_ratio(value: Mapping[str, Any]) -> str:
    """Return the ratio of times recipe / baseline, computed from the recorded median of the ratio baseline / recipe."""
    return format_ratio(1 / value["times_faster"]["median"]) if "times_faster" in value else ""


def _ratio(value: float, base: float) -> str:
    return format_ratio(value / base) if base else "–"
