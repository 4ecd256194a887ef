"""Predict the memory of a whole run from counts: the setting ``memory``, plans and the out-of-memory message use it.

A run has phases: it loads its network, trains, evaluates, reads images, evaluates the weights that it saved, and
measures its cost. Each needs tensors that are counted here or by `cost.executed`. On a CPU the peak of the process is
its size before the model and the largest phase; on a GPU the prediction is of the memory reserved on the device.
"""

from __future__ import annotations

from collections.abc import Iterable
from contextlib import nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from efficient_ft.core.allocator import KEEPING
from efficient_ft.core.errors import UserError
from efficient_ft.cost.meter import Meter, storages
from efficient_ft.cost.probe import Probe, undisturbed
from efficient_ft.cost.step import AUTOCAST, StepSpec
from efficient_ft.task import tensors_of
from efficient_ft.task.base import at_size

#: By allocator: fixed bytes, scratch and factor of `predicted_growth`. The fixed part is code that the steps load and
#: the threads' own memory, scratch what kernels and the allocator take for a few large tensors at a time, and the
#: factor what an allocator cannot reuse. Found with `bench memory` on an EPYC, two threads, full fine-tuning and 4-bit
#: activations of DeiT-S, ViT-Ti, ViT-B, SwinV2-T, ConvNeXt-T, ResNet-50, MobileNetV2, MobileViT-S,
#: EfficientFormer-L1: with tcmalloc predictions are between 5 % below and 15 % above the growth measured, with mimalloc
#: (five of these networks) between 8 % below and 18 % above. Other networks and recipes: `benchmarks/plans_cpu.json`.
#: glibc with settings that keep freed memory splits its heap: up to four times the counted bytes.
_GROWTH = {
    "tcmalloc": (40 * 2**20, 2.0, 1.0),
    "mimalloc": (50 * 2**20, 3.0, 1.06),
    "system": (64 * 2**20, 4.0, 1.03),
    KEEPING: (64 * 2**20, 4.0, 3.0),
}
#: A phase may grow by this factor more than predicted, and by these bytes: code that a run loads late, and its lists.
_SAFETY, RUN_ONLY = 1.06, 24 * 2**20
#: Bytes of reading a file of weights, relative to the weights: two networks, the tensors of the file, and its pages.
_LOADING = 3.5
#: Scratch of evaluation, with every allocator.
_FORWARD_SCRATCH = 1.75
#: Images of a real run that replaces fake tensors if these cannot follow a network in evaluation.
_FEW = 2


def predicted_growth(counted_bytes: int, largest_bytes: int, allocator: str) -> int:
    """Predict the growth of the process over a training step, in bytes (`Felt.growth_bytes` on a CPU).

    It is fixed + scratch · largest tensor + factor · counted bytes, with numbers of the allocator.

    Args:
        counted_bytes: ``Executed.step_peak_bytes`` and the optimizer's state.
        largest_bytes: ``Executed.largest_bytes``.
        allocator: of the process, see `core.allocator.allocator_in_use`.
    """
    fixed, scratch, factor = _GROWTH[allocator]
    return round(fixed + scratch * largest_bytes + factor * counted_bytes)


def bounded_growth(counted_bytes: int, largest_bytes: int, allocator: str) -> int:
    """A growth that a run does not exceed."""
    return round(_SAFETY * predicted_growth(counted_bytes, largest_bytes, allocator))


@dataclass(frozen=True)
class Forward:
    """Counted bytes of one evaluation batch.

    Attributes:
        batch_bytes: of the inputs and targets.
        peak_bytes: the peak of live tensors above model and batch.
        largest_bytes: of the largest tensor that an operation makes.
    """

    batch_bytes: int = 0
    peak_bytes: int = 0
    largest_bytes: int = 0

    def scaled(self, factor: float) -> Forward:
        """The counts of a batch that is `factor` times as large."""
        return Forward(*(round(value * factor) for value in (self.batch_bytes, self.peak_bytes, self.largest_bytes)))


def _forward_bytes(forward: Forward, allocator: str) -> int:
    """Bytes of evaluating a batch. Passes without gradients hold few large tensors: less is lost to scratch."""
    scratch = min(1.0, _FORWARD_SCRATCH / _GROWTH[allocator][1])
    return forward.batch_bytes + bounded_growth(forward.peak_bytes, round(scratch * forward.largest_bytes), allocator)


@dataclass(frozen=True)
class Demand:
    """Counted bytes of the phases of a run.

    Attributes:
        weights_bytes: of the network's parameters and buffers, without what methods add.
        model_bytes: of the network with its methods.
        batch_bytes: of a training batch.
        step_bytes: the peak of a training step above model and batch, with optimizer state and accumulated gradients.
        largest_bytes: of the largest tensor that an operation of the step makes.
        optimizer_bytes: of the optimizer's state, part of `step_bytes`.
        gradient_bytes: of gradients that live between micro-batches.
        evaluation: of an evaluation batch.
        load_bytes: of reading and decoding a training batch in this process.
        evaluation_load_bytes: the same of an evaluation batch.
        examples: of predicting an example after the training, in its own size.
        examples_load_bytes: of reading all examples.
        inspection_bytes: of decoding samples before training.
        pretrained: the weights are read from a file.
        copies: copies of the network that the prefix or the cost report makes.
        resumed: the run continues from a checkpoint.
    """

    weights_bytes: int
    model_bytes: int
    batch_bytes: int
    step_bytes: int
    largest_bytes: int
    optimizer_bytes: int
    gradient_bytes: int = 0
    evaluation: Forward = Forward()
    load_bytes: int = 0
    evaluation_load_bytes: int = 0
    examples: Forward = Forward()
    examples_load_bytes: int = 0
    inspection_bytes: int = 0
    pretrained: bool = True
    copies: int = 0
    resumed: bool = False

    def phases(self, allocator: str) -> dict[str, int]:
        """Bytes of each phase above the size of the process before the model, without a margin on growth.

        Args:
            allocator: of the process, see `core.allocator.allocator_in_use`.
        """
        weights, state = self.weights_bytes, self.optimizer_bytes + self.gradient_bytes
        fixed = _GROWTH[allocator][0]
        forward = self.evaluation
        evaluating = _forward_bytes(forward, allocator)
        step = self.batch_bytes + bounded_growth(self.step_bytes, self.largest_bytes, allocator)
        load = fixed + 2 * self.batch_bytes + self.load_bytes
        evaluation_load = fixed + 2 * forward.batch_bytes + self.evaluation_load_bytes
        found = {
            "inspecting the data": self.inspection_bytes,
            "loading the weights": round((_LOADING if self.pretrained else 1) * weights),
            "training": self.model_bytes + self.copies * weights + step,
            "reading training batches": self.model_bytes + state + load,
            "evaluation": self.model_bytes + self.copies * weights + self.optimizer_bytes + evaluating,
            "reading evaluation batches": self.model_bytes + self.optimizer_bytes + evaluation_load,
            "loading the saved weights": self.model_bytes + round(_LOADING * weights) + fixed,
            "evaluating the saved weights": self.model_bytes + weights + max(evaluating, evaluation_load),
            "predicting examples": self.model_bytes
            + weights
            + self.examples_load_bytes
            + _forward_bytes(self.examples, allocator),
            "counting the cost": self.model_bytes + (1 + self.copies) * weights + fixed,
        }
        if self.resumed:
            found["continuing"] = 2 * (self.model_bytes + self.optimizer_bytes) + fixed
        return found


@dataclass(frozen=True)
class Prediction:
    """The predicted memory of a run.

    Attributes:
        base_bytes: of the process before the model: interpreter and libraries; 0 on a GPU.
        phases: bytes of each phase above that.
    """

    base_bytes: int
    phases: dict[str, int]

    @property
    def phase(self) -> str:
        """The largest phase."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """The peak of the process, or of what is reserved on the device."""
        return self.base_bytes + self.phases[self.phase]


def predict(demand: Demand, base_bytes: int, allocator: str, device: str) -> Prediction:
    """Predict the memory of a run.

    Args:
        demand: counts of its phases.
        base_bytes: resident memory before the model, in bytes, with the libraries that the run loads later.
        allocator: of the process, see `core.allocator.allocator_in_use`.
        device: type of the device: ``cuda``, or another one, where the process counts.
    """
    if device == "cuda":  # the allocator rounds, and keeps blocks
        forward = demand.evaluation
        training = demand.model_bytes + demand.batch_bytes + demand.step_bytes
        evaluation = demand.model_bytes + demand.optimizer_bytes + forward.batch_bytes + forward.peak_bytes
        return Prediction(0, {"training": round(1.1 * training), "evaluation": round(1.1 * evaluation)})
    phases = {name: RUN_ONLY + size for name, size in demand.phases(allocator).items()}
    return Prediction(base_bytes, phases)


def count_evaluation(
    network: nn.Module, spec: StepSpec, batch_size: int, size: tuple[int, ...], methods: Iterable[Any] = ()
) -> Forward:
    """Count the evaluation of one batch on fake tensors: forward pass, logits at the size of the targets, metrics.

    Args:
        network: of the run, on any device.
        spec: the settings of its training step; its task and precision count.
        batch_size: samples of the batch.
        size: (H, W) of the images, or (L,) of texts.
        methods: those that take part in evaluation.
    """
    probe = Probe(network, methods, replace(spec, batch_size=batch_size))
    with undisturbed():
        try:
            return _forward(probe, batch_size, size, fake=True)
        except UserError:
            raise
        except Exception:  # anything that fake tensors cannot do
            few = min(batch_size, _FEW)
            return _forward(probe, few, size, fake=False).scaled(batch_size / few)


def _forward(probe: Probe, samples: int, size: tuple[int, ...], fake: bool) -> Forward:
    """Watch one evaluation batch."""
    spec, task = probe.spec, probe.spec.task
    with FakeTensorMode(allow_non_fake_inputs=True) if fake else nullcontext() as mode:
        model, _ = probe.copy(mode)
        model.eval()
        inputs = task.example_inputs(samples, spec.in_chans, size)
        targets = task.example_targets(samples, size)
        batch = [*tensors_of(inputs), targets]
        state = [*model.parameters(), *model.buffers()]
        meter = Meter([*state, *batch])
        with (
            meter,
            torch.no_grad(),
            torch.autocast("cpu", dtype=spec.dtype, enabled=AUTOCAST[spec.precision] is not None),
        ):
            logits = task.evaluation_logits(model, inputs).float()
            if logits.ndim > 2:
                logits = at_size(logits, targets)
            task.loss(logits, targets)
            # Metrics hold classes, labels and their combination.
            held = [logits.argmax(1) for _ in range(3)]
            del held
    resident = sum(storages(state).values()) + sum(storages(batch).values())
    return Forward(sum(storages(batch).values()), meter.peak - resident, meter.largest)
