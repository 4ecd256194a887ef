"""Contents of ``results.json``, which stores the results of a finished run in the run folder.

The types in this module describe the JSON objects, which are plain dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # Before Python 3.12, pydantic rejects typing.TypedDict.

from efficient_ft.config.schema import flatten as flatten
from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.class_results import ClassResults, LabelResults, check_classes, check_labels
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import START_AGAIN, USE_ITS_VERSION, check_format

NAME = "results.json"


class ExecutedCost(TypedDict):
    """Counted costs per image.

    These costs are the same on all machines. Four optional entries describe the whole batch: `step_peak_bytes` is the
    peak size of live tensors, without the model and the batch. `optimizer_bytes` is the size of the optimizer state.
    `model_bytes` is the size of the parameters and buffers, and is present if weights are stored in bfloat16.
    `ema_bytes` is the size of the averaged weights (``trainer.ema``).
    """

    forward_flops: float
    backward_flops: float
    saved_bytes: float
    step_peak_bytes: NotRequired[int]
    optimizer_bytes: NotRequired[float]
    model_bytes: NotRequired[float]
    ema_bytes: NotRequired[float]


class MeasuredCost(TypedDict):
    """Measured costs of a training step with the whole batch on this machine.

    `step_seconds` is the median time of a step, or None if no steps were timed. `peak_bytes` is the peak memory.
    """

    step_seconds: float | None
    peak_bytes: float


class StepCost(TypedDict):
    """The cost of a training step."""

    executed: ExecutedCost
    measured: MeasuredCost


class BaselineCost(StepCost):
    """The cost of a training step of the baseline `name` (``cost.baseline``).

    The baseline trains some or all parameters of the model without any other method.
    """

    name: str


class CostReport(StepCost):
    """The cost of a training step with the methods of the run.

    `baseline` is the cost of a training step of the baseline, or None if the baseline was not measured.
    """

    baseline: BaselineCost | None


class DeviceMemory(TypedDict):
    """Memory of a CUDA device, as reported by the allocator of PyTorch.

    `before_bytes` is the size of the memory allocated before the first step. `allocated_bytes` and `reserved_bytes` are
    the peaks of allocated and reserved memory during the steps.
    """

    before_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class MemoryReport(TypedDict):
    """Measured and counted memory of the first training process, in bytes.

    `peak_bytes` is the peak resident memory of the process until the results are written, as reported by the system.
    The peak includes loading, evaluation and the cost report. In a resumed run, only the last process is measured.

    `before_model_bytes` is the resident memory before the model was built, and `before_steps_bytes` is the resident
    memory before the first step. `step_peak_bytes` is the peak resident memory during `steps` steps, starting with step
    `first_step`. `source` names the method of measurement (`core.process_memory`). `growth_bytes` is `step_peak_bytes`
    minus `before_steps_bytes`. On CUDA, `growth_bytes` is the peak reserved memory minus the memory allocated before
    the first step.

    `counted_bytes` is the counted equivalent of `growth_bytes`: the sum of `ExecutedCost.step_peak_bytes` and the
    optimizer state (`optimizer_bytes`). With gradient accumulation, the sum includes the accumulated gradients.
    `budget_bytes` exists only for runs with a memory budget (``memory``). `predicted_peak_bytes` is predicted before
    the first step, for runs with a memory budget and for runs that select their batch size.
    """

    before_model_bytes: int
    before_steps_bytes: int
    peak_bytes: int
    step_peak_bytes: NotRequired[int]
    growth_bytes: int
    counted_bytes: int
    optimizer_bytes: int
    source: str
    first_step: int
    steps: int
    device: DeviceMemory | None
    budget_bytes: NotRequired[int]
    predicted_peak_bytes: NotRequired[int]


class FeaturesReport(TypedDict):
    """Stored features of a run (``trainer.cache_features``). The features are the outputs of the module `end`.

    `reason` states why the features are not computed up to a later module. `shape` is the shape for one image, `dtype`
    is the storage type, and `bytes` is the size of the store. `computed` and `read` are the numbers of images whose
    features were computed or were read from the store, during training and its evaluations. One process counts these
    images since the last start or resume of the run.
    """

    end: str
    reason: str
    shape: list[int]
    dtype: str
    views: int
    bytes: int
    computed: int
    read: int


class PrefixReport(TypedDict):
    """Report on how the frozen prefix of a run is computed (``trainer.prefix``).

    The prefix ends with the module `end`. `reason` states why the prefix does not end later. `form` is
    ``fp32`` (unchanged), ``folded`` or ``bf16``. If the form was selected by a measurement, `seconds` contains the time
    per batch of each form, and `deviation` contains the relative difference from the output in fp32 (Frobenius norm).
    """

    end: str
    reason: str
    form: str
    seconds: NotRequired[dict[str, float]]
    deviation: NotRequired[dict[str, float]]


class CompiledReport(TypedDict):
    """The blocks that were compiled for training (``trainer.compile=true``), without evaluation.

    `eager` maps reasons to the names of the blocks that were not compiled for this reason.
    """

    blocks: list[str]
    eager: dict[str, list[str]]


class RunTotals(TypedDict):
    """Totals over the entire training run.

    `flops` is the number of executed FLOPs of forward and backward passes. FLOPs are counted like `ExecutedCost`, in
    `counted_batches` of the `batches` batches of one process. All other batches have the same or nearly the same cost
    (see `cost.run_flops`). `seconds` and `joules` include evaluation during training. `joules` is read from the energy
    counters of the machine, which are named in `energy_source`. Without counters, `joules` and `energy_source` are
    None. `step_seconds` is the median time of the last optimizer steps, excluding data loading. On CUDA, `step_seconds`
    is None, because the loop does not wait for the end of a step.
    """

    steps: int
    images: int
    flops: float
    batches: int
    counted_batches: int
    seconds: float
    step_seconds: NotRequired[float | None]
    joules: float | None
    energy_source: str | None


class BestLast(TypedDict):
    """Accuracy of the best epoch and of the last epoch, as fractions."""

    best: float
    last: float


class Accuracy(BestLast):
    """Accuracy on `split`, the split on which the best epoch is selected.

    With several tasks, the accuracy is the mean over the tasks, and `tasks` contains the accuracy of each task. `test`
    is the accuracy of the weights of the best epoch on the test images, or None without test images. `metric` is the
    name of the metric if the metric is not the accuracy (for example, the mean IoU in segmentation).
    """

    split: str
    test: float | None
    tasks: NotRequired[dict[str, BestLast]]
    metric: NotRequired[str]


def final_accuracy(accuracy: Mapping[str, Any]) -> float:
    """Return the accuracy of the best epoch as a fraction.

    The accuracy is measured on the test images, or on `Accuracy.split` if there are no test images.
    """
    test = accuracy.get("test")
    return float(accuracy["best"] if test is None else test)


class StoppedReport(TypedDict):
    """Early stopping of a run (``trainer.patience``).

    `epoch` is the last epoch, `epochs` is the planned number of epochs, and `patience` is the number of epochs without
    improvement.
    """

    epoch: int
    epochs: int
    patience: int


class AppliedReport(TypedDict):
    """Changes that a method made (`methods.base.Applied`).

    The entries are a summary, the changed modules (`touched`), the skipped modules with reasons, and notes.
    """

    summary: NotRequired[str]
    touched: list[str]
    skipped: dict[str, str]
    notes: list[str]


class CorrectSamples(TypedDict):
    """The samples of a split that are predicted correctly, in the order of evaluation.

    This order is random, but the same for all runs on the same samples.

    `bits` is a hexadecimal number with one bit for each sample. The most significant bit of the first digit describes
    the first sample, and 1 denotes a correct prediction. The last byte is padded with zeros.
    """

    samples: int
    bits: str


def correct_samples(correct: Sequence[bool]) -> CorrectSamples:
    """Return the record of correct predictions."""
    import numpy as np

    return {"samples": len(correct), "bits": np.packbits(np.array(correct, dtype=bool)).tobytes().hex()}


def are_correct(record: CorrectSamples) -> list[bool]:
    """Return a Boolean for each sample of a record. This function is the inverse of `correct_samples`."""
    import numpy as np

    packed = np.frombuffer(bytes.fromhex(record["bits"]), dtype=np.uint8)
    found: list[bool] = np.unpackbits(packed, count=record["samples"]).astype(bool).tolist()
    return found


class TaskData(TypedDict):
    """Data of one task.

    `splits` contains the number of images in each split. `skipped` is the number of skipped images. `digest` is a hash
    of the images. `accuracy` contains the accuracy of model.safetensors on each split. `scores` contains the metrics of
    each split if there are several metrics.

    For classifiers, the metrics are the accuracy, `balanced_accuracy` (the mean recall of the classes), `macro_f1` (the
    mean F1 score of the classes), `top5_accuracy` (if there are more than five classes) and `calibration_error` (the
    expected calibration error with 15 bins, Guo et al. 2017). `classes` contains the results of each class for each
    split, and `labels` contains the results of each label of a multi-label classifier.
    """

    splits: dict[str, int]
    skipped: int
    digest: NotRequired[str]
    accuracy: dict[str, float]
    scores: NotRequired[dict[str, Any]]
    classes: NotRequired[dict[str, ClassResults]]
    labels: NotRequired[dict[str, LabelResults]]


class DataReport(TypedDict):
    """Data of a run, with the entries of `TaskData`.

    With several tasks, `tasks` contains the data of each task. The numbers of images are summed over the tasks, and the
    accuracies are averaged. `scores` contains additional metrics for each split. For segmentation, `scores` includes
    the IoU of each class (None if a class occurs in neither masks nor predictions). For classifiers, `scores`,
    `classes` and `labels` are described in `TaskData`. With several tasks, each task has its own entries. `correct`
    contains the correctly predicted samples of each split, if the metric is the accuracy of a single data set. For each
    task, `summary` describes how the data set was read (`data.inspection.Summary.record`). The key for a single data
    set is an empty string.
    """

    splits: NotRequired[dict[str, int]]
    skipped: int
    digest: NotRequired[str]
    accuracy: dict[str, float]
    scores: NotRequired[dict[str, Any]]
    classes: NotRequired[dict[str, ClassResults]]
    labels: NotRequired[dict[str, LabelResults]]
    correct: NotRequired[dict[str, CorrectSamples]]
    tasks: NotRequired[dict[str, TaskData]]
    summary: NotRequired[dict[str, Any]]


class Results(TypedDict):
    """The contents of results.json.

    `config` is the full configuration, and `arguments` are the command-line settings (empty for runs from Python).
    `changed` contains the settings that differ from the selected options (`Config.changed`). `environment` is the
    description of the environment (`record.environment`), and `methods` contains a report for each method. `features`
    exists only if features were stored, `prefix` only if the form of a frozen prefix was selected, `compiled` only with
    ``trainer.compile=true``, and `stopped` only if training stopped early. `weights` describes the tensors that were
    loaded from a file (`models.loading_report.LoadingReport`). The entry `weights` does not exist if all weights were
    initialized randomly.
    """

    format: int
    accuracy: Accuracy
    cost: CostReport
    memory: NotRequired[MemoryReport]
    features: NotRequired[FeaturesReport]
    prefix: NotRequired[PrefixReport]
    compiled: NotRequired[CompiledReport]
    stopped: NotRequired[StoppedReport]
    totals: RunTotals
    trainable_parameters: int
    total_parameters: int
    methods: dict[str, AppliedReport]
    data: DataReport
    weights: NotRequired[dict[str, Any]]
    warnings: NotRequired[list[str]]
    seed: int
    arguments: list[str]
    changed: NotRequired[dict[str, Any]]
    config: dict[str, Any]
    environment: dict[str, Any]


def images_digest(data: Mapping[str, Any]) -> str:
    """Return the image digests of all tasks of a run, joined by "+", or an empty string if no digest was recorded."""
    return "+".join(one["digest"] for one in (data, *data.get("tasks", {}).values()) if one.get("digest"))


def write_results(run: Path, results: Results) -> None:
    """Write `results` to ``results.json`` in the run folder `run`. The file marks the run as finished."""
    write_text_atomically(run / NAME, json_text(results, indent=2) + "\n")


def read_results(run: Path, do: str = START_AGAIN) -> Results:
    """Return the results of the finished run in folder `run`. Error messages end with the advice `do`.

    Raises:
        OtherVersionError: If results.json has a different format number or no format number.
        UserError: If results.json does not exist (the run has not finished), is damaged or contradicts itself.
    """
    file = run / NAME
    try:
        text = file.read_text(encoding="utf-8")
        plain = parse_json(text, parse_constant=_not_a_number, parse_float=_finite)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"The folder {run} contains no {NAME}: the run has not finished. {do}") from error
    except OSError as error:
        raise UserError(f"The file {file} cannot be read: {error.strerror}. {do}") from error
    except ValueError as error:
        do = "Repeat the run." if do == USE_ITS_VERSION else do
        raise UserError(f"The file {file} is damaged: it is not valid JSON. {do}") from error
    if not isinstance(plain, dict):
        raise UserError(f"The file {file} cannot be read: it does not contain a JSON object. {do}")
    check_format(file, plain.get("format"), do)
    try:
        _schema().validate_json(text, strict=True)  # strict, because the returned dictionary is not converted
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"The file {file} cannot be read: the entry {key} is invalid: {first['msg']}. {do}") from error
    try:
        _check_data(plain["data"])
    except ValueError as error:
        do = "Repeat the run." if do == USE_ITS_VERSION else do
        raise UserError(f"The file {file} is damaged: {error}. {do}") from error
    return cast(Results, plain)


def _check_data(data: Mapping[str, Any]) -> None:
    """Raise a `ValueError` if the results of the classes contradict each other, their scores or the class names."""
    summary = data.get("summary", {})
    for task, part in {"": data, **data.get("tasks", {})}.items():
        entry = f"data.tasks.{task}" if task else "data"
        names = found.get("class_names") if isinstance(found := summary.get(task), Mapping) else None
        for kind, check in (("classes", check_classes), ("labels", check_labels)):
            for split, results in part.get(kind, {}).items():
                if not isinstance(names, list) or not all(isinstance(name, str) for name in names):
                    raise ValueError(f"{entry}.{kind} requires the class names in data.summary")
                scores = part.get("scores", {}).get(split)
                if not isinstance(scores, Mapping) or not all(isinstance(s, int | float) for s in scores.values()):
                    raise ValueError(f"{entry}.{kind} requires the metrics in {entry}.scores.{split}")
                if kind == "classes" and "calibration_error" not in scores:
                    raise ValueError(f"{entry}.scores.{split} has no calibration_error")
                try:
                    check(results, len(names))
                except ValueError as error:
                    raise ValueError(f"the entry {entry}.{kind}.{split} is invalid: {error}") from error


@cache
def _schema() -> TypeAdapter[Results]:
    """Return the validator, which is cached because building it takes longer than validating many files."""
    return TypeAdapter(Results)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"the number {text} is not finite")
    return number


def _not_a_number(name: str) -> float:
    raise ValueError(f"the value {name} is not a valid JSON number")
