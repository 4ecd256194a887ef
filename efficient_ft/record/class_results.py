"""Results of each class of a classifier in results.json: counts, confusions and calibration.

The file contains integer counts. The functions of this module compute recall, precision and the confusion matrix.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from typing_extensions import TypedDict

if TYPE_CHECKING:  # The help of the program imports this module, but not NumPy.
    import numpy as np


#: Entry of `ClassResults.confusions`.
_CONFUSION = re.compile(r"[0-9]{1,9}>[0-9]{1,9}:[0-9]{1,18}")


class Calibration(TypedDict):
    """The number, mean accuracy and mean confidence of the samples in each bin of the confidence.

    Bin b of B bins contains the samples with b / B < confidence <= (b + 1) / B, where the confidence is the probability
    of the predicted class. The means of an empty bin are 0.
    """

    samples: list[int]
    accuracy: list[float]
    confidence: list[float]


class ClassResults(TypedDict):
    """Results of a classifier on one split, indexed by class.

    `support` is the number of samples of each class, `predicted` is the number of samples that are predicted as each
    class, and `correct` is the number of samples of each class that are predicted correctly. The recall (accuracy) of a
    class is correct / support, and its precision is correct / predicted.

    `confusions` contains the entries of the confusion matrix that are neither 0 nor on the diagonal, as text:
    ``3>7:2 3>9:1`` means that two samples of class 3 are predicted as class 7, and one as class 9. The diagonal is
    `correct`.
    """

    support: list[int]
    predicted: list[int]
    correct: list[int]
    confusions: str
    calibration: Calibration


class LabelResults(TypedDict):
    """Results of a multi-label classifier on one split, indexed by label.

    `support` is the number of samples with each label, `predicted` is the number of samples for which each label is
    predicted, and `correct` is the number of samples with both. `average_precision` is None for labels without samples.
    """

    support: list[int]
    predicted: list[int]
    correct: list[int]
    average_precision: list[float | None]


class Confusion(NamedTuple):
    """The number `samples` of samples of class `true` that are predicted as the different class `predicted`."""

    true: int
    predicted: int
    samples: int


def class_results(
    targets: np.ndarray, predicted: np.ndarray, num_classes: int, bins: Sequence[np.ndarray]
) -> ClassResults:
    """Return the results for N samples.

    Args:
        targets, predicted: true and predicted class of each sample, int64 (N,).
        num_classes: number of classes.
        bins: number, mean accuracy and mean confidence of the samples in each bin of the confidence.
    """
    import numpy as np

    right = targets == predicted
    pairs, numbers = np.unique(targets[~right] * num_classes + predicted[~right], return_counts=True)
    entries = zip(*np.divmod(pairs, num_classes), numbers, strict=True)
    samples, accuracy, confidence = bins
    return {
        "support": np.bincount(targets, minlength=num_classes).tolist(),
        "predicted": np.bincount(predicted, minlength=num_classes).tolist(),
        "correct": np.bincount(targets[right], minlength=num_classes).tolist(),
        "confusions": " ".join(f"{true}>{guess}:{number}" for true, guess, number in entries),
        "calibration": {
            "samples": samples.tolist(),
            "accuracy": accuracy.round(6).tolist(),
            "confidence": confidence.round(6).tolist(),
        },
    }


def confusions(results: Mapping[str, Any]) -> list[Confusion]:
    """Return the confusions in a `ClassResults`, with the most frequent confusion first."""
    found = []
    for text in results["confusions"].split():
        pair, _, number = text.partition(":")
        true, _, predicted = pair.partition(">")
        found.append(Confusion(int(true), int(predicted), int(number)))
    return sorted(found, key=lambda one: (-one.samples, one.true, one.predicted))


def check_classes(results: Mapping[str, Any], num_classes: int) -> None:
    """Raise a `ValueError` if the counts of a `ClassResults` contradict each other or the number of classes."""
    check_labels(results, num_classes)
    support, predicted, correct = (results[key] for key in ("support", "predicted", "correct"))
    if not sum(support):
        raise ValueError("the support of all classes is 0")
    if not all(_CONFUSION.fullmatch(text) for text in results["confusions"].split()):
        raise ValueError("confusions is not a list of entries such as 3>7:2")
    of_true, of_predicted = Counter(dict(enumerate(correct))), Counter(dict(enumerate(correct)))
    for one in confusions(results):
        of_true[one.true] += one.samples
        of_predicted[one.predicted] += one.samples
    for name, counts, expected in (("support", support, of_true), ("predicted", predicted, of_predicted)):
        if dict(enumerate(counts)) != dict(expected):
            raise ValueError(f"the sums of correct and confusions differ from {name}")
    if len({len(values) for values in results["calibration"].values()}) > 1:
        raise ValueError("the lists in calibration have different lengths")


def check_labels(results: Mapping[str, Any], num_labels: int) -> None:
    """Raise a `ValueError` if the counts of a `LabelResults` contradict each other or the number of labels."""
    for name, values in results.items():
        if isinstance(values, list) and len(values) != num_labels:
            raise ValueError(f"{name} has {len(values)} values, but class_names has {num_labels}")
    for support, predicted, correct in zip(*(results[k] for k in ("support", "predicted", "correct")), strict=True):
        if not 0 <= correct <= min(support, predicted):
            raise ValueError("correct is negative, or exceeds support or predicted")


def confusion_matrix(results: Mapping[str, Any]) -> np.ndarray:
    """Return the numbers of samples of each true class (rows) and predicted class (columns), int64 (C, C)."""
    import numpy as np

    matrix = np.diag(np.array(results["correct"], dtype=np.int64))
    for true, predicted, samples in confusions(results):
        matrix[true, predicted] = samples
    return matrix


def recalls(results: Mapping[str, Any]) -> dict[int, float]:
    """Return the recall of each class that occurs in the targets, keyed by class index."""
    pairs = zip(results["correct"], results["support"], strict=True)
    return {index: correct / support for index, (correct, support) in enumerate(pairs) if support}


def precisions(results: Mapping[str, Any]) -> dict[int, float]:
    """Return the precision of each class that occurs in the predictions, keyed by class index."""
    pairs = zip(results["correct"], results["predicted"], strict=True)
    return {index: correct / predicted for index, (correct, predicted) in enumerate(pairs) if predicted}
