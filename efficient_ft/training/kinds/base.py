"""The interface of a kind of task."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, NotRequired, TypedDict

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
from efficient_ft.task import Task, moved
from efficient_ft.training.trainer import use_channels_last

#: The data of a run: one data set, or several data sets in turn.
RunData = OpenedData[Any, Any] | RoundRobinData

#: Assumed number of classes if the data are missing, as in ImageNet.
UNKNOWN_CLASSES = 1000
#: Scale factors of the image size that are tried if no batch size fits into memory.
_SMALLER_IMAGES = (0.75, 0.5)


class Evaluated(TypedDict):
    """The metric by split, further metrics by split, and the metric of each data set if there are several."""

    accuracy: dict[str, float]
    scores: NotRequired[dict[str, dict[str, Any]]]
    tasks: NotRequired[dict[str, dict[str, float]]]


class Sample(NamedTuple):
    """A preprocessed image (None for a text), a text, and a caption with the label and the prediction."""

    image: Image.Image | None
    text: str
    caption: str


@dataclass(frozen=True)
class Trained:
    """A trained network, ready to use.

    Attributes:
        model: the network in evaluation mode, on the CPU. Its parameters do not require gradients.
        class_names: class names by output index. With several tasks, they belong to the chosen task.
        input: size and normalization of the images, or length and tokenizer of the texts.
        notes: further metadata of the file: epoch, accuracy and split.
        tasks: class names by task, or an empty mapping. `models.tasks.tasks_of(model).active` is the active task.
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
    """The options of ``efficient-ft predict``.

    Attributes:
        run: the run folder, or its model.safetensors.
        files: files and folders with the samples.
        top: number of classes reported for each sample.
        batch_size: number of samples per batch.
        form: ``csv``, ``json``, or None for the terminal.
        out: the folder for the files that the kind writes; None for the default.
        overlay: True to also write the images blended with the predictions.
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
    """The prediction for one sample.

    Attributes:
        heading: file name or text, shown as the heading in the terminal.
        values: names and values as text, shown below the heading.
        record: the object for JSON.
        row: the cells for CSV.
    """

    heading: str
    values: Sequence[tuple[str, str]]
    record: Mapping[str, Any]
    row: Sequence[Any]


class Predictions(ABC):
    """The predictions of a trained run for some files.

    Attributes:
        total: number of samples.
        header: the header for CSV.
    """

    total: int
    header: Sequence[str]

    @abstractmethod
    def __iter__(self) -> Iterator[Prediction]:
        """Yield the prediction of each sample."""

    def summary(self) -> list[str]:
        """Return lines to print after the last prediction."""
        return []


class Kind(ABC):
    """A kind of task, which opens the data, builds the network, and provides loss, metric, predictions and figures.

    A subclass sets `rules` and `task`, and implements `open` and `predictions`. All other functions have defaults for
    image networks with one output per class.

    Attributes:
        rules: the allowed data sets and networks, and the unsupported settings.
        task: loss and metric, with default settings.
        sources: data sets that the kind adds, by name.
        family: functions that build the networks in `rules.networks`; None for a family of this package.
        decodes_files: True if samples are decoded when a batch is loaded, which worker processes can do.
        table_classes: number of classes for the costs in published tables; None to count the classes of the data.
        fixed_batches: True if all training batches have the same shape, so that a loop over them can be timed.
    """

    rules: KindRules
    task: Task
    sources: Mapping[str, DataSource] = {}
    decodes_files: bool = True
    family: factory.Family | None = None
    table_classes: int | None = None
    fixed_batches: bool = False

    def task_of(self, config: Config) -> Task:
        """Return the loss and the metric as configured."""
        return self.task

    def supports(self, what: str) -> bool:
        """Return True unless `rules.unsupported` contains `what`."""
        return what not in self.rules.unsupported

    def refuse_methods(self, methods: Sequence[Method]) -> None:
        """Raise UserError if the kind does not support one of the methods."""
        for method in methods:
            if not self.supports("tokens") and Axis.TOKENS in (method.axis, *method.other_axes):
                hint = self.rules.unsupported["tokens"] or ""
                raise UserError(
                    f"method {method.name} drops or merges tokens, which task={self.rules.name} does not support."
                    f" {hint}".rstrip()
                )

    def missing(self, config: Config) -> list[str]:
        """Return a message for each data set of the run that is not on this machine."""
        return [message for message in map(missing_data, data_configs(config)) if message is not None]

    @abstractmethod
    def open(self, config: Config, spec: InputSpec) -> RunData:
        """Open the data of a run for a network with the input `spec`.

        Raises:
            SettingError: If a setting of the data set cannot be used.
            UserError: If the data are missing or damaged, or cannot be split as configured.
        """

    def check_settings(self, config: Config) -> Config:
        """Return the configuration for ``efficient-ft check``, with which `inspect` finds all unusable samples."""
        return config.model_copy(update={"data": config.data.model_copy(update={"on_corrupt": "stop"})})

    def classes(self, config: Config) -> int | dict[str, int]:
        """Return the number of classes without opening the data. It is `UNKNOWN_CLASSES` if the data are missing."""
        return class_count(config.data) or UNKNOWN_CLASSES

    def network(self, model: ModelConfig, classes: int | Mapping[str, int], *, report: bool = True) -> nn.Module:
        """Build a network, with the weights that the configuration names.

        Args:
            model: the ``model`` section of the configuration.
            classes: number of outputs, or a mapping from data sets to numbers of outputs.
            report: True to log which weights were loaded.

        Raises:
            UserError: If the network cannot be built, or if its weights are missing or do not fit.
        """
        return factory.create_model(model, classes, report=report)

    def random_network(self, model: ModelConfig, classes: int | Mapping[str, int]) -> nn.Module:
        """Build the same network with random weights, to load a file of a run or to count costs."""
        return factory.random_model(model, classes)

    def check_network(self, network: nn.Module, data: RunData) -> None:  # noqa: B027 (optional)
        """Raise UserError if the network cannot process the data."""

    def network_input(self, spec: InputSpec, data: RunData) -> InputSpec:
        """Return the input of the network, to which the data may add a tokenizer."""
        return spec

    def portable(self, config: Config, network: nn.Module) -> ModelConfig:
        """Return a model configuration that does not depend on local files."""
        return config.model

    def notes(self, config: Config, data: RunData) -> dict[str, Any]:
        """Return the data-related metadata for model.safetensors: decoding options that differ from the default."""
        changed = {
            task: asdict(part.decoding)
            for task, part in data.parts.items()
            if part.decoding is not None and part.decoding != Decoding()
        }
        return {"decoding": changed} if changed else {}

    def check_notes(self, notes: Mapping[str, Any], classes: int) -> None:  # noqa: B027 (optional)
        """Raise ValueError if the validated metadata of a model.safetensors do not fit the kind."""

    def evaluate(self, config: Config, model: nn.Module, data: RunData, device: torch.device) -> Evaluated:
        """Evaluate a network on every split except the training split. The network is moved to `device`.

        The configuration of the run sets the precision and the number of batches.

        Raises:
            UserError: If an output is not finite.
        """
        task, part, options = self.task_of(config), only(data), config.trainer
        if use_channels_last(config, device):  # as in training
            model.to(memory_format=torch.channels_last)
        classes, limit = part.num_classes, options.limit_eval_batches
        each = {
            split: scores(task, model, part.eval_loader(split), classes, device, options.precision, limit)
            for split in ("val", "test")
            if split in part.splits
        }
        found: Evaluated = {"accuracy": {split: of[task.metric] for split, of in each.items()}}
        further = {split: self.further_scores(of, part.class_names) for split, of in each.items()}
        if any(further.values()):
            found["scores"] = further
        return found

    def further_scores(self, scores: Mapping[str, float], class_names: Sequence[str]) -> dict[str, Any]:
        """Return the metrics for results.json in addition to the task's metric; empty if there are none."""
        return dict(scores) if len(scores) > 1 else {}

    def write_figures(self, folder: Path, data: RunData, device: torch.device) -> None:  # noqa: B027 (optional)
        """Write figures of the finished run into its folder. By default, there are none."""

    def samples(self, trained: Trained, data: OpenedData[Any, Any], device: torch.device) -> list[Sample]:
        """Return some samples of a data set with predictions, for loggers. By default, there are none.

        The samples belong to the split that selects the best epoch.
        """
        return []

    @abstractmethod
    def predictions(self, trained: Trained, options: PredictOptions) -> Predictions:
        """Return the predictions for the files in `options`. The network is on the device that predicts.

        Raises:
            UserError: If a file cannot be used.
        """

    def largest_batch(self, data: RunData) -> int | None:
        """Return the maximum number of samples in a training batch; None if it is not limited."""
        return int(only(data).splits["train"])

    def size_setting(self, config: Config) -> str:
        """Return the setting for the input size with its value."""
        size = factory.input_of(config.model).size
        return f"model.image_size={size[0] if size[0] == size[-1] else list(size)}"

    def evaluation_size(self, config: Config) -> str:
        """Return the setting or property that determines the size of evaluated samples."""
        return self.size_setting(config)

    def smaller_inputs(self, config: Config) -> list[Config]:
        """Return configurations with smaller square images, which the message of a memory budget suggests."""
        size, found = factory.input_of(config.model).size, []
        for factor in _SMALLER_IMAGES if size[0] == size[-1] else ():
            side = max(32, int(size[0] * factor) // 32 * 32)
            if side < size[0]:
                model = config.model.model_copy(update={"image_size": side})
                found.append(config.model_copy(update={"model": model}))
        return found

    def figure_input(self, evaluation: Reading) -> tuple[tuple[int, int], int] | None:
        """Return the size of the largest input for `write_figures`, and the bytes for reading it; None without figures.

        `evaluation` is the memory for reading evaluation batches.
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
) -> dict[str, float]:
    """Return the metrics of a task for at most `limit` batches (inputs, targets). The network is moved to `device`.

    `precision` is ``fp32``, or the autocast type ``bf16`` or ``fp16``.

    Raises:
        UserError: If an output is not finite.
    """
    model.eval().to(device)
    found = task.scores(classes, local=True).to(device)  # other processes of the run may have ended
    dtype = AUTOCAST[precision]
    finite = torch.ones((), dtype=torch.bool, device=device)
    for number, (inputs, targets) in enumerate(loader):
        if number == limit:
            break
        with torch.autocast(device.type, dtype=dtype) if dtype is not None else nullcontext():
            logits = task.evaluation_logits(model, moved(inputs, device))
        finite &= logits.isfinite().all()
        found.update(logits.float(), targets.to(device, non_blocking=True))
    if not finite:
        half = f" Try fp32 instead of trainer.precision={precision}." if dtype is not None else ""
        raise UserError(f"The network's outputs are not finite, so its weights cannot be used.{half}")
    return found.compute()


@contextmanager
def settings_of_task(task: str) -> Iterator[None]:
    """Replace ``data`` in errors about settings by ``tasks.TASK``, unless the name is empty."""
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
