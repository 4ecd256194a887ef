"""Predictions for the individual samples of a run, in the file ``predictions.npz``.

The arrays of a split have one row for each evaluated sample. The array `index` contains the indices of the samples in
the split, (N,). A classifier has the arrays `label` and `predicted` (classes, (N,)) and `probability` (of the predicted
class, float32 (N,)). Images with several labels have the arrays `labels` and `predicted` (bool (N, labels)). A
regression has the arrays `target` and `predicted` (float32 (N, targets)), in the units of the
user.
"""

from __future__ import annotations

import zipfile
import zlib
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from efficient_ft.core.errors import UserError
from efficient_ft.record.files import write_atomically
from efficient_ft.record.formats import START_AGAIN

if TYPE_CHECKING:  # The help of the program imports this package, but not NumPy.
    import numpy as np

NAME = "predictions.npz"
#: Number of samples that are shown of each selection.
SHOWN = 24

#: The arrays of a split by name.
SamplePredictions = Mapping[str, "np.ndarray"]


def write_predictions(run: Path, found: Mapping[str, Mapping[str, SamplePredictions]]) -> None:
    """Write the predictions of each task and split into the run folder. The task of a single data set is ``""``."""
    import numpy as np

    arrays: dict[str, Any] = {
        f"{task}/{split}/{name}": values.astype(np.min_scalar_type(values.max(initial=0)), copy=False)
        if values.dtype.kind in "iu"
        else values
        for task, splits in found.items()
        for split, one in splits.items()
        for name, values in one.items()
    }
    if arrays:
        write_atomically(run / NAME, lambda path: np.savez_compressed(path, **arrays))


def read_predictions(run: Path) -> dict[str, dict[str, dict[str, np.ndarray]]]:
    """Return the arrays of each task and split, or an empty dict if the file does not exist.

    Raises:
        UserError: If the file is damaged.
    """
    import numpy as np

    found: dict[str, dict[str, dict[str, np.ndarray]]] = {}
    try:
        with np.load(run / NAME, allow_pickle=False) as arrays:
            for key in arrays.files:
                task, split, name = key.rsplit("/", 2)
                found.setdefault(task, {}).setdefault(split, {})[name] = arrays[key]
    except FileNotFoundError:  # a kind without predictions of individual samples
        return {}
    except (OSError, ValueError, TypeError, EOFError, zipfile.BadZipFile, zlib.error) as error:
        raise UserError(f"The file {run / NAME} is damaged. {START_AGAIN}") from error
    for splits in found.values():
        for one in splits.values():
            if not _match(one):
                raise UserError(f"The file {run / NAME} is damaged: its arrays do not match. {START_AGAIN}")
    return found


#: Kinds of the dtypes and numbers of dimensions of the arrays of each kind of task, which is identified by its first
#: array.
_FORMS = (
    {"target": ("f", 2), "predicted": ("f", 2)},
    {"labels": ("b", 2), "predicted": ("b", 2)},
    {"label": ("iu", 1), "predicted": ("iu", 1), "probability": ("f", 1)},
)


def _match(samples: SamplePredictions) -> bool:
    """Return True if the arrays are those of a kind of task, and have rows for the same samples (at least one)."""
    form = next((form for form in _FORMS if next(iter(form)) in samples), None)
    if form is None:
        return False
    for name, (kinds, dims) in {"index": ("iu", 1), **form}.items():
        values = samples.get(name)
        if values is None or values.dtype.kind not in kinds or values.ndim != dims or not values.size:
            return False
        if values.dtype.kind == "i" and values.min() < 0:
            return False
    shapes = [samples[name].shape for name in form]
    return len({shape[0] for shape in shapes} | {len(samples["index"])}) == 1 and len(set(shapes)) == 1


def selections(samples: SamplePredictions) -> dict[str, np.ndarray]:
    """Return the rows of at most `SHOWN` samples of each selection, as int64 arrays.

    The selections of a classifier are ``mispredictions`` (wrong predictions with the highest probability) and
    ``least_certain`` (predictions with the lowest probability). The selection of images with several labels is
    ``wrong_labels`` (the largest number of labels that are missing or wrongly predicted). The selection of a regression
    is ``largest_errors``, where an error is divided by the standard deviation of its target. Samples with equal values
    keep their order.
    """
    import numpy as np

    if "target" in samples:
        errors = np.abs(samples["predicted"] - samples["target"])
        scaled = errors / np.maximum(samples["target"].std(0), np.finfo(np.float32).tiny)
        return {"largest_errors": np.argsort(-scaled.max(1), kind="stable")[:SHOWN]}
    if "labels" in samples:
        errors = (samples["labels"] != samples["predicted"]).sum(1)
        return {"wrong_labels": np.argsort(-errors, kind="stable")[: min(SHOWN, int((errors > 0).sum()))]}
    probability = samples["probability"]
    wrong = np.flatnonzero(samples["label"] != samples["predicted"])
    worst = wrong[np.argsort(-probability[wrong], kind="stable")]
    return {"mispredictions": worst[:SHOWN], "least_certain": np.argsort(probability, kind="stable")[:SHOWN]}
