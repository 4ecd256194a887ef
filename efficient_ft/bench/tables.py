"""Reports of benchmarks as text tables.

Ratios have one meaning: the recipe divided by the baseline, "× the time", "× the FLOPs". Below 1 is less.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from efficient_ft.core.text import table
from efficient_ft.record.environment import busy_note

FELT = (
    "growth over the size before the first step, in a process of its own; counted: peak of live tensors\n"
    "without model and batch, with the optimizer's state"
)
RATIOS = "milliseconds: median [quartiles]; ×: recipe / baseline, so 0.50× the time is half of it"


def report_text(report: Mapping[str, Any]) -> str:
    """The tables of a report, as a benchmark returned it or as a file in ``benchmarks`` holds it, and its notes."""
    kinds: dict[str, Callable[[Mapping[str, Any]], str]] = {
        "step": _step,
        "memory": _memory,
        "layer": _layer,
        "loop": _loop,
        "gradient": _gradient,
    }
    timed = report["kind"] != "gradient"
    busy = busy_note(report.get("environment", {})) if timed else None
    notes = [*report.get("notes", ()), *([busy] if busy else [])]
    return "\n".join([kinds[report["kind"]](report), *(f"note: {note}" for note in notes)])


def _step(report: Mapping[str, Any]) -> str:
    recipes, batch = report["recipes"], report["batch"]
    base = recipes[report["baseline"]]["executed"]
    felt = any("process" in record for record in recipes.values())
    rows = [
        [
            *("recipe", "backward ms", "× the time", "whole step ms", "× the time", "forward ms"),
            *("frozen prefix ms", "its bare inference ms", "backward MFLOPs", "× the FLOPs", "saved MiB", "peak MiB"),
            *(("process MiB", "felt / counted") if felt else ()),
        ]
    ]
    rounds = 0
    for name, record in recipes.items():
        parts, count = record["measured"], record["executed"]
        rounds = len(parts["step"]["seconds"])
        rows.append(
            [
                *(name, _ms(parts["backward"]), _time_ratio(parts["backward"])),
                *(_ms(parts["step"]), _time_ratio(parts["step"]), _ms(parts["forward"])),
                *(_ms(parts[part]) if part in parts else "–" for part in ("prefix", "prefix inference")),
                f"{count['backward_flops'] / 1e6:.0f}",
                _ratio(count["backward_flops"], base["backward_flops"]),
                f"{count['saved_bytes'] * batch / 2**20:.1f}",
                f"{record['peak_bytes'] / 2**20:.0f}" if "peak_bytes" in record else "–",  # absent in old records
                *(_felt(record.get("process")) if felt else ()),
            ]
        )
    attention = ", unfused attention" if report.get("attention") == "unfused" else ""
    title = f"{report['model']}, batch {batch}, {report['dtype']}{attention}, {rounds} rounds;"
    explained = f"{RATIOS};\nMFLOPs (per image) and MiB (of the batch) are executed ones"
    if felt:
        explained += f";\nprocess MiB: {FELT}"
    return f"{title} baseline: {report['baseline']}\n{explained}\n\n{table(rows)}"


def _felt(record: Mapping[str, Any] | None) -> list[str]:
    """The growth of a recipe's process and its ratio to the count of the same things."""
    if record is None:
        return ["–", "–"]
    growth, counted = record["felt"]["growth_bytes"], record["counted_bytes"]
    return [_mib(growth), f"{growth / counted:.2f}×" if counted else "–"]


def _memory(report: Mapping[str, Any]) -> str:
    measured = {name: record for name, record in report["recipes"].items() if "felt" in record}
    device = any(record["felt"]["device"] for record in measured.values())
    rows = [
        [
            *("recipe", "interpreter", "with model", "before steps", "counted peak"),
            *(("allocated", "reserved") if device else ()),
            *("growth", "growth / counted", "step ms"),
        ]
    ]
    for name, record in report["recipes"].items():
        if name not in measured:
            rows.append([name, *["–"] * (len(rows[0]) - 1)])
            continue
        felt = record["felt"]
        sizes = (record["interpreter_bytes"], record["with_model_bytes"], felt["before_bytes"])
        rows.append(
            [
                *(name, *map(_mib, sizes), _mib(record["counted_bytes"])),
                *((_mib(felt["device"][key]) for key in ("allocated_bytes", "reserved_bytes")) if device else ()),
                *(*_felt(record), f"{record['step_seconds'] * 1e3:.0f}"),
            ]
        )
    about = [report["dtype"], *sorted({record["optimizer"] for record in measured.values()})]
    about += ["unfused attention"] if report["attention"] == "unfused" else []
    where = (
        "what PyTorch reserves of the device, without model and batch"
        if device
        else "of the process " + FELT.removeprefix("growth ")
    )
    return (
        f"{report['model']}, batch {report['batch']}, {', '.join(about)}; MiB\n"
        "interpreter, with model: resident memory of the process; before steps: with the compiler of packing kernels\n"
        f"growth: {where}\n\n{table(rows)}"
    )


def _layer(report: Mapping[str, Any]) -> str:
    texts = [RATIOS]
    for shape, functions in report["shapes"].items():
        exact = functions["exact"]["backward_flops"]
        rows = [
            ["", "backward ms", "× the time", "backward MFLOPs / image", "× the FLOPs", "forward ms", "× the time"],
            *(
                [
                    *(name, _ms(of["measured"]["backward"]), _time_ratio(of["measured"]["backward"])),
                    *(f"{of['backward_flops'] / 1e6:.2f}", _ratio(of["backward_flops"], exact)),
                    *(_ms(of["measured"]["forward"]), _time_ratio(of["measured"]["forward"])),
                ]
                for name, of in functions.items()
            ),
        ]
        settings = ", ".join(str(report[name]) for name in ("dtype", "layout", "projector"))
        texts.append(f"{shape}, batch {report['batch']}, {settings}; baseline: exact\n{table(rows)}")
        if all("profile" in of for of in functions.values()):
            texts.append(_layer_profile(report["peak_flops_per_second"], functions))
    return "\n\n".join(texts)


def _layer_profile(peak: float, functions: Mapping[str, Any]) -> str:
    """Where the time of the layer's backward passes goes."""
    rows = [["", "products ms", "GFLOP/s", "passes ms", "rest ms", "calls"]]
    for name, of in functions.items():
        profile = of["profile"]
        times = [f"{profile[part] * 1e3:.2f}" for part in ("products", "passes", "rest")]
        rows.append([name, times[0], f"{profile['rate'] / 1e9:.0f}", *times[1:], f"{profile['calls']:.0f}"])
    return (
        f"{table(rows)}\n"
        f"products: matrix products and convolutions (one of 1024³ reaches {peak / 1e9:.0f} GFLOP/s here); passes:"
        " other operators; rest: dispatch, Python; calls: of operators"
    )


def _percent(of: Mapping[str, float]) -> str:
    return f"{of['median']:.2f} % [{of['q1']:.2f}–{of['q3']:.2f}]"


def _loop(report: Mapping[str, Any]) -> str:
    texts = []
    for job, of in report["jobs"].items():
        model = "".join(f", {of[name]}" for name in ("model", "dtype") if name in of)
        rounds = len(of["framework"]["seconds"])
        names = [name for name in ("bare loop", "framework", "data wait") if name in of]
        lines = [table([["", "ms per step"], *([name, _ms(of[name])] for name in names)])]
        if over := of.get("overhead_percent"):
            lines.append(f"the framework adds {_percent(over)} per step")
        if waits := of.get("data_wait_percent"):
            lines.append(f"the data wait is {_percent(waits)} of the framework's step, without worker processes")
        baseline = "; baseline: bare loop" if over else ""
        texts.append("\n".join([f"{job}{model}, batch {of['batch']}, {rounds} rounds{baseline}", *lines]))
    return "\n\n".join(texts)


def _gradient(report: Mapping[str, Any]) -> str:
    rows = [["recipe", "cosine", "min", "max", "relative error", "saved MiB / image"]]
    for name, record in report["recipes"].items():
        cosine, error = record["cosine"]["blocks"], record["error"]["blocks"]
        saved = record["executed"]["saved_bytes"] / 2**20
        rows.append(
            [name, *(f"{cosine[k]:.4f}" for k in ("mean", "min", "max")), f"{error['mean']:.4f}", f"{saved:.3f}"]
        )
    height, width = report["size"]
    return (
        f"{report['model']}, {height}×{width}, {report['batches']} batches of {report['batch']}: gradients of the"
        f" blocks' trained parameters, compared with the exact ones\n\n{table(rows)}"
    )


def _mib(value: float) -> str:
    return f"{value / 2**20:.0f}"


def _ms(value: Mapping[str, float]) -> str:
    return f"{value['median'] * 1e3:.1f} [{value['q1'] * 1e3:.1f}–{value['q3'] * 1e3:.1f}]"


def _time_ratio(value: Mapping[str, Any]) -> str:
    """Recipe / baseline, from the record's median of baseline / recipe."""
    return f"{1 / value['times_faster']['median']:.2f}×" if "times_faster" in value else ""


def _ratio(value: float, base: float) -> str:
    return f"{value / base:.2f}×" if base else "–"
