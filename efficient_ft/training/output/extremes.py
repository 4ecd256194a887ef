"""Samples of a run that are shown with their predictions: mispredictions, uncertain predictions, and large errors."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from PIL import Image

from efficient_ft.core.errors import UserError
from efficient_ft.core.format import format_percent
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.core.text import plain_line
from efficient_ft.data.loader import LoadFailure
from efficient_ft.data.opened import OpenedData
from efficient_ft.record.predictions import SamplePredictions, selections


@dataclass(frozen=True)
class Extreme:
    """A sample with its prediction.

    Attributes:
        content: the image as the network receives it, or the text.
        label: name of the true class, or the true labels or values.
        predicted: name of the predicted class, or the predicted labels or values.
        probability: probability of the predicted class as a percentage, or an empty string for labels and values.
        correct: True if the predicted class is the true class.
    """

    content: Image.Image | str
    label: str
    predicted: str
    probability: str = ""
    correct: bool = False

    @property
    def caption(self) -> str:
        """The label and the prediction in one line."""
        return f"{self.label}, predicted {self.predicted}" + (f" ({self.probability})" if self.probability else "")


def extreme_samples(
    data: OpenedData[Any, Any], spec: InputSpec, split: str, samples: SamplePredictions
) -> Mapping[str, list[Extreme]]:
    """Load the samples of each selection (`record.predictions.selections`).

    `samples` contains the recorded predictions of the split, and `spec` describes the input of the network.

    Raises:
        UserError: If a sample cannot be loaded, or if its class differs from the recorded class.
    """
    dataset: Any = data.eval_loader("test" if split == "test" else "val").dataset
    names = [plain_line(name) for name in data.class_names]
    found: dict[str, list[Extreme]] = {}
    for selection, rows in selections(samples).items():
        found[selection] = []
        for row in rows:
            index = int(samples["index"][row])
            if index >= len(dataset):
                raise UserError(f"The {split} split has fewer {data.noun}s than the evaluation of the run.")
            loaded = dataset.__getitems__([(0, index)])  # one sample, because a batch would need more memory
            if isinstance(loaded, LoadFailure):
                raise UserError(loaded.message)
            (content,), (target,) = data.shown(loaded[0], spec), loaded[1]
            if "target" in samples:
                true, predicted = (
                    ", ".join(f"{name} {value:.4g}" for name, value in zip(names, samples[key][row], strict=True))
                    for key in ("target", "predicted")
                )
                found[selection].append(Extreme(content, true, predicted))
                continue
            if "labels" in samples:
                rows_of = [samples[key][row] for key in ("labels", "predicted")]
                if len(names) != len(rows_of[0]) or (target.numpy() > 0).tolist() != rows_of[0].tolist():
                    raise UserError(f"The {split} {data.noun}s differ from those of the evaluation of the run.")
                true, predicted = (
                    ", ".join(name for name, flag in zip(names, flags, strict=True) if flag) or "(no label)"
                    for flags in rows_of
                )
                found[selection].append(Extreme(content, true, predicted))
                continue
            label, guess = int(samples["label"][row]), int(samples["predicted"][row])
            if max(label, guess) >= len(names) or label != int(target):
                raise UserError(f"The {split} {data.noun}s differ from those of the evaluation of the run.")
            probability = format_percent(float(samples["probability"][row]), digits=1)
            found[selection].append(Extreme(content, names[label], names[guess], probability, label == guess))
    return found
