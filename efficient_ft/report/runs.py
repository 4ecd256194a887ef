"""HTML page for several runs with a sortable table, plots of accuracy against costs, and training curves."""

from __future__ import annotations

import base64
import json
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

import numpy as np

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import NOT_IN_PERCENT
from efficient_ft.data.inspection import spread
from efficient_ft.record import collection
from efficient_ft.record.collection import (
    Collection,
    Run,
    heading,
    in_plain_numbers,
    metrics_of,
    notes,
    run_rows,
    varying,
)
from efficient_ft.record.config_file import NAME as CONFIG
from efficient_ft.record.files import write_text_atomically
from efficient_ft.record.results import final_accuracy
from efficient_ft.record.rows import MetricsFile
from efficient_ft.report.record import read
from efficient_ft.task import TASKS
from efficient_ft.training.output.predict_masks import EXAMPLES

#: Maximum number of points per curve. With this limit, a page with 200 runs opens without delay.
MAX_POINTS = 120

#: Maximum number of runs whose predictions are shown.
MAX_PICTURES = 20

#: Keys in metrics.jsonl that store the metric of a task, for all kinds of task.
METRICS = frozenset(f"{split}_{task.metric}" for split in ("val", "test") for task in TASKS.values())

#: Columns of `record.collection.run_rows` that are used for the x axes of accuracy plots.
COSTS = ("TFLOPs of the run", "backward MFLOPs/sample", "saved MiB/sample", "peak MiB", "seconds", "joules",
         "trainable M")  # fmt: skip


def write_runs_page(paths: Sequence[Path], out: Path) -> Path:
    """Write a page to `out` for all runs in `paths` and subfolders. Raise a `UserError` if a path contains no run."""
    found = collect_paths(paths)
    title = f"{len(found.runs)} runs" if len(found.runs) > 1 else names_of(found.runs)[0]
    roots = ", ".join(path.name or str(path) for path in paths)
    page = Template((files("efficient_ft.report") / "assets" / "runs.html").read_text(encoding="utf-8"))
    held = json.dumps(page_data(found), ensure_ascii=False, allow_nan=False)
    text = page.substitute(
        title=escape(f"{title}: {roots}"),
        about=escape(
            f"Accuracy is measured with the weights of the best epoch on {_splits(found)}. FLOPs and saved bytes are"
            " counted in executed steps."
        ),
        data=held.replace("<", "\\u003c"),  # names that contain </script> or <!-- would break the page
        pictures=_pictures(found.runs),
    )
    write_text_atomically(out / "report.html", text)
    return out / "report.html"


def _pictures(runs: Sequence[Run]) -> str:
    have = [
        (run, name)
        for run, name in zip(runs, names_of(runs), strict=True)
        # A link is not followed, because the link may refer to a private file.
        if (run.path / EXAMPLES).is_file() and not (run.path / EXAMPLES).is_symlink()
    ]
    if not have:
        return ""
    parts = ["<h2>Predictions</h2>"]
    for run, name in have[:MAX_PICTURES]:
        source = base64.b64encode((run.path / EXAMPLES).read_bytes()).decode()
        caption = f"{escape(name)}: test images, the masks of the images, and the predicted masks."
        parts.append(
            f'<figure><img src="data:image/png;base64,{source}" alt="{escape(name)}">\n'
            f"<figcaption>{caption}</figcaption></figure>"
        )
    if len(have) > MAX_PICTURES:
        shown = f"Pictures are shown for {MAX_PICTURES} of {len(have)} runs."
        parts.append(f"<p>{shown} The other pictures are files {EXAMPLES} in the run folders.</p>")
    return "\n".join(parts)


def collect_paths(paths: Sequence[Path]) -> Collection:
    """Return the finished runs in `paths` and their subfolders. Raise a `UserError` if no run has finished."""
    runs: list[Run] = []
    ignored: dict[str, str] = {}
    copies: dict[str, str] = {}
    seen: set[Path] = set()
    for path in paths:
        one = (path / CONFIG).is_file()
        found = collection.collect_runs(path.parent, [path]) if one else collection.collect(path)
        # Several folders may contain runs with the same name.
        base = path.parent if one else path
        several = len(paths) > 1
        new = [run for run in found.runs if run.path.resolve() not in seen]
        seen.update(run.path.resolve() for run in new)
        runs += [replace(run, folder=run.path.as_posix()) if several else run for run in new]
        ignored.update({(base / name).as_posix() if several else name: why for name, why in found.ignored.items()})
        copies.update({(base / a).as_posix() if several else a: (base / b).as_posix() if several else b
                       for a, b in found.copies.items()})  # fmt: skip
    if not runs:
        first = next(iter(ignored.values()), "")
        raise UserError(f"No finished run was found in {', '.join(map(str, paths))}. {first}".rstrip())
    kept, further = collection.without_copies(runs)
    return Collection(tuple(kept), ignored, copies | further)


def _splits(found: Collection) -> str:
    splits = {"test" if run.results["accuracy"]["test"] is not None else run.results["accuracy"]["split"]
              for run in found.runs}  # fmt: skip
    kinds = {run.results["config"].get("task", "classification") for run in found.runs}
    samples = {TASKS[name].sample if name in TASKS else "sample" for name in kinds}
    sample = samples.pop() if len(samples) == 1 else "sample"
    return " or ".join(f"the {split} {sample}s" for split in sorted(splits))


def page_data(found: Collection) -> dict[str, Any]:
    """Return the data that is embedded in the page as JSON."""
    header, table = run_rows(found)
    metrics = metrics_of(found.runs)
    plain = all(in_plain_numbers(run.results) for run in found.runs)
    factor = {one: "100 " if one in NOT_IN_PERCENT and not plain else "" for one in metrics}
    accuracy = " or ".join(f"{factor[one]}{heading(one)}" for one in metrics)
    words = header.index("split")
    names = names_of(found.runs)
    groups = {run.group: number for number, run in enumerate({run.group: run for run in found.runs}.values())}
    runs = []
    for run, row, name in zip(found.runs, table, names, strict=True):
        numbers = dict(zip(header, row, strict=True))
        runs.append(
            {
                "name": name,
                "data": run.data,
                "accuracy": accuracy_of(run) / (100 if plain else 1),
                "colour": groups[run.group],
                "numbers": {cost: numbers[cost] for cost in COSTS},
                "rows": _curve_rows(run.path, accuracy, 1 if plain else 100),
                "budgets": budgets_of(run.path),
            }
        )
    shown = [i for i in map(header.index, COSTS) if any(row[i] is not None for row in table)]
    columns = [*header[:words], accuracy, *(header[i] for i in shown)]
    return {
        "columns": columns,
        "words": words,
        "accuracy": accuracy,
        "table": [
            [*row[:words], one["accuracy"], *(row[i] for i in shown)] for row, one in zip(table, runs, strict=True)
        ],
        "runs": runs,
        "costs": [header[i] for i in shown],
        "curves": ["loss", accuracy],
        "axes": ["step", "epoch", "TFLOPs", "seconds", "images"],
        "notes": notes(found, means=False),
    }


def names_of(runs: Sequence[Run]) -> list[str]:
    """Return a name for each run.

    A name consists of the methods, the settings that differ between runs, and the seed. If the runs use several models
    or data sets, the name also contains the model or the data set.
    """
    models, data = {run.config.model.name for run in runs}, {run.data for run in runs}
    names = []
    for run, own in zip(runs, method_names(runs), strict=True):
        several = [name for name, of in ((run.config.model.name, models), (run.data, data)) if len(of) > 1]
        names.append(" ".join([own, *several, f"seed={run.config.seed}"]))
    return names


def method_names(runs: Sequence[Run], prefix: str = "") -> list[str]:
    """Return a name for each run.

    The name consists of the methods and of the settings in which runs with the same methods differ. Only settings that
    start with `prefix` are included.
    """
    alike: dict[str, list[Run]] = defaultdict(list)
    for run in runs:
        alike[run.method].append(run)
    settings = {method: [name for name in varying(same) if name.startswith(prefix)] for method, same in alike.items()}
    names = []
    for run in runs:
        flat = run.settings
        own = [f"{name.rpartition('.')[2]}={flat[name]}" for name in settings[run.method] if name in flat]
        names.append(" ".join([run.method, *own]))
    return names


def accuracy_of(run: Run) -> float:
    """Return the accuracy of a run in percent (see `final_accuracy`)."""
    return round(100 * final_accuracy(run.results["accuracy"]), 4)


def _curve_rows(folder: Path, accuracy: str, factor: float) -> list[dict[str, float]]:
    """Return the points of the training curves. The accuracy is multiplied by `factor`, and has the name `accuracy`.

    Each point contains the step, epoch, totals up to this step (TFLOPs, seconds, images), and loss or accuracy.
    """
    rows = MetricsFile(folder).read()
    windows = any("train_loss" in row for row in rows)  # Short runs log only the loss of epochs.
    points = []
    for every in rows:
        row = {key: value for key, value in every.items() if isinstance(value, int | float)}
        values = {
            "step": row.get("step"),
            "epoch": row.get("epoch"),
            "TFLOPs": None if row.get("flops") is None else row["flops"] / 1e12,
            "seconds": row.get("seconds"),
            "images": row.get("images"),
            "loss": row.get("train_loss") if windows else row.get("train_loss_epoch"),
            accuracy: next((factor * v for k, v in row.items() if k in METRICS), None),
        }
        points.append({key: float(f"{value:.5g}") for key, value in values.items() if value is not None})
    # The curves of loss and accuracy are thinned separately, because steps have many more rows than epochs.
    losses, accuracies = ([i for i, point in enumerate(points) if key in point] for key in ("loss", accuracy))
    best = max(accuracies, key=lambda i: points[i][accuracy], default=None)
    kept = {*_thinned(losses), *_thinned(accuracies), *(() if best is None else (best,))}
    return [point for i, point in enumerate(points) if i in kept]


def _thinned(places: Sequence[int]) -> list[int]:
    return [places[i] for i in spread(len(places), MAX_POINTS)]


def budgets_of(folder: Path) -> dict[str, Any] | None:
    """Return the recorded budgets of a run, or None if no budgets were recorded.

    The result contains the steps, the names of the blocks, and the budgets at each step.
    """
    try:
        record = read(folder)
    except UserError:  # not recorded
        return None
    if record.budgets is None:
        return None
    kept = spread(len(record.steps), MAX_POINTS)
    return {
        "steps": record.steps[kept].tolist(),
        "blocks": record.labels,
        "values": np.round(np.nan_to_num(record.budgets[kept]), 4).tolist(),
    }
