"""Predict the memory of a run from counts.

The setting ``memory``, plans and the out-of-memory message use the prediction. A run has phases: it loads its network,
trains, evaluates, reads images, evaluates the saved weights, and measures its cost. The tensors of each phase are
counted in this module or by `cost.executed`. On a CPU, the predicted peak is the process size before the model is
created plus the largest phase. On a GPU, the predicted peak is the memory reserved on the device.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from efficient_ft.core.allocator import KEEPING
from efficient_ft.core.errors import UserError
from efficient_ft.core.fake import FakeTensors
from efficient_ft.cost.meter import Meter, storages
from efficient_ft.cost.probe import Probe, undisturbed
from efficient_ft.cost.step import AUTOCAST, StepSpec
from efficient_ft.task import tensors_of
from efficient_ft.task.base import at_size

#: Constants of `predicted_growth` for each allocator. The first constant is a fixed number of bytes (loaded code,
#: memory of threads). The second constant is the size of the temporaries of kernels and the allocator, in units of the
#: largest tensor. The third constant is a factor on the counted bytes, because the allocator cannot reuse all freed
#: memory. The constants were fitted with `bench memory` on an EPYC CPU with two threads, for full fine-tuning and for
#: 4-bit activations of nine networks (DeiT-S, ViT-Ti, ViT-B, SwinV2-T, ConvNeXt-T, ResNet-50, MobileNetV2, MobileViT-S,
#: EfficientFormer-L1). Predictions differ from the measured growth by -5 % to +15 % with tcmalloc, and by -8 % to +18 %
#: with mimalloc (five networks). `benchmarks/plans_cpu.json` covers other networks and recipes. If glibc keeps freed
#: memory, fragmentation increases the heap to up to four times the counted bytes.
_GROWTH = {
    "tcmalloc": (40 * 2**20, 2.0, 1.0),
    "mimalloc": (50 * 2**20, 3.0, 1.06),
    "system": (64 * 2**20, 4.0, 1.03),
    KEEPING: (64 * 2**20, 4.0, 3.0),
}
#: Size of the data that oneDNN keeps for products in 16 bits, in addition to the constants above. The value was found
#: with `bench memory` for DeiT-S with 12 recipes in bf16. Without it, the prediction for the stack bsr+low_bit+lbp_dct,
#: whose products have many different shapes, is 19 % too small.
_PRODUCTS_16 = 25 * 2**20
#: Safety margins on the predicted growth: a factor, and the size of the code and lists that a run loads later.
_SAFETY, RUN_ONLY = 1.06, 24 * 2**20
#: Memory for loading weights, relative to the size of the weights. The factor covers two networks, the tensors of the
#: file, and the mapped pages of the file.
_LOADING = 3.5
#: Size of the temporaries during evaluation, in units of the largest tensor, for all allocators.
_FORWARD_SCRATCH = 1.75
#: Batch size of the real run that is counted if a network cannot run on fake tensors in evaluation.
_FEW = 2


def predicted_growth(counted_bytes: int, largest_bytes: int, allocator: str) -> int:
    """Predict the growth of the process memory in a training step, in bytes (`ProcessMemory.growth_bytes` on a CPU).

    The prediction is fixed + scratch · `largest_bytes` + factor · `counted_bytes`. The constants fixed, scratch and
    factor depend on the allocator.

    Args:
        counted_bytes: ``Executed.step_peak_bytes`` plus the size of the optimizer's state.
        largest_bytes: ``Executed.largest_bytes``.
        allocator: allocator of the process (see `core.allocator.allocator_in_use`).
    """
    fixed, scratch, factor = _GROWTH[allocator]
    return round(fixed + scratch * largest_bytes + factor * counted_bytes)


def bounded_growth(counted_bytes: int, largest_bytes: int, allocator: str) -> int:
    """Return `predicted_growth` with a safety margin."""
    return round(_SAFETY * predicted_growth(counted_bytes, largest_bytes, allocator))


@dataclass(frozen=True)
class Forward:
    """Counted memory of one evaluation batch.

    Attributes:
        batch_bytes: size of the inputs and targets.
        peak_bytes: peak size of the live tensors, without the model and the batch.
        largest_bytes: size of the largest tensor that an operation creates.
    """

    batch_bytes: int = 0
    peak_bytes: int = 0
    largest_bytes: int = 0

    def scaled(self, factor: float) -> Forward:
        """Return the counts of a batch that is `factor` times as large."""
        return Forward(*(round(value * factor) for value in (self.batch_bytes, self.peak_bytes, self.largest_bytes)))


def _forward_bytes(forward: Forward, allocator: str) -> int:
    """Return the memory for evaluating a batch, in bytes.

    Without gradients, fewer large tensors are alive at the same time, so less scratch memory is needed.
    """
    scratch = min(1.0, _FORWARD_SCRATCH / _GROWTH[allocator][1])
    return forward.batch_bytes + bounded_growth(forward.peak_bytes, round(scratch * forward.largest_bytes), allocator)


@dataclass(frozen=True)
class Demand:
    """Counted memory for each phase of a run.

    Attributes:
        weights_bytes: size of the network's parameters and buffers, without those that methods add.
        model_bytes: size of the network's parameters and buffers, including those that methods add.
        batch_bytes: size of a training batch.
        step_bytes: peak memory of a training step, including the optimizer state and accumulated gradients, but not the
            model or the batch.
        largest_bytes: size of the largest tensor that an operation of the step creates.
        optimizer_bytes: size of the optimizer's state and of the averaged weights, which are included in `step_bytes`.
        gradient_bytes: size of the gradients that stay allocated between micro-batches.
        evaluation: counts of an evaluation batch.
        load_bytes: memory for reading and decoding a training batch in this process.
        evaluation_load_bytes: memory for reading and decoding an evaluation batch.
        examples: counts of predicting one example at its original size. A run predicts examples after training.
        examples_load_bytes: memory for reading all examples.
        inspection_bytes: memory for decoding samples before training.
        pretrained: True if the weights are read from a file.
        copies: number of network copies that the frozen prefix or the cost report creates.
        resumed: True if the run continues from a checkpoint.
        autocast: True if the step computes products in 16 bits.
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
    autocast: bool = False

    def phases(self, allocator: str) -> dict[str, int]:
        """Return the predicted memory of each phase in bytes, without the process size before the model is created."""
        weights, state = self.weights_bytes, self.optimizer_bytes + self.gradient_bytes
        fixed = _GROWTH[allocator][0]
        forward = self.evaluation
        evaluating = _forward_bytes(forward, allocator)
        step = self.batch_bytes + bounded_growth(self.step_bytes, self.largest_bytes, allocator)
        step += _PRODUCTS_16 if self.autocast else 0
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
    """Predicted memory of a run.

    Attributes:
        base_bytes: process size before the model is created (interpreter and libraries), or 0 on a GPU.
        phases: memory of each phase in bytes, in addition to `base_bytes`.
    """

    base_bytes: int
    phases: dict[str, int]

    @property
    def phase(self) -> str:
        """Name of the phase that needs the most memory."""
        return max(self.phases, key=self.phases.__getitem__)

    @property
    def peak_bytes(self) -> int:
        """Peak memory of the process or, on a GPU, peak memory reserved on the device."""
        return self.base_bytes + self.phases[self.phase]


def predict(demand: Demand, base_bytes: int, allocator: str, device: str) -> Prediction:
    """Predict the memory of a run.

    Args:
        demand: counted memory for each phase of the run.
        base_bytes: resident memory before the model is created, including the libraries that the run loads later.
        allocator: allocator of the process (see `core.allocator.allocator_in_use`).
        device: type of the device. For types other than ``cuda``, the memory of the process is predicted.
    """
    if device == "cuda":  # the factor 1.1 accounts for rounded sizes and unused blocks in the caching allocator
        forward = demand.evaluation
        training = demand.model_bytes + demand.batch_bytes + demand.step_bytes
        evaluation = demand.model_bytes + demand.optimizer_bytes + forward.batch_bytes + forward.peak_bytes
        return Prediction(0, {"training": round(1.1 * training), "evaluation": round(1.1 * evaluation)})
    phases = {name: RUN_ONLY + size for name, size in demand.phases(allocator).items()}
    return Prediction(base_bytes, phases)


def count_evaluation(
    network: nn.Module,
    spec: StepSpec,
    batch_size: int,
    size: tuple[int, ...],
    methods: Iterable[Any] = (),
    evaluating: Callable[[nn.Module], AbstractContextManager[Any]] = nullcontext,
) -> Forward:
    """Count the memory of evaluating one batch on fake tensors: forward pass, logits at the target size, and metrics.

    Args:
        network: network of the run, on any device.
        spec: settings of the training step. Only the task, the channels and the precision are used.
        batch_size: number of samples in the batch.
        size: (H, W) of the images, or (L,) of texts.
        methods: methods that have an effect in evaluation.
        evaluating: function that receives the network and returns a context manager. The forward pass runs in the
            context, under autocast.
    """
    probe = Probe(network, methods, replace(spec, batch_size=batch_size))
    with undisturbed():
        try:
            return _forward(probe, batch_size, size, evaluating, fake=True)
        except UserError:
            raise
        except Exception:  # the model does not support fake tensors
            few = min(batch_size, _FEW)
            return _forward(probe, few, size, evaluating, fake=False).scaled(batch_size / few)


def _forward(
    probe: Probe,
    samples: int,
    size: tuple[int, ...],
    evaluating: Callable[[nn.Module], AbstractContextManager[Any]],
    fake: bool,
) -> Forward:
    spec, task = replace(probe.spec, input_size=size), probe.spec.task
    with FakeTensors() if fake else nullcontext() as mode:
        model, _ = probe.copy(mode)
        model.eval()
        inputs, targets = spec.example(model, samples)
        batch = [*tensors_of(inputs), targets]
        state = [*model.parameters(), *model.buffers()]
        meter = Meter([*state, *batch])
        with (
            meter,
            torch.no_grad(),
            torch.autocast("cpu", dtype=spec.dtype, enabled=AUTOCAST[spec.precision] is not None),
        ):
            with evaluating(model):
                logits = task.evaluation_logits(model, inputs).float()
            if logits.ndim > 2:
                logits = at_size(logits, targets)
            task.loss(logits, targets)
            # Metrics create three tensors: the predicted classes, the labels and a combination of both.
            held = [logits.argmax(1) for _ in range(3)]
            del held
    resident = sum(storages(state).values()) + sum(storages(batch).values())
    return Forward(sum(storages(batch).values()), meter.peak - resident, meter.largest)
