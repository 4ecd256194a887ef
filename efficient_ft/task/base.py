"""The interface of a task."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.core.errors import UserError
from efficient_ft.core.input_spec import IGNORED
from efficient_ft.core.inputs import Inputs
from efficient_ft.task.class_metrics import Outcomes


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """Return the tensors in a batch of inputs."""
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def moved(inputs: Inputs, device: torch.device | str) -> Inputs:
    """Move a batch of inputs to a device."""
    if isinstance(inputs, Mapping):
        return {name: x.to(device, non_blocking=True) for name, x in inputs.items()}
    return inputs.to(device, non_blocking=True)


def at_size(logits: Tensor, targets: Tensor) -> Tensor:
    """Resize logits (B, classes, h, w) bilinearly to the size of masks (B, H, W)."""
    if logits.shape[-2:] == targets.shape[-2:]:
        return logits
    return F.interpolate(logits, size=targets.shape[-2:], mode="bilinear", align_corners=False)


def total_weight(targets: Tensor, class_weights: Tensor) -> Tensor:
    """Return the sum of the class weights over all targets, as a scalar tensor.

    `targets` contains classes, int64 (B, ...), or probabilities of the classes, float32 (B, classes), as MixUp returns
    them. The ignore index has the weight 0.
    """
    if targets.is_floating_point():
        return (targets @ class_weights).sum()
    return torch.cat([class_weights, class_weights.new_zeros(1)])[targets.where(targets != IGNORED, -1)].sum()


class Task(ABC):
    """The base class of all tasks. A task runs a network, computes its loss, and evaluates its predictions.

    Attributes:
        name: value of the setting ``task`` that selects this task.
        metric: name of the metric that selects the best epoch. The metric is a fraction, and larger values are better.
        item: noun for the unit that is assigned to one class: image, pixel or text.
        sample: noun for one sample of a batch: image or text.
        input_dimensions: number of entries of an input size: 2 for images (height, width), 1 for sequences (length).
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    item: ClassVar[str]
    sample: ClassVar[str] = "image"
    input_dimensions: ClassVar[int] = 2

    def logits(self, model: nn.Module, inputs: Inputs, **options: Any) -> Tensor:
        """Run a network, with further arguments in `options`, and return its logits.

        The network must return the logits as a tensor, or an object with an attribute `logits`, like models from
        `transformers`.

        Returns:
            The logits (B, classes, ...). Any further dimensions are positions, such as pixels.

        Raises:
            UserError: If the output of the network has a wrong type or a wrong number of dimensions.
        """
        output: Any = model(**inputs, **options) if isinstance(inputs, Mapping) else model(inputs, **options)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != self._dimensions:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(f"{type(model).__name__} must return logits of shape {self._shape}, got {found}.")
        return logits

    #: Number of dimensions of the logits, and the names of the dimensions for error messages.
    _dimensions: ClassVar[int]
    _shape: ClassVar[str]

    #: True if `loss` accepts the argument `class_weights`, float32 (classes,), which may be None. The loss is then the
    #: weighted mean over the items, where the weight of an item is the weight of its target.
    weighs_classes: ClassVar[bool] = False

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """Return the mean loss of a batch as a scalar tensor.

        `targets` has dtype int64 and shape (B, ...). Any further dimensions are positions, such as pixels. If the
        targets are not classes, they are floats of the shape of the logits.
        """

    def labeled(self, targets: Tensor) -> Tensor | None:
        """Return the number of items over which `loss` averages, or None if each sample is one item.

        The number is returned as a scalar tensor.
        """
        return None

    def predicted(self, logits: Tensor) -> Tensor | None:
        """Return the predicted class of each item (int64), or None if the predictions are not classes."""
        return logits.argmax(1)

    def chance_loss(self, num_classes: int) -> float:
        """Return the loss of predictions that do not depend on the input.

        By default, all classes are predicted with the same probability.
        """
        return math.log(num_classes)

    @property
    def class_metric(self) -> str:
        """The name of the metric of each class."""
        return self.metric

    def evaluation_logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Run a network for evaluation, and return its logits. See `logits`."""
        return self.logits(model, inputs)

    @abstractmethod
    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        """Return new metrics for the predictions of a network.

        If `local` is True, the metrics are not synchronized with other processes.
        """

    @abstractmethod
    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        """Return targets of class 0 for a batch. These targets are used to count the cost of a step without data.

        `input_size` is (H, W) for images and (length,) for sequences.
        """

    def example_inputs(
        self, batch_size: int, channels: int, input_size: tuple[int, ...], generator: torch.Generator | None = None
    ) -> Inputs:
        """Return a random batch: images (B, C, H, W), or a mapping with token ids (B, L) and a mask (B, L)."""
        return torch.randn(batch_size, channels, *input_size, generator=generator)


class Scores(nn.Module, ABC):
    """Metrics that accumulate the predictions of one evaluation.

    This class is a module, so that Lightning moves the metrics to the device.
    """

    @abstractmethod
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add the predictions of a batch."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """Return the metrics over all batches since the last `reset`. The first metric is `Task.metric`."""

    def notes(self) -> dict[str, Any]:
        """Return metadata of model.safetensors that depend on these predictions, such as thresholds."""
        return {}

    @abstractmethod
    def each_class(self) -> dict[int, float]:
        """Return the metric of each class that occurs in the targets or predictions, keyed by class index."""

    def correct(self) -> Tensor | None:
        """Return a Boolean tensor (samples,) that is True for correct predictions, in the order of the updates.

        The result is None if these metrics do not keep the predictions of individual samples.
        """
        return None

    def outcomes(self) -> Outcomes | None:
        """Return the predictions of individual samples, or None if these metrics do not keep class predictions."""
        return None

    def samples(self) -> dict[str, np.ndarray]:
        """Return the predictions of individual samples for predictions.npz (`record.predictions`).

        The result is empty if these metrics do not keep the predictions of individual samples.
        """
        return {}

    def labels(self) -> dict[str, list[Any]] | None:
        """Return the results for each label (`record.class_results.LabelResults`), or None without labels."""
        return None

    @abstractmethod
    def reset(self) -> None:
        """Discard all batches."""
