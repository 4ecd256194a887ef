"""Text and figures with the results of each class of a finished run (`record.class_results`)."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import numpy as np
from PIL import Image

from efficient_ft.core.format import format_percent
from efficient_ft.core.text import plain_line, shortened, table, terminal_width
from efficient_ft.record.class_results import confusion_matrix, confusions, precisions, recalls

#: Numbers of classes with the lowest recall and of confusions that are shown. If there are fewer, none are shown.
_WORST, _CONFUSED = 5, 3
#: Names of the metrics in the text.
METRICS = {
    "balanced_accuracy": "balanced accuracy",
    "macro_f1": "macro-F1",
    "top5_accuracy": "top-5 accuracy",
    "calibration_error": "calibration error",
}
#: Minimum width of the picture of a confusion matrix in pixels.
_SIDE = 512


def final_split(splits: Collection[str]) -> str | None:
    """Return the split of the final results: test, or val without test samples. The result is None without both."""
    return next((split for split in ("test", "val") if split in splits), None)


def class_names(data: Mapping[str, Any]) -> list[str]:
    """Return the names of the classes in a `record.results.DataReport`."""
    names: list[str] = data["summary"][""]["class_names"]
    return names


def class_lines(data: Mapping[str, Any], class_names: Sequence[str], sample: str) -> list[str]:
    """Return lines with the metrics, the worst classes and the most frequent confusions of a run.

    `data` contains the `scores` and `classes` of a `record.results.DataReport`, and `sample` is the noun for a sample.
    The lines describe the final split. The list is empty without class results.
    """
    split = final_split(data.get("classes", ()))
    if split is None:
        return []
    scores, results, names = data["scores"][split], data["classes"][split], [plain_line(name) for name in class_names]
    shown = [f"{name} {format_percent(scores[key])}" for key, name in METRICS.items() if key in scores]
    lines = [f"{split}: {', '.join(shown)}"]
    recall, precision = recalls(results), precisions(results)
    worst = sorted((value, index) for index, value in recall.items() if value < 1)[:_WORST]
    if len(worst) == _WORST:
        room = max(terminal_width() - 40, 10)
        rows = [[f"worst classes, {split}", "recall", "precision", f"{sample}s"]]
        for value, index in worst:
            of = format_percent(precision[index]) if index in precision else "–"
            rows.append([shortened(names[index], room), format_percent(value), of, str(results["support"][index])])
        lines += ["", table(rows)]
    pairs = confusions(results)[:_CONFUSED]
    if len(pairs) == _CONFUSED:
        room = max((terminal_width() - 30) // 2, 10)
        rows = [[f"largest confusions, {split}", f"{sample}s"]]
        for true, predicted, number in pairs:
            pair = f"{shortened(names[true], room)} → {shortened(names[predicted], room)}"
            rows.append([pair, f"{number} of {results['support'][true]}"])
        lines += ["", table(rows)]
    return lines


def matrix_picture(results: Mapping[str, Any]) -> Image.Image:
    """Return a picture of the confusion matrix of a split. Rows are true classes, and columns are predicted classes.

    The brightness of an entry is its share of the samples of the true class, from white (0) to dark blue (1).
    """
    matrix = confusion_matrix(results)
    shares = (matrix / np.maximum(matrix.sum(1, keepdims=True), 1))[..., None]
    pixels = np.rint(255 + shares * (np.array([8, 48, 107]) - 255)).astype(np.uint8)
    scale = max(1, -(-_SIDE // len(matrix)))
    return Image.fromarray(pixels.repeat(scale, 0).repeat(scale, 1))


def matrix_rows(results: Mapping[str, Any], names: Sequence[str]) -> list[list[Any]]:
    """Return the entries of the confusion matrix that are not 0, as rows (true class, predicted class, number)."""
    matrix = confusion_matrix(results)
    return [[names[true], names[predicted], int(matrix[true, predicted])] for true, predicted in np.argwhere(matrix)]
