"""Sections of the page of a run about its training: final metric, command, curves, costs and memory."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from html import escape
from pathlib import Path
from typing import Any, cast

import numpy as np

from efficient_ft.config import Config
from efficient_ft.core.format import (
    NOT_IN_PERCENT,
    format_bytes,
    format_metric,
    format_number,
    format_percent,
    format_seconds,
)
from efficient_ft.core.text import plain_line, spelled
from efficient_ft.record.predictions import SamplePredictions, read_predictions
from efficient_ft.record.results import Results, final_accuracy
from efficient_ft.record.rows import MetricsFile
from efficient_ft.report.html import definitions, html_table
from efficient_ft.report.svg import Line, line_chart
from efficient_ft.task import TASKS
from efficient_ft.training.output.console import cost_rows, memory_rows

#: Number of bootstrap samples of the interval of R².
_RESAMPLED = 1000


def headline(run: Path, config: Config, results: Results) -> str:
    """Return the final metric with its uncertainty, and the command that repeats the run."""
    accuracy, data = results["accuracy"], results["data"]
    metric, split = accuracy.get("metric", "accuracy"), "val" if accuracy["test"] is None else "test"
    split = accuracy["split"] if accuracy["test"] is None else split
    sample = TASKS[config.task].sample if config.task in TASKS else "sample"
    value, form = final_accuracy(accuracy), partial(format_metric, metric=metric)
    about = "The 95 % interval covers the sampling of the evaluated {}s, but not the differences between seeds."
    counts, samples = data.get("classes", {}).get(split), read_predictions(run).get("", {}).get(split)
    mean = " (mean of the tasks)" if config.tasks else ""
    if counts is not None:
        total = sum(counts["support"])
        low, high = wilson_interval(sum(counts["correct"]), total)
        size = f"95 % interval {form(low)} to {form(high)}, {total:,} {sample}s"
    elif samples is not None and "target" in samples:
        low, high = bootstrap_interval(samples)
        size = f"95 % interval {form(low)} to {form(high)}, {len(samples['target']):,} {sample}s"
    else:
        size = f"{data.get('splits', {}).get(split, 0):,} {sample}s" if "splits" in data else ""
        about = f"No interval is computed for the {spelled(metric)}."
    chosen = f" The best epoch was selected on these {sample}s, so the value is too optimistic."
    about = about.format(sample) + (chosen if accuracy["split"] == split else "")
    result = (
        f'<p class="result"><span>{escape(spelled(metric))} on the {split} split{mean}</span> <strong>{form(value)}'
        f'</strong> <span>{escape(size)}</span></p><p class="note">{escape(about)}</p>'
    )
    arguments = " ".join(map(shlex.quote, results["arguments"]))
    if not arguments:
        return result + '<p class="note">The run was started from Python. config.yaml contains its settings.</p>'
    command = f'<pre tabindex="0" aria-label="Command"><code>efficient-ft {escape(plain_line(arguments))}</code></pre>'
    return f"{result}<p>This command repeats the run:</p>{command}"


def further_facts(config: Config, results: Results) -> dict[str, str]:
    """Return a mapping from titles to facts about the training of a finished run."""
    trained, total, optim = results["trainable_parameters"], results["total_parameters"], config.optim
    share = f"{format_number(trained)} of {format_number(total)} ({format_percent(trained / total)})"
    splits = results["data"].get("splits", {})
    size, environment = config.model.image_size, results["environment"]
    recipe = next((text.partition("=")[2] for text in results["arguments"] if text.startswith("recipe=")), None)
    return {
        "Trained parameters": share,
        **({"Samples": ", ".join(f"{count:,} {name}" for name, count in splits.items())} if splits else {}),
        **({"Input size": f"{size} px"} if size else {}),
        **({"Recipe": recipe} if recipe else {}),
        "Optimization": f"{optim.name}, learning rate {optim.lr:g}, weight decay {optim.weight_decay:g},"
        f" {results['totals']['steps']:,} steps, batch size {config.data.batch_size}, seed {config.seed}",
        "Precision": str(environment.get("precision", config.trainer.precision)),
        "Environment": ", ".join(f"{name} {environment[key]}" for name, key in (("efficient-ft", "efficient_ft"),
                                 ("PyTorch", "torch")) if key in environment)
        + f", {environment.get('device')}, {environment.get('date')}",
    }  # fmt: skip


def curves(run: Path, metric: str) -> str:
    """Return charts of the loss, the metric, the learning rate and the memory, and a table of the epochs."""
    rows = MetricsFile(run).read()
    if not rows:
        return ""
    words = ("val", "test")
    charts: list[tuple[str, list[Line], Callable[[float], str], str]] = []
    loss = "train_loss" if any("train_loss" in row for row in rows) else "train_loss_epoch"
    losses = [_line(rows, "train", loss), *(_line(rows, split, f"{split}_loss") for split in words)]
    charts.append(("Loss", losses, "{:.4g}".format, ""))
    found = []
    for split in words:
        found.append(_line(rows, f"{split} {spelled(metric)}", f"{split}_{metric}"))
        if metric == "accuracy":
            found.append(_line(rows, f"{split} balanced accuracy", f"{split}_balanced_accuracy"))
        tasks = f"{split}_accuracy_"
        found += [_line(rows, key.removeprefix(tasks), key) for key in rows[-1] if key.startswith(tasks)]
    name, form = spelled(metric), "{:.4g}".format if metric in NOT_IN_PERCENT else _percent
    charts.append((name.capitalize() if name.islower() else name, found, form, ""))
    charts.append(("Learning rate", [_line(rows, "highest of all parameter groups", "lr")], "{:.3g}".format, ""))
    used = _line(rows, "in use", "memory_bytes")
    memory = [used._replace(y=[value / 2**20 for value in used.y])]
    note = "Memory of the process, or reserved memory of the GPU, at each row of metrics.jsonl."
    charts.append(("Memory", memory, lambda mebibytes: format_bytes(mebibytes * 2**20), note))
    figures = [
        line_chart(title, "optimizer step", kept, form, note, zero=title == "Memory")
        for title, lines, form, note in charts
        if (kept := [one for one in lines if one.x])
    ]
    epochs = [row for row in rows if "train_loss_epoch" in row]
    columns = {"epoch": "epoch", "step": "step", "train_loss_epoch": "train loss"}
    columns |= {f"{split}_{key}": f"{split} {spelled(key)}" for split in words for key in ("loss", metric)}
    shown = [key for key in columns if any(key in row for row in epochs)]
    cells = [[_number(row[key], key, metric) if key in row else "" for key in shown] for row in epochs]
    table = html_table([[columns[key] for key in shown], *cells], "Epochs", words=())
    details = f"<details><summary>Table of the epochs</summary>{table}</details>"
    return f'<div class="charts">{"".join(figures)}</div>{details}'


def costs(config: Config, results: Results) -> str:
    """Return tables of the cost of a step, of the memory, and of the totals of the run."""
    sample = TASKS[config.task].sample if config.task in TASKS else "sample"
    batch, totals, plain = config.data.batch_size, results["totals"], cast("dict[str, Any]", results)
    rows = cost_rows(plain["cost"], "+".join(config.method), batch, sample)
    baseline = "" if len(rows[0]) > 2 else (
        '<p class="note">The costs are not compared with a baseline, because cost.baseline is not set or its costs are'
        " equal.</p>"
    )  # fmt: skip
    whole = [
        ["whole training", ""],
        ["steps", f"{totals['steps']:,}"],
        [f"{sample}s", f"{totals['images']:,}"],
        ["forward and backward passes", format_number(totals["flops"], "FLOPs")],
        ["time, including evaluation", format_seconds(totals["seconds"])],
        *([] if totals["joules"] is None else [["energy", format_number(totals["joules"], "J")]]),
    ]
    tables = [html_table(rows, "Cost of a training step"), html_table(whole, "Whole training")]
    if "memory" in plain:
        tables.append(html_table(memory_rows(plain["memory"], batch), "Memory"))
    return f'{baseline}<div class="tables">{"".join(tables)}</div>'


def methods(results: Results) -> str:
    """Return the changes that each method made, or an empty string if the run has no reports of methods."""
    facts = {name: one["summary"] for name, one in results["methods"].items() if one.get("summary")}
    return definitions(facts) if facts else ""


def wilson_interval(correct: int, total: int) -> tuple[float, float]:
    """Return the 95 % Wilson score interval of a fraction."""
    z, share = 1.959964, correct / total
    center, width = share + z * z / (2 * total), z * (share * (1 - share) / total + z * z / (4 * total**2)) ** 0.5
    scale = 1 + z * z / total
    return max((center - width) / scale, 0.0), min((center + width) / scale, 1.0)


def bootstrap_interval(samples: SamplePredictions) -> tuple[float, float]:
    """Return the 95 % bootstrap interval of R² for the predictions of a regression."""
    generator, true, predicted = np.random.default_rng(0), samples["target"], samples["predicted"]
    found = []
    for _ in range(_RESAMPLED):
        drawn = generator.integers(len(true), size=len(true))
        one, other = true[drawn].astype(np.float64), predicted[drawn]
        spread = ((one - one.mean(0)) ** 2).sum(0)
        found.append((1 - ((one - other) ** 2).sum(0) / np.where(spread > 0, spread, np.inf)).mean())
    low, high = np.quantile(found, (0.025, 0.975)).tolist()
    return low, high


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _line(rows: Sequence[Mapping[str, Any]], name: str, key: str) -> Line:
    points = [(row["step"], row[key]) for row in rows if isinstance(row.get(key), int | float)]
    return Line(name, [x for x, _ in points], [y for _, y in points])


def _number(value: float, key: str, metric: str) -> str:
    return format_metric(value, metric) if key.endswith(metric) else f"{value:.4g}"
