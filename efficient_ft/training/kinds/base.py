"""The interface that every kind of task implements."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict, cast

import numpy as np
import torch
from PIL import Image
from torch import nn
from torch.utils.data import DataLoader

from efficient_ft.config import Config, ModelConfig, data_configs
from efficient_ft.config.kinds import KindRules
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.core.input_spec import InputSpec
from efficient_ft.cost.executed import AUTOCAST
from efficient_ft.data import Decoding, RoundRobinData, class_count, missing_data
from efficient_ft.data.opened import OpenedData
from efficient_ft.data.reading import Reading
from efficient_ft.data.sources import DataSource
from efficient_ft.methods.base import Method
from efficient_ft.methods.declarations import Axis
from efficient_ft.models import factory
from efficient_ft.record.class_results import ClassResults, LabelResults, class_results
from efficient_ft.record.predictions import SamplePredictions
from efficient_ft.record.results import CorrectSamples, correct_samples
from efficient_ft.task import Inputs, Scores, Task, moved
from efficient_ft.task.class_metrics import reliability
from efficient_ft.training.last_layer import last_layer_in_fp32
from efficient_ft.training.trainer import use_channels_last

#: The data of a run: one data set, or several data sets that are used in turn.
RunData = OpenedData[Any, Any] | RoundRobinData

#: Number of classes that is assumed if the data are missing. ImageNet has this number of classes.
UNKNOWN_CLASSES = 1000
#: Factors for smaller image sizes, in the order in which they are tried if no batch size fits into memory.
_SMALLER_IMAGES = (0.75, 0.5)


class Evaluated(TypedDict):
    """Result of an evaluation.

    Attributes:
        accuracy: the metric of the task for each split.
        scores: all metrics for each split, if the task has several metrics.
        classes: the results of each class for each split, if samples have classes.
        labels: the results of each label for each split, if samples have any number of labels.
        samples: for each split, the predictions of individual samples (`record.predictions`).
        correct: for each split, the samples that are predicted correctly. Metrics that do not keep the predictions of
            individual samples have no entry.
        tasks: mapping from data sets to the metric of each split, if there are several data sets.
        each: the complete result of each data set, if there are several data sets.
    """

    accuracy: dict[str, float]
    scores: NotRequired[dict[str, dict[str, Any]]]
    classes: NotRequired[dict[str, ClassResults]]
    labels: NotRequired[dict[str, LabelResults]]
    samples: NotRequired[dict[str, SamplePredictions]]
    correct: NotRequired[dict[str, CorrectSamples]]
    tasks: NotRequired[dict[str, dict[str, float]]]
    each: NotRequired[dict[str, Evaluated]]


class Sample(NamedTuple):
    """A sample and its prediction, which loggers can display.

    Attributes:
        content: the image or the text.
        caption: description of the sample, e.g. its label and its prediction.
    """

    content: Image.Image | str
    caption: str


@dataclass(frozen=True)
class Trained:
    """A trained network that is ready to use.

    Attributes:
        model: the network in evaluation mode, on the CPU. The parameters do not require gradients.
        class_names: names of the classes in the order of the outputs. With several tasks, only the classes of the
            active task are listed.
        input: the size and normalization of images, or the length and tokenizer of texts.
        notes: further metadata of model.safetensors, e.g. the epoch, the accuracy and the split.
        tasks: mapping from tasks to their class names, or an empty mapping for a single data set. The active task is
            `models.tasks.tasks_of(model).active`.
        decoding: options for decoding image files.
        task: name of the kind of task.
    """

    model: nn.Module
    class_names: list[str]
    input: InputSpec
    notes: dict[str, Any]
    tasks: dict[str, list[str]] = field(default_factory=dict)
    decoding: Decoding = field(default_factory=Decoding)
    task: str = "classification"


@dataclass(frozen=True)
class PredictOptions:
    """Options of ``efficient-ft predict``.

    Attributes:
        run: the run folder, or the file model.safetensors of a run.
        files: files and folders that contain the samples.
        top: number of classes that are reported for each sample.
        batch_size: number of samples per batch.
        form: the output format ``csv`` or ``json``, or None for text in the terminal.
        out: folder for output files such as masks, or None for the default folder.
        overlay: if True, also write the images blended with the predicted masks.
    """

    run: Path
    files: Sequence[Path]
    top: int = 5
    batch_size: int = 32
    form: str | None = None
    out: Path | None = None
    overlay: bool = False


@dataclass(frozen=True)
class Prediction:
    """Prediction for one sample.

    Attributes:
        heading: the file name or the text of the sample, which is shown as a heading in the terminal.
        values: pairs (name, formatted value) that are shown below the heading.
        record: the JSON object of this sample.
        row: the cells of the CSV row of this sample.
    """

    heading: str
    values: Sequence[tuple[str, str]]
    record: Mapping[str, Any]
    row: Sequence[Any]


class Predictions(ABC):
    """Predictions of a trained network for the given files.

    Attributes:
        total: number of samples.
        header: column names of the CSV output.
    """

    total: int
    header: Sequence[str]

    @abstractmethod
    def __iter__(self) -> Iterator[Prediction]:
        """Yield the prediction of each sample."""

    def summary(self) -> list[str]:
        """Return the lines that are printed after the last prediction."""
        return []


class Kind(ABC):
    """The base class of all kinds of task. A kind provides data, a network, a loss, a metric, predictions and figures.

    A subclass sets `rules` and `task`, and implements `open` and `predictions`. All other methods have default
    implementations for image networks with one output per class.

    Attributes:
        rules: the data sets and networks that are allowed, and the settings that are not supported.
        task: the loss and the metric, with default settings.
        sources: mapping from names to data sets that this kind adds to the package.
        family: functions that build the networks in `rules.networks`, or None to use a family of this package.
        decodes_files: True if samples are decoded when a batch is loaded. Worker processes can then decode the samples.
        table_classes: number of classes in cost tables, or None to use the number of classes of the data.
        fixed_batches: True if all training batches have the same shape, so that the training loop can be timed.
    """

    rules: KindRules
    task: Task
    sources: Mapping[str, DataSource] = {}
    decodes_files: bool = True
    family: factory.Family | None = None
    table_classes: int | None = None
    fixed_batches: bool = False

    def task_of(self, config: Config) -> Task:
        """Return the task with the settings of the configuration."""
        return self.task

    def task_on(self, config: Config, data: RunData, notes: Mapping[str, Any] = {}) -> Task:
        """Return the task with values that depend on the data, or on the metadata of model.safetensors (`notes`)."""
        return self.task_of(config)

    def supports(self, what: str) -> bool:
        """Return True unless `rules.unsupported` contains `what`."""
        return what not in self.rules.unsupported

    def refuse_methods(self, methods: Sequence[Method]) -> None:
        """Raise UserError if the kind does not support one of the methods."""
        for method in methods:
            if not self.supports("tokens") and Axis.TOKENS in (method.axis, *method.other_axes):
                hint = self.rules.unsupported["tokens"] or ""
                raise UserError(
                    f"The method {method.name} drops or merges tokens, which task={self.rules.name} does not support."
                    f" {hint}".rstrip()
                )

    def missing(self, config: Config) -> list[str]:
        """Return a message for each data set of the run that is missing on this machine."""
        return [message for message in map(missing_data, data_configs(config)) if message is not None]

    @abstractmethod
    def open(self, config: Config, spec: InputSpec) -> RunData:
        """Open the data of a run for a network with the input `spec`.

        Raises:
            SettingError: If a setting of the data set cannot be used.
            UserError: If the data are missing or damaged, or if they cannot be split as configured.
        """

    def check_settings(self, config: Config) -> Config:
        """Return the configuration that ``efficient-ft check`` uses to find all unusable samples.

        All image files are inspected. The value of ``data.on_corrupt`` applies only to the rows of a label file.
        """
        labels = None if config.data.labels is None else config.data.labels.model_copy()
        if labels is not None:
            labels._skips_rows = config.data.on_corrupt == "skip"
        data = config.data.model_copy(update={"on_corrupt": "stop", "labels": labels})
        return config.model_copy(update={"data": data})

    def classes(self, config: Config) -> int | dict[str, int]:
        """Return the number of classes without opening the data, or `UNKNOWN_CLASSES` if the data are missing."""
        return class_count(config.data) or UNKNOWN_CLASSES

    def network(self, model: ModelConfig, classes: int | Mapping[str, int], *, report: bool = True) -> nn.Module:
        """Build a network, and load the weights that the configuration specifies.

        Args:
            model: the ``model`` section of the configuration.
            classes: number of outputs, or a mapping from data sets to numbers of outputs.
            report: if True, log which weights were loaded.

        Raises:
            UserError: If the network cannot be built, or if its weights are missing or do not match the network.
        """
        return factory.create_model(model, classes, report=report)

    def random_network(self, model: ModelConfig, classes: int | Mapping[str, int]) -> nn.Module:
        """Build the network with random weights, for example to count costs or to load the weights of a run."""
        return factory.random_model(model, classes)

    def check_network(self, network: nn.Module, data: RunData) -> None:  # noqa: B027 (optional)
        """Raise UserError if the network cannot process the data."""

    def network_input(self, spec: InputSpec, data: RunData) -> InputSpec:
        """Return the input specification of the network. A kind for texts adds the tokenizer of the data."""
        return spec

    def portable(self, config: Config, network: nn.Module) -> ModelConfig:
        """Return a model configuration that does not depend on local files."""
        return config.model

    def companions(self, config: Config, network: nn.Module, data: RunData) -> dict[str, str]:
        """Return the contents of files that other libraries need to load model.safetensors, by file name.

        The files are written to the same folder if the weights alone define the network. By default, there are no such
        files.
        """
        return {}

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        """Return metadata about the data for model.safetensors.

        By default, the metadata contain the decoding options of the data sets that do not use the default options.
        """
        changed = {
            task: asdict(part.decoding)
            for task, part in data.parts.items()
            if part.decoding is not None and part.decoding != Decoding()
        }
        return {"decoding": changed} if changed else {}

    def check_notes(self, notes: Mapping[str, Any], classes: int) -> None:  # noqa: B027 (optional)
        """Raise ValueError if the validated metadata of model.safetensors do not match this kind of task."""

    def evaluate(
        self,
        config: Config,
        model: nn.Module,
        data: RunData,
        device: torch.device,
        notes: Mapping[str, Any] = {},
    ) -> Evaluated:
        """Evaluate a network on every split except the training split. The network is moved to `device`.

        `config` determines the precision and the maximum number of batches. `notes` are the metadata of the network.

        Raises:
            UserError: If an output is not finite.
        """
        task, part, options = self.task_on(config, data, notes), only(data), config.trainer
        if use_channels_last(config, device):  # the same memory format as in training
            model.to(memory_format=torch.channels_last)
        found: Any = {"accuracy": {}}
        for split in ("val", "test"):
            if split not in part.splits:
                continue
            loader = part.eval_loader(split)
            of = scores(task, model, loader, part.num_classes, device, options.precision, options.limit_eval_batches)
            metrics = of.compute()
            found["accuracy"][split] = metrics[task.metric]
            results: dict[str, Any] = {"scores": self.further_scores(metrics, part.class_names)}
            if (one := of.outcomes()) is not None:
                calibration = reliability(one.confidence, one.right)
                results["classes"] = class_results(one.targets, one.predicted, part.num_classes, calibration)
            results["labels"] = of.labels()
            if arrays := of.samples():
                order = np.array([index for _, index in loader.sampler])
                results["samples"] = {"index": order[: len(arrays["predicted"])], **arrays}
            if (right := of.correct()) is not None:
                results["correct"] = correct_samples(right.tolist())
            for key, result in results.items():
                if result:
                    found.setdefault(key, {})[split] = result
        return cast(Evaluated, found)

    def further_scores(self, scores: Mapping[str, float], class_names: Sequence[str]) -> dict[str, Any]:
        """Return all metrics for results.json, or an empty dict if the task has only one metric."""
        return dict(scores) if len(scores) > 1 else {}

    def write_figures(self, folder: Path, data: RunData, device: torch.device) -> None:  # noqa: B027 (optional)
        """Write figures of the finished run into its folder. By default, no figures are written."""

    def samples(self, trained: Trained, data: OpenedData[Any, Any], device: torch.device) -> list[Sample]:
        """Return samples of a data set with their predictions for loggers. By default, the list is empty.

        The samples are taken from the split that selects the best epoch.
        """
        return []

    @abstractmethod
    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        """Return the predictions for the files in `options`, which are computed on the device of the network.

        Raises:
            UserError: If a file does not exist, cannot be read, or has the wrong format.
        """

    def file_batches(self, trained: Trained, files: Sequence[Path], count: int, size: int) -> Iterator[Inputs]:
        """Yield the network inputs of `count` evenly spaced samples of the given files, in batches of at most `size`.

        ``efficient-ft export --check FILE...`` compares the exported network with the run on these inputs. By default,
        a kind does not support this option.
        """
        raise UserError(f"--check does not support files for task={self.rules.name}. Remove the option.")

    def largest_batch(self, data: RunData) -> int | None:
        """Return the maximum number of samples in a training batch, or None if the number is not limited."""
        return int(only(data).splits["train"])

    def size_setting(self, config: Config) -> str:
        """Return the setting of the input size and its value, e.g. ``model.image_size=224``."""
        size = factory.input_of(config.model).size
        return f"model.image_size={size[0] if size[0] == size[-1] else list(size)}"

    def evaluation_size(self, config: Config) -> str:
        """Return a description of the setting or property that determines the size of evaluated samples."""
        return self.size_setting(config)

    def smaller_inputs(self, config: Config) -> list[Config]:
        """Return configurations with smaller square images, which are suggested if a run exceeds its memory budget."""
        size, found = factory.input_of(config.model).size, []
        for factor in _SMALLER_IMAGES if size[0] == size[-1] else ():
            side = max(32, int(size[0] * factor) // 32 * 32)
            if side < size[0]:
                model = config.model.model_copy(update={"image_size": side})
                found.append(config.model_copy(update={"model": model}))
        return found

    def figure_input(self, evaluation: Reading) -> tuple[tuple[int, int], int] | None:
        """Return the size (H, W) of the largest input of `write_figures`, and the number of bytes needed to read all
        inputs of this function.

        `evaluation` describes the memory for reading evaluation batches. The result is None if no figures are written.
        """
        return None


@torch.inference_mode()
def scores(
    task: Task,
    model: nn.Module,
    loader: DataLoader,
    classes: int,
    device: torch.device,
    precision: str,
    limit: int | None = None,
) -> Scores:
    """Evaluate a network on at most `limit` batches (inputs, targets), and return the filled metrics of the task.

    The network is moved to `device`. `precision` is ``fp32``, ``bf16`` or ``fp16``. ``bf16`` and ``fp16`` use autocast,
    except for the last layer.

    Raises:
        UserError: If an output is not finite.
    """
    model.eval().to(device)
    found = task.scores(classes, local=True).to(device)  # other processes may already have ended
    dtype = AUTOCAST[precision]
    autocast = torch.autocast(device.type, dtype=dtype, enabled=dtype is not None)
    finite = torch.ones((), dtype=torch.bool, device=device)
    for number, (inputs, targets) in enumerate(loader):
        if number == limit:
            break
        with autocast, last_layer_in_fp32(model):
            logits = task.evaluation_logits(model, moved(inputs, device))
        finite &= logits.isfinite().all()
        found.update(logits.float(), targets.to(device, non_blocking=True))
    if not finite:
        half = f" Use trainer.precision=fp32 instead of trainer.precision={precision}." if dtype is not None else ""
        raise UserError(f"The network's outputs are not finite, so its weights cannot be used.{half}")
    return found


@contextmanager
def settings_of_task(task: str) -> Iterator[None]:
    """Return a context manager that replaces ``data.`` with ``tasks.TASK.`` in errors about settings.

    If `task` is empty, errors are not changed.
    """
    try:
        yield
    except SettingError as error:
        if not task:
            raise
        error.setting = error.setting.replace("data.", f"tasks.{task}.", 1)
        error.args = (str(error).replace("data.", f"tasks.{task}.", 1),)
        raise


def only(data: RunData) -> Any:
    """Return the only data set of a run."""
    (part,) = data.parts.values()
    return part
