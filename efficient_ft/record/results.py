"""``results.json`` in a run folder: the results of a finished run.

The types in this module describe the JSON objects. The objects themselves are plain dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # Before Python 3.12, pydantic rejects typing.TypedDict.

from efficient_ft.config.schema import flatten as flatten
from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import START_AGAIN, USE_ITS_VERSION, check_format

NAME = "results.json"


class ExecutedCost(TypedDict):
    """Counted costs per image, which are the same on all machines.

    Two optional entries describe the whole batch. `step_peak_bytes` is the peak size of live tensors, without the model
    and the batch. `optimizer_bytes` is the size of the optimizer state.
    """

    forward_flops: float
    backward_flops: float
    saved_bytes: float
    step_peak_bytes: NotRequired[int]
    optimizer_bytes: NotRequired[float]


class MeasuredCost(TypedDict):
    """Measured costs of the whole batch on this machine.

    `step_seconds` is the median time of a step, or None if steps were not timed. `peak_bytes` is the peak memory.
    """

    step_seconds: float | None
    peak_bytes: float


class StepCost(TypedDict):
    """The cost of a training step."""

    executed: ExecutedCost
    measured: MeasuredCost


class BaselineCost(StepCost):
    """The cost of a training step of the baseline `name` (``cost.baseline``).

    The baseline trains a selection of the parameters of the plain model.
    """

    name: str


class CostReport(StepCost):
    """The cost of a training step with the run's methods.

    `baseline` is the cost of a step of the baseline, or None if it was not measured.
    """

    baseline: BaselineCost | None


class DeviceMemory(TypedDict):
    """Memory of a CUDA device, as reported by PyTorch's allocator.

    `before_bytes` is the size of the memory allocated before the first step. `allocated_bytes` and `reserved_bytes` are
    the peaks of the steps.
    """

    before_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class MemoryReport(TypedDict):
    """Measured and counted memory of the first training process, in bytes.

    `peak_bytes` is the peak resident memory of the process from its start to its results, as reported by the system. It
    includes loading, evaluation and the cost report. After a resume, it covers only the last process.

    `before_model_bytes` and `before_steps_bytes` are the resident memory before the model was built and before the
    first step. `step_peak_bytes` is the peak resident memory during `steps` steps, which begin with step `first_step`.
    `source` names the method of measurement (`core.process_memory`). `growth_bytes` is the peak of the steps minus the
    memory before the first step. On CUDA, `growth_bytes` is the peak of the reserved memory minus the memory allocated
    before the first step.

    `counted_bytes` is the counted equivalent of `growth_bytes`: the sum of `ExecutedCost.step_peak_bytes`, the
    optimizer state (`optimizer_bytes`) and, with gradient accumulation, the gradients, which are kept over all
    micro-batches. `budget_bytes` and `predicted_peak_bytes` exist only for runs with a memory budget (``memory``). The
    peak is predicted before the first step.
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
    """Stored features of a run (``trainer.cache_features``), which are the outputs of the module `end`.

    `reason` states why the features are not computed up to a later module. `shape` is the shape for one image, `dtype`
    is the storage type, and `bytes` is the size of the store. `computed` and `read` are the numbers of images whose
    features were computed or read from the store, in training and its evaluations. One process counts them from the
    last start or resume of the run.
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
    """The form in which the frozen prefix of a run is computed (``trainer.prefix``).

    The prefix ends with the module `end`. `reason` states why the prefix does not end later. If the form was
    selected by a measurement, `seconds` is the time per batch of each form. `deviation` is the relative difference
    between the output of each form and the output in fp32 (Frobenius norm).
    """

    end: str
    reason: str
    form: str
    seconds: NotRequired[dict[str, float]]
    deviation: NotRequired[dict[str, float]]


class RunTotals(TypedDict):
    """Totals of the whole training.

    `flops` is the number of executed FLOPs of forward and backward passes. They are counted like `ExecutedCost` in
    `counted_batches` of the `batches` batches of one process. The other batches have the same or nearly the same cost
    (see `cost.run_flops`). `seconds` and `joules` include evaluation during training. `joules` is read from the energy
    counters of the machine, which are named in `energy_source`. Without counters, `joules` and `energy_source` are
    None. `step_seconds` is the median time of the last optimizer steps without data loading. It is None on CUDA, where
    the loop does not wait for the end of a step.
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
    """Accuracy as a fraction in the best and in the last epoch."""

    best: float
    last: float


class Accuracy(BestLast):
    """Accuracy on `split`, which is the split that selects the best epoch.

    With several tasks, the accuracy is the mean over the tasks, and `tasks` contains the accuracy of each task. `test`
    is the accuracy of the best epoch's weights on the test images, or None if there are no test images. `metric` is the
    name of the metric if it is not the accuracy, such as the mean IoU in segmentation.
    """

    split: str
    test: float | None
    tasks: NotRequired[dict[str, BestLast]]
    metric: NotRequired[str]


def final_accuracy(accuracy: Mapping[str, Any]) -> float:
    """Return the accuracy of the best epoch as a fraction.

    It is measured on the test images, or on the split that selects epochs if there are no test images.
    """
    test = accuracy.get("test")
    return float(accuracy["best"] if test is None else test)


class AppliedReport(TypedDict):
    """Changes that a method made (`methods.base.Applied`).

    The fields are a summary, the changed modules, the skipped modules with reasons, and notes.
    """

    summary: NotRequired[str]
    touched: list[str]
    skipped: dict[str, str]
    notes: list[str]


class TaskData(TypedDict):
    """Data of one task.

    `splits` contains the number of images in each split, and `skipped` is the number of skipped images. `digest` is a
    hash of the images. `accuracy` contains the accuracy of model.safetensors on each split.
    """

    splits: dict[str, int]
    skipped: int
    digest: NotRequired[str]
    accuracy: dict[str, float]


class DataReport(TypedDict):
    """Data of a run, with the entries of `TaskData`.

    With several tasks, `tasks` contains the data of each task, the numbers of images are summed, and the accuracies are
    averaged. `scores` contains further metrics for each split, for example pixel accuracy and the IoU of each class in
    segmentation (None if a class occurs in neither masks nor predictions). `summary` describes for each task how its
    data set was read (`data.inspection.Summary.record`). The key of a single data set is "".
    """

    splits: NotRequired[dict[str, int]]
    skipped: int
    digest: NotRequired[str]
    accuracy: dict[str, float]
    scores: NotRequired[dict[str, Any]]
    tasks: NotRequired[dict[str, TaskData]]
    summary: NotRequired[dict[str, Any]]


class Results(TypedDict):
    """The contents of results.json.

    `config` is the full configuration, and `arguments` are the command-line settings (empty for runs from Python).
    `changed` contains the settings that differ from the selected options (`Config.changed`). `environment` is the
    result of `record.environment`, and `methods` contains a report for each method. `features` exists only if features
    were stored. `weights` describes the tensors that were loaded from a file (`models.loading_report.LoadingReport`).
    This entry does not exist for random weights.
    """

    format: int
    accuracy: Accuracy
    cost: CostReport
    memory: NotRequired[MemoryReport]
    features: NotRequired[FeaturesReport]
    prefix: NotRequired[PrefixReport]
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
    """Return the digest of a run's images, joined over all tasks, or an empty string if no digest was recorded."""
    return "+".join(one["digest"] for one in (data, *data.get("tasks", {}).values()) if one.get("digest"))


def write_results(run: Path, results: Results) -> None:
    """Write `results` to the run folder `run`. This file marks the run as finished."""
    write_text_atomically(run / NAME, json_text(results, indent=2) + "\n")


def read_results(run: Path, do: str = START_AGAIN) -> Results:
    """Return the results of the finished run in folder `run`. Error messages end with the advice `do`.

    Raises:
        OtherVersionError: If the file has another format number, or none.
        UserError: If results.json does not exist (the run has not finished) or is damaged.
    """
    file = run / NAME
    try:
        text = file.read_text(encoding="utf-8")
        plain = parse_json(text, parse_constant=_not_a_number, parse_float=_finite)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{run} contains no {NAME}: the run has not finished. {do}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. {do}") from error
    except ValueError as error:
        do = "Repeat the run." if do == USE_ITS_VERSION else do
        raise UserError(f"{file} is damaged: it is not valid JSON. {do}") from error
    if not isinstance(plain, dict):
        raise UserError(f"{file} cannot be read: it is not an object. {do}")
    check_format(file, plain.get("format"), do)
    try:
        _schema().validate_json(text, strict=True)  # strict, since the returned dictionary is not converted
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{file} cannot be read: {key}: {first['msg']}. {do}") from error
    return cast(Results, plain)


@cache
def _schema() -> TypeAdapter[Results]:
    """Return the validator. It is cached, since building it takes longer than validating many files."""
    return TypeAdapter(Results)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a valid JSON number")
