"""Metrics of class predictions, computed in float64 from counts. This module imports only NumPy."""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

#: Number of equally wide bins of the confidence in `reliability`, as in Guo et al. (2017).
BINS = 15
#: The top-k accuracy is computed for this value of k if there are more than k classes.
TOP = 5


class Outcomes(NamedTuple):
    """Predictions for N samples, in the order of evaluation.

    Attributes:
        targets: true classes, int64 (N,).
        predicted: predicted classes, int64 (N,).
        confidence: probability of the predicted class, float64 (N,).
        in_top: True if the true class is one of the `TOP` most probable classes, bool (N,).
    """

    targets: np.ndarray
    predicted: np.ndarray
    confidence: np.ndarray
    in_top: np.ndarray

    @property
    def right(self) -> np.ndarray:
        """True for samples that are predicted correctly, bool (N,)."""
        found: np.ndarray = self.targets == self.predicted
        return found


def balanced_accuracy(correct: np.ndarray, support: np.ndarray) -> float:
    """Return the mean recall of the classes that occur in the targets.

    `correct` and `support` contain the numbers of correct predictions and of targets of each class, (C,).
    """
    present = support > 0
    return float((correct[present] / support[present]).mean()) if present.any() else 0.0


def macro_f1(correct: np.ndarray, support: np.ndarray, predicted: np.ndarray) -> float:
    """Return the mean F1 score of the classes that occur in the targets or in the predictions.

    `predicted` contains the number of predictions of each class, (C,). See `balanced_accuracy` for the other arguments.
    """
    total = support + predicted
    present = total > 0
    return float((2 * correct[present] / total[present]).mean()) if present.any() else 0.0


class Bins(NamedTuple):
    """The samples in each of `BINS` bins of the confidence: their number, mean accuracy and mean confidence.

    Bin b contains the samples with b / BINS < confidence <= (b + 1) / BINS. The means of an empty bin are 0.
    """

    samples: np.ndarray
    accuracy: np.ndarray
    confidence: np.ndarray

    def error(self) -> float:
        """Return the expected calibration error (Guo et al. 2017).

        The error is the mean of |accuracy - confidence| over the bins, weighted by the number of samples.
        """
        gaps = np.abs(self.accuracy - self.confidence)
        return float((self.samples * gaps).sum() / max(self.samples.sum(), 1))


def reliability(confidence: np.ndarray, correct: np.ndarray) -> Bins:
    """Group predictions by their confidence, float64 (N,). `correct` is True for correct predictions, bool (N,)."""
    numbers = np.clip(np.ceil(confidence * BINS).astype(np.int64) - 1, 0, BINS - 1)
    samples = np.bincount(numbers, minlength=BINS)
    least = np.maximum(samples, 1)
    means = (np.bincount(numbers, weights=of, minlength=BINS) / least for of in (correct, confidence))
    return Bins(samples, *means)
