"""The interface of a task: running a network, its loss, and the measure of its predictions."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from efficient_ft.core.errors import UserError

#: What a network is given: a batch of images, or several tensors by the names of its arguments.
Inputs = Tensor | Mapping[str, Tensor]


def tensors_of(inputs: Inputs) -> list[Tensor]:
    """The tensors of a batch of inputs."""
    return list(inputs.values()) if isinstance(inputs, Mapping) else [inputs]


def moved(inputs: Inputs, device: torch.device | str) -> Inputs:
    """Move a batch of inputs to a device."""
    if isinstance(inputs, Mapping):
        return {name: x.to(device, non_blocking=True) for name, x in inputs.items()}
    return inputs.to(device, non_blocking=True)


def at_size(logits: Tensor, targets: Tensor) -> Tensor:
    """Resize logits (B, classes, h, w) to the size of masks (B, H, W), bilinearly."""
    if logits.shape[-2:] == targets.shape[-2:]:
        return logits
    return F.interpolate(logits, size=targets.shape[-2:], mode="bilinear", align_corners=False)


class Task(ABC):
    """A kind of prediction.

    Attributes:
        name: as in ``task=NAME``.
        metric: name of the measure that chooses the best epoch; a fraction, the larger the better.
        item: what has one class, in a word.
        sample: what a batch consists of, in a word.
        input_dimensions: number of entries of an input size: 2 of images (height, width), 1 of sequences (length).
    """

    name: ClassVar[str]
    metric: ClassVar[str]
    item: ClassVar[str]
    sample: ClassVar[str] = "image"
    input_dimensions: ClassVar[int] = 2

    def logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Run a network.

        Args:
            model: returns logits, or an object with them in `logits` (those of transformers).
            inputs: a batch.

        Returns:
            The logits: (B, classes), with further dimensions for the positions where there are some.

        Raises:
            UserError: the network returns something else.
        """
        output: Any = model(**inputs) if isinstance(inputs, Mapping) else model(inputs)
        logits = getattr(output, "logits", output)
        if not isinstance(logits, Tensor) or logits.ndim != self._dimensions:
            found = tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__
            raise UserError(f"{type(model).__name__} must return logits {self._shape}, got {found}.")
        return logits

    #: The number of dimensions of the logits, and these dimensions in words.
    _dimensions: ClassVar[int]
    _shape: ClassVar[str]

    @abstractmethod
    def loss(self, logits: Tensor, targets: Tensor, label_smoothing: float = 0.0) -> Tensor:
        """The mean loss of a batch, a scalar.

        Args:
            logits: of `logits`.
            targets: int64, (B,), with further dimensions for the positions where there are some.
            label_smoothing: of cross-entropy.
        """

    def labeled(self, targets: Tensor) -> Tensor | None:
        """Number of items that the mean of `loss` is taken over, a scalar; None: one per sample."""
        return None

    def predicted(self, logits: Tensor) -> Tensor | None:
        """Return the predicted class of each item, int64; None if predictions are not classes."""
        return logits.argmax(1)

    def chance_loss(self, num_classes: int) -> float:
        """Return the loss of predictions that know nothing, here of equal probabilities."""
        return math.log(num_classes)

    @property
    def class_metric(self) -> str:
        """The name of the metric of a single class."""
        return self.metric

    def evaluation_logits(self, model: nn.Module, inputs: Inputs) -> Tensor:
        """Run a network as in evaluation; see `logits`."""
        return self.logits(model, inputs)

    @abstractmethod
    def scores(self, num_classes: int, *, local: bool = False) -> Scores:
        """A new measure of the predictions of a network.

        Args:
            num_classes: number of classes.
            local: of this process only; False: of all processes of a run together.
        """

    @abstractmethod
    def example_targets(self, batch_size: int, input_size: tuple[int, ...]) -> Tensor:
        """Targets of class 0 for a batch, to take and count training steps without data.

        Args:
            batch_size: B.
            input_size: (H, W) of images; (length,) of sequences.
        """

    def example_inputs(
        self, batch_size: int, channels: int, input_size: tuple[int, ...], generator: torch.Generator | None = None
    ) -> Inputs:
        """Random inputs of a batch: images (B, C, H, W), or token ids and their mask (B, L) by name."""
        return torch.randn(batch_size, channels, *input_size, generator=generator)


class Scores(nn.Module, ABC):
    """Collects the predictions of one evaluation; a module, so that Lightning moves its metrics to the device."""

    @abstractmethod
    def update(self, logits: Tensor, targets: Tensor) -> None:
        """Add a batch."""

    @abstractmethod
    def compute(self) -> dict[str, float]:
        """The measures of all batches since the last `reset`, the task's `metric` first."""

    @abstractmethod
    def each_class(self) -> dict[int, float]:
        """The measure of each class that the batches or predictions had, by its number."""

    @abstractmethod
    def reset(self) -> None:
        """Start again."""
