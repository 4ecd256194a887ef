"""``results.json`` of a run folder: what a finished run found.

The types describe the JSON objects as they are; a run holds and returns them as plain dictionaries.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, NotRequired, cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict  # pydantic needs this one below Python 3.12

from efficient_ft.config.schema import flatten as flatten
from efficient_ft.core.errors import UserError
from efficient_ft.core.parsing import parse_json
from efficient_ft.record.files import json_text, write_text_atomically
from efficient_ft.record.formats import START_AGAIN, USE_ITS_VERSION, check_format

NAME = "results.json"


class ExecutedCost(TypedDict):
    """Counted, the same on any machine; per image.

    `step_peak_bytes` is of the whole batch: the peak of live tensor bytes without model and batch. `optimizer_bytes`
    is the whole state of the optimizer. Both are optional.
    """

    forward_flops: float
    backward_flops: float
    saved_bytes: float
    step_peak_bytes: NotRequired[int]
    optimizer_bytes: NotRequired[float]


class MeasuredCost(TypedDict):
    """Measured on this machine: median seconds of a step (None: not timed) and peak bytes, for the whole batch."""

    step_seconds: float | None
    peak_bytes: float


class StepCost(TypedDict):
    """The cost of a training step."""

    executed: ExecutedCost
    measured: MeasuredCost


class BaselineCost(StepCost):
    """The cost of a training step of the baseline `name` (``cost.baseline``): a selection on the plain model."""

    name: str


class CostReport(StepCost):
    """The cost of a training step with the run's methods, and that of the baseline (None: not probed)."""

    baseline: BaselineCost | None


class DeviceMemory(TypedDict):
    """Memory of a CUDA device in PyTorch's allocator: allocated before the first step, and the steps' peaks."""

    before_bytes: int
    allocated_bytes: int
    reserved_bytes: int


class MemoryReport(TypedDict):
    """Memory of the training process (the first one), measured and counted, over optimizer steps of the training.

    Resident memory: `peak_bytes` is the highest size of the process from its start to its results, as the system keeps
    it; loading, evaluation, and the cost report count. A resumed run has that of its last process. Further sizes are
    those before the model was built, before the first step, and at the peak during the `steps` from `first_step` on
    (`step_peak_bytes`; `source` says how it was measured, see `core.process_memory`). `growth_bytes` is the peak of the
    steps above the size before the first step; on CUDA that of the device: reserved bytes above those allocated before.
    `counted_bytes` is the count of the same things: `ExecutedCost.step_peak_bytes`, the optimizer's state
    (`optimizer_bytes`), and with gradient accumulation the gradients, which live through all micro-batches. A run with
    a budget (``memory``) has the peak that was predicted before its first step.
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
    """Stored features of a run (``trainer.cache_features``): of the module `end`, after which `reason` holds.

    `shape` is of one image, `dtype` the type in which they are stored, `bytes` the size of the store. `computed` and
    `read` are images of training and of its evaluations (of one process, since the run was last continued).
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
    """The form in which a run's frozen prefix computes (``trainer.prefix``): up to `end`, after which `reason` holds.

    Where it was chosen by a measurement: by form `seconds` of a batch, and `deviation` of the output from that in fp32
    (relative, Frobenius norm).
    """

    end: str
    reason: str
    form: str
    seconds: NotRequired[dict[str, float]]
    deviation: NotRequired[dict[str, float]]


class RunTotals(TypedDict):
    """Totals of the whole training.

    `flops` are executed: forward and backward passes, counted as `ExecutedCost` is, in `counted_batches` of `batches`
    batches (of one process; the others cost the same as one that was counted, or nearly: `cost.run_flops`). `seconds`
    and `joules` include evaluation during training; `joules` are of the whole machine's counters named in
    `energy_source`, None where there are none. `step_seconds` is the median time of the last optimizer steps of the
    training itself, without loading; None on CUDA, where the loop does not wait for a step to end.
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
    """Accuracy (a fraction) in the best and in the last epoch."""

    best: float
    last: float


class Accuracy(BestLast):
    """Accuracy on `split`, the split that chose the best epoch; with several tasks the mean, and that of each task.

    `test` is that of the best epoch's weights on the test images, None if there are none. In a segmentation it is the
    mean IoU, as `metric` states.
    """

    split: str
    test: float | None
    tasks: NotRequired[dict[str, BestLast]]
    metric: NotRequired[str]


def final_accuracy(accuracy: Mapping[str, Any]) -> float:
    """Accuracy (a fraction) of the best epoch on the test images; without any, on the split that chose the epoch."""
    test = accuracy.get("test")
    return float(accuracy["best"] if test is None else test)


class AppliedReport(TypedDict):
    """A summary of what a method changed; the parts that it touched, and those that it left with the reason.

    See `methods.base.Applied`. The `summary` is optional.
    """

    summary: NotRequired[str]
    touched: list[str]
    skipped: dict[str, str]
    notes: list[str]


class TaskData(TypedDict):
    """One data set: images by split, corrupt images left out, and accuracy of model.safetensors by split.

    `digest` is that of its images (`data.listing.Listing.digest`); it is optional.
    """

    splits: dict[str, int]
    skipped: int
    digest: NotRequired[str]
    accuracy: dict[str, float]


class DataReport(TypedDict):
    """`TaskData` of the run's data set; with several tasks the sum, the mean and each task's.

    `scores` are further measures by split: of a segmentation pixel accuracy and the IoU of each class by name (None:
    neither masks nor predictions have it). `summary` states how each data set was understood
    (`data.inspection.Summary.record`), by task; a single data set has the key "".
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

    `config` is the whole configuration, `arguments` the settings given to this run (of the command line; empty for
    runs from Python), `changed` the settings that differ from the chosen options (`Config.changed`), `environment`
    what `record.environment` gives, `methods` a report by the name of the method. `memory` is
    optional, and `features` exist if features were stored. `weights` states which tensors
    of a file were used (`models.loading_report.LoadingReport`); a network with random weights has none.
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
    """The digest of the images of a run's data set or of all its tasks; empty if none was recorded."""
    return "+".join(one["digest"] for one in (data, *data.get("tasks", {}).values()) if one.get("digest"))


def write_results(run: Path, results: Results) -> None:
    """Write `results` to the folder `run`, which marks the run as finished."""
    write_text_atomically(run / NAME, json_text(results, indent=2) + "\n")


def read_results(run: Path, do: str = START_AGAIN) -> Results:
    """The results of the finished run in folder `run`.

    Args:
        run: a run folder.
        do: ends the error messages: what to do if the file cannot be used.

    Raises:
        OtherVersionError: the file has another format number, or none.
        UserError: there is no results.json (the run has not finished), or it is damaged.
    """
    file = run / NAME
    try:
        text = file.read_text(encoding="utf-8")
        plain = parse_json(text, parse_constant=_not_a_number, parse_float=_finite)
    except (FileNotFoundError, NotADirectoryError) as error:
        raise UserError(f"{run} holds no {NAME}: the run has not finished. {do}") from error
    except OSError as error:
        raise UserError(f"{file} cannot be read: {error.strerror}. {do}") from error
    except ValueError as error:
        do = "Repeat the run." if do == USE_ITS_VERSION else do
        raise UserError(f"{file} is damaged: it is not valid JSON. {do}") from error
    if not isinstance(plain, dict):
        raise UserError(f"{file} cannot be read: it is not an object. {do}")
    check_format(file, plain.get("format"), do)
    try:
        _schema().validate_json(text, strict=True)  # "1" is not 1: what is returned is not converted
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        key = ".".join(map(str, first["loc"]))
        raise UserError(f"{file} cannot be read: {key}: {first['msg']}. {do}") from error
    return cast(Results, plain)


@cache
def _schema() -> TypeAdapter[Results]:
    """Build the validator once: it takes longer than many files."""
    return TypeAdapter(Results)


def _finite(text: str) -> float:
    if math.isinf(number := float(text)):
        raise ValueError(f"{text} is not a finite number")
    return number


def _not_a_number(name: str) -> float:
    raise ValueError(f"{name} is not a valid JSON number")
