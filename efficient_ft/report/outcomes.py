"""Sections of the page of a run with the results of classes and of individual samples, for each kind of task."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from efficient_ft.config import Config, data_configs
from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line, spelled
from efficient_ft.data import missing_data
from efficient_ft.record import predictions
from efficient_ft.record.class_results import confusions, precisions, recalls
from efficient_ft.record.predictions import SHOWN, SamplePredictions, read_predictions
from efficient_ft.record.results import Results, images_digest
from efficient_ft.report.html import Cell, html_table, image, notes, thumbnail
from efficient_ft.report.svg import calibration, matrix, scatter
from efficient_ft.task import TASKS
from efficient_ft.training.kinds.base import RunData
from efficient_ft.training.kinds.registry import kind_of
from efficient_ft.training.output import export
from efficient_ft.training.output.class_table import METRICS, final_split
from efficient_ft.training.output.extremes import Extreme, extreme_samples
from efficient_ft.training.output.predict_masks import EXAMPLES

#: Number of confusions in the list next to the confusion matrix, and of scatter plots.
_CONFUSIONS, _TARGETS = 30, 4
#: Titles and descriptions of the selections of samples.
_SELECTIONS = {
    "mispredictions": ("Worst mispredictions", "The wrong predictions with the highest probability."),
    "least_certain": ("Least certain predictions", "The predictions with the lowest probability."),
    "wrong_labels": ("Most wrong labels", "The predictions with the most missing or wrongly predicted labels."),
    "largest_errors": ("Largest errors", "Each error is divided by the standard deviation of its target."),
}


def outcome_sections(run: Path, config: Config, results: Results) -> tuple[list[tuple[str, str]], list[str]]:
    """Return the titles and contents of the sections about predictions, and notes on missing parts.

    Raises:
        UserError: If predictions.npz is damaged or does not match the results.
    """
    sample = TASKS[config.task].sample if config.task in TASKS else "sample"
    recorded, sections = read_predictions(run), []
    data, spec, missing = (None, None, "") if not recorded else _opened(run, config, results)
    every: Mapping[str, Any] = results["data"]
    for task, found in (every.get("tasks") or {"": every}).items():
        title = f" of {task}" if task else ""
        names = results["data"].get("summary", {}).get(task, {}).get("class_names", [])
        split = final_split(found["accuracy"]) or "val"
        scores, samples = found.get("scores", {}).get(split, {}), recorded.get(task, {}).get(split)
        if split in found.get("classes", {}):
            text = classes_html(found["classes"][split], names, scores, split, sample)
            sections.append((f"Classes{title}", text))
        if split in found.get("labels", {}):
            sections.append((f"Labels{title}", _labels(found["labels"][split], names, scores, split, sample)))
        if "iou" in scores:
            sections.append((f"Classes{title}", _overlaps(run, scores, split)))
        if samples is not None and "target" in samples:
            if len(names) != samples["target"].shape[1]:
                file = run / predictions.NAME
                raise UserError(f"The file {file} is damaged: it does not match the results. Repeat the run.")
            sections.append((f"Targets{title}", _targets(samples, names, scores, split)))
        if samples is not None:
            text, missing = _samples(data, spec, missing, task, split, samples, sample)
            if text:
                sections.append((f"Individual {sample}s{title}", text))
    return sections, [missing] if missing else []


def classes_html(
    results: Mapping[str, Any], names: Sequence[str], scores: Mapping[str, float], split: str, sample: str
) -> str:
    """Return the table of classes, the confusion matrix and the calibration of a `record.class_results.ClassResults`.

    `scores` contains the metrics of the split, and `sample` is the noun for a sample.
    """
    recall, precision, pairs = recalls(results), precisions(results), confusions(results)
    often = {one.true: one for one in reversed(pairs)}
    header: list[Cell] = ["class", f"{sample}s", "accuracy (recall)", "precision", "F1", "most frequent confusion"]
    rows = [header]
    for index, name in enumerate(names):
        right, total = results["correct"][index], results["support"][index] + results["predicted"][index]
        mistake = f"{names[often[index].predicted]} ({often[index].samples})" if index in often else ""
        rows.append([name, _count(results["support"][index]), _share(recall.get(index)), _share(precision.get(index)),
                     _share(2 * right / total if total else None), mistake])  # fmt: skip
    metrics = [(METRICS.get(key, key), format_percent(scores[key])) for key in scores]
    frequent: list[list[Cell]] = [["true class", "predicted class", f"{sample}s", "of the class"]]
    for true, predicted, number in pairs[:_CONFUSIONS]:
        frequent.append([names[true], names[predicted], _count(number), _share(number / results["support"][true])])
    cells = {key: results[key] for key in ("support", "correct", "confusions")}
    cells["names"] = list(map(plain_line, names))
    data = json.dumps(cells, ensure_ascii=False).replace("<", "\\u003c")
    more = f" The {_CONFUSIONS} largest of {len(pairs)} confusions are listed." if len(pairs) > _CONFUSIONS else ""
    error = format_percent(scores["calibration_error"])
    bins = results["calibration"]
    confident: list[list[Cell]] = [["probability", f"{sample}s", "accuracy", "mean probability"]]
    for number, size in enumerate(bins["samples"]):
        if size:
            span = "–".join(f"{100 * edge / len(bins['samples']):.0f}" for edge in (number, number + 1)) + " %"
            confident.append([span, str(size), *(_share(bins[key][number]) for key in ("accuracy", "confidence"))])
    return (
        _metrics(metrics, split)
        + f"<h3>Results of each class</h3>{html_table(rows, 'Results of each class', words=(0, 5), sort=True)}"
        "<h3>Confusion matrix</h3>"
        f'<p class="note">Rows are true classes, and columns are predicted classes. Darker entries have a larger share'
        f" of their row. To read an entry, point at it, or focus the matrix and press the arrow keys.{more}</p>"
        f'<div class="pair"><div class="matrix"><div class="wide" role="application" tabindex="0" '
        f'aria-label="Confusion matrix. The arrow keys move between entries.">{matrix(results, names)}</div>'
        '<output aria-live="polite">No entry is selected.</output>'
        f'<script type="application/json">{data}</script></div>'
        "<div><h4>Largest confusions</h4>"
        f"{html_table(frequent, 'Largest confusions', words=(0, 1), sort=True)}</div></div>"
        f"<h3>Calibration</h3><p>The expected calibration error (15 bins) is {error}. Bars show the accuracy of the"
        " predictions in each bin of the probability. The dashed line shows perfect calibration.</p>"
        f'<div class="pair">{calibration(bins["samples"], bins["accuracy"], error)}'
        f"<div>{html_table(confident, 'Calibration')}</div></div>"
    )


def _labels(
    results: Mapping[str, Any], names: Sequence[str], scores: Mapping[str, float], split: str, sample: str
) -> str:
    rows: list[list[Cell]] = [["label", f"{sample}s", "average precision", "F1", "precision", "recall"]]
    columns = (results[key] for key in ("support", "predicted", "correct", "average_precision"))
    for name, support, predicted, correct, average in zip(names, *columns, strict=True):
        total = support + predicted
        parts = (2 * correct / total if total else None, correct / predicted if predicted else None)
        recall = correct / support if support else None
        rows.append([name, _count(support), *map(_share, (average, *parts, recall))])
    metrics = [(spelled(key), format_percent(value)) for key, value in scores.items()]
    return _metrics(metrics, split) + html_table(rows, "Results of each label", sort=True)


def _overlaps(run: Path, scores: Mapping[str, Any], split: str) -> str:
    rows: list[list[Cell]] = [["class", "IoU"], *([name, _share(value)] for name, value in scores["iou"].items())]
    metrics = [(spelled(key), format_percent(value)) for key, value in scores.items() if key != "iou"]
    text = _metrics(metrics, split) + html_table(rows, "IoU of each class", sort=True)
    file = run / EXAMPLES
    if file.is_file() and not file.is_symlink():  # A link may refer to a private file.
        alt = "Images, the masks of the images, and the predicted masks."
        text += f"<figure>{image(file.read_bytes(), 'png', alt)}<figcaption>{alt}</figcaption></figure>"
    return text


def _targets(samples: SamplePredictions, names: Sequence[str], scores: Mapping[str, float], split: str) -> str:
    parts = ((*key.partition("_"), value) for key, value in scores.items())
    metrics = [(f"{spelled(metric)} {plain_line(target)}", f"{value:.4g}") for metric, _, target, value in parts]
    pairs = zip(names, samples["target"].T, samples["predicted"].T, strict=True)
    plots = [scatter(plain_line(name), *values) for name, *values in list(pairs)[:_TARGETS]]
    return _metrics(metrics, split) + f'<div class="charts">{"".join(plots)}</div>'


def _metrics(metrics: Sequence[tuple[str, str]], split: str) -> str:
    values = "".join(f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>" for name, value in metrics)
    note = f"Results on the {split} split, with the weights of the best epoch."
    return f'{notes([note])}<dl class="tiles">{values}</dl>'


def _opened(run: Path, config: Config, results: Results) -> tuple[RunData | None, InputSpec | None, str]:
    """Return the data of a run and the input of its network, or the reason if the data are missing or have changed."""
    reason = "{} The page therefore shows no individual samples."
    try:
        if absent := [text for one in data_configs(config) if (text := missing_data(one)) is not None]:
            return None, None, reason.format(absent[0])
        spec = export.load(run).input
        data = kind_of(config).open(config, spec)
    except UserError as error:
        return None, None, reason.format(error)
    if images_digest(data.report()) != images_digest(results["data"]):
        return None, None, reason.format("The data have changed since the run.")
    return data, spec, ""


def _samples(
    data: RunData | None,
    spec: InputSpec | None,
    missing: str,
    task: str,
    split: str,
    samples: SamplePredictions,
    sample: str,
) -> tuple[str, str]:
    """Return the section with individual samples, and the reason if there is no such section."""
    if data is None or spec is None:
        return "", missing
    try:
        found = extreme_samples(data.parts[task], spec, split, samples)
    except UserError as error:
        return "", f"{error} The page therefore shows no individual samples."
    names = sorted({name for group in found.values() for one in group for name in (one.label, one.predicted)})
    parts = []
    if "label" in samples:
        options = "".join(f'<option value="{number}">{escape(name)}</option>' for number, name in enumerate(names))
        parts.append(
            f'<p><label>Show only samples with the true or predicted class <select class="filter"><option value="">all'
            f' classes</option>{options}</select></label> <output aria-live="polite"></output></p>'
        )
    for selection, group in found.items():
        title, about = _SELECTIONS[selection]
        empty = "" if group else f" All {sample}s are predicted correctly."
        figures = "".join(_figure(one, names) for one in group)
        parts.append(f'<h3>{title}</h3><p class="note">{about}{empty}</p><div class="samples">{figures}</div>')
    note = f"Each list shows at most {SHOWN} {sample}s of the {split} split, as the network receives them."
    return notes([note]) + f'<div class="filtered">{"".join(parts)}</div>', ""


def _figure(one: Extreme, names: Sequence[str]) -> str:
    classes = " ".join(str(names.index(name)) for name in dict.fromkeys((one.label, one.predicted)))
    content = (
        f'<p class="text">{escape(plain_line(one.content[:400]))}</p>'
        if isinstance(one.content, str)
        else thumbnail(one.content, one.caption)
    )
    mark = "" if not one.probability else "✓ " if one.correct else "✗ "
    lines = (("true", one.label), ("predicted", one.predicted), ("probability", one.probability.replace(" ", "\u00a0")))
    rows = "".join(f"<div><dt>{key}</dt> <dd>{mark if key == 'predicted' else ''}{escape(value)}</dd></div>"
                   for key, value in lines if value)  # fmt: skip
    return f'<figure data-classes="{classes}">{content}<figcaption><dl>{rows}</dl></figcaption></figure>'


def _share(value: float | None) -> Cell:
    return ("–", None) if value is None else (format_percent(value, digits=1), value)


def _count(value: int) -> Cell:
    return (f"{value:,}", float(value))
