"""Settings, methods and execution of the training steps that are counted or timed.

This module does not import methods: any object with the attributes listed in `StepMethods` can take part in a step.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypedDict

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from efficient_ft.core.errors import SettingError
from efficient_ft.core.process_memory import release_freed_memory
from efficient_ft.cost.meter import storages
from efficient_ft.models.frozen_batch_norm import FrozenStatistics, freeze_batch_norm
from efficient_ft.models.view.probe import options_for
from efficient_ft.models.weight_dtype import stores_bf16
from efficient_ft.task import Classification, Inputs, Task, moved, tensors_of

#: Autocast dtype of each precision, or None for no autocast.
AUTOCAST: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

BuildOptimizer = Callable[[nn.Module], torch.optim.Optimizer]


class StepOptions(TypedDict, total=False):
    """Settings of a `StepSpec` that have defaults, as keyword arguments for `executed` and similar functions."""

    precision: str
    label_smoothing: float
    in_chans: int
    frozen_bn: FrozenStatistics
    grad_clip_norm: float | None
    task: Task


@dataclass(frozen=True)
class StepSpec:
    """Settings of one training step.

    Args:
        batch_size: number of samples in the batch.
        input_size: (height, width) of the images in pixels, or (tokens,) for texts.
        precision: ``fp32`` for no autocast, or ``bf16`` or ``fp16`` for autocast to this dtype.
        label_smoothing: amount of label smoothing in the cross-entropy loss.
        in_chans: number of image channels.
        frozen_bn: if True, BatchNorm layers use their running statistics, as runs do by default. If ``frozen_part``,
            only layers whose weight and bias are not trained use them.
        grad_clip_norm: maximum norm of the gradient of all parameters. If None, the gradient is not clipped. The cost
            of clipping is not counted.
        task: task that defines the logits and the loss.

    Raises:
        SettingError: If a value is outside its range.
    """

    batch_size: int
    input_size: Sequence[int]
    precision: str = "fp32"
    label_smoothing: float = 0.0
    in_chans: int = 3
    frozen_bn: FrozenStatistics = True
    grad_clip_norm: float | None = None
    task: Task = field(default_factory=Classification)

    def __post_init__(self) -> None:
        if self.precision not in AUTOCAST:
            raise SettingError("precision", self.precision, list(AUTOCAST))
        if self.task.input_dimensions == len(self.input_size) == 1:
            require_positive("input_size", self.input_size[0])
        else:
            if len(self.input_size) != 2 or any(not isinstance(side, int) or side < 1 for side in self.input_size):
                raise SettingError("input_size", tuple(self.input_size), "a pair (height, width) of integers >= 1")
            require_positive("in_chans", self.in_chans)
        require_positive("batch_size", self.batch_size)

    @property
    def dtype(self) -> torch.dtype | None:
        """Autocast dtype, or None for no autocast."""
        return AUTOCAST[self.precision]

    def example(
        self, model: nn.Module, batch_size: int, generator: torch.Generator | None = None
    ) -> tuple[Inputs, Tensor]:
        """Return random inputs of `model`, and targets that all have class 0.

        Without autocast, images have the dtype of the model.
        """
        size = tuple(self.input_size)
        inputs = self.task.example_inputs(batch_size, self.in_chans, size, generator)
        if isinstance(inputs, Tensor) and self.dtype is None and not stores_bf16(model):
            inputs = inputs.to(next((p.dtype for p in model.parameters() if p.is_floating_point()), inputs.dtype))
        return inputs, self.task.example_targets(batch_size, size)


def require_positive(setting: str, value: int) -> None:
    """Raise a SettingError unless `value` is an integer >= 1."""
    if not isinstance(value, int) or value < 1:
        raise SettingError(setting, value, "an integer >= 1")


class StepMethods:
    """Methods of a step, which are called in the same order as in a training loop.

    Any object can be a method. All of the following attributes are optional:

    * ``step_begin(step)``: called before the forward pass of optimizer step `step`.
    * ``step_end()``: called after the optimizer step, before gradients are set to zero.
    * ``total_loss(loss)``: returns the loss to minimize, given the loss of the model.
    * ``apply(model)`` and ``applied``: an object whose ``applied`` is None is first applied to the model. Objects are
      applied in the order of the sort key ``application_order``. Objects without a sort key are applied last.
    * ``warmup_steps``: number of steps at the start whose cost differs from the cost of later steps. Default: 0.
    * ``cost_steps``: number of steps over which the cost is averaged. Default: 1.
    """

    def __init__(self, methods: Iterable[Any] = ()) -> None:
        self.methods = list(methods)

    def __iter__(self) -> Iterator[Any]:
        return iter(self.methods)

    @property
    def all_applied(self) -> bool:
        """Return True if all methods are applied."""
        return not any(getattr(method, "applied", True) is None for method in self.methods)

    @property
    def warmup_steps(self) -> int:
        """Number of steps at the start whose cost differs from the cost of later steps."""
        return max((getattr(method, "warmup_steps", 0) for method in self.methods), default=0)

    @property
    def cost_steps(self) -> int:
        """Number of steps over which the cost is averaged."""
        return max((getattr(method, "cost_steps", 1) for method in self.methods), default=1)

    def apply(self, model: nn.Module) -> None:
        """Apply all methods to `model`. Methods that are already applied are not applied again."""
        last = (sys.maxsize, "")
        for method in sorted(self.methods, key=lambda method: getattr(method, "application_order", last)):
            if hasattr(method, "apply"):
                method.apply(model)

    def begin(self, step: int) -> None:
        """Call ``step_begin(step)`` on all methods."""
        for method in self.methods:
            if hasattr(method, "step_begin"):
                method.step_begin(step)

    def end(self) -> None:
        """Call ``step_end()`` on all methods."""
        for method in self.methods:
            if hasattr(method, "step_end"):
                method.step_end()

    def loss(self, loss: Tensor) -> Tensor:
        """Return the loss to minimize, given the loss of the model."""
        for method in self.methods:
            if hasattr(method, "total_loss"):
                loss = method.total_loss(loss)
        return loss


def forward_and_loss(
    model: nn.Module, methods: StepMethods, inputs: Inputs, targets: Tensor, spec: StepSpec
) -> tuple[Tensor, Tensor]:
    """Run the forward pass of a step and compute the loss under autocast.

    Args:
        inputs: images (B, C, H, W), or a dict from argument names to tensors.
        targets: class indices (B,), or (B, ...) for tasks with one class per position.

    Returns:
        The logits and the loss to minimize.

    Raises:
        UserError: If the model does not return logits.
    """
    with torch.autocast(targets.device.type, dtype=spec.dtype, enabled=spec.dtype is not None):
        options = options_for(model, inputs.shape[2:]) if isinstance(inputs, Tensor) else {}
        logits = spec.task.logits(model, inputs, **options)
        loss = methods.loss(spec.task.loss(logits, targets, spec.label_smoothing))
    # Leaving autocast clears the cache of cast weights, unless an outer context exists (`undisturbed`). The casts would
    # then stay until the end of the backward pass, and a second step would reuse them.
    torch.clear_autocast_cache()
    return logits, loss


def optimizer_state_bytes(optimizer: torch.optim.Optimizer) -> int:
    """Return the size of the state of `optimizer` in bytes. The size is 0 before the first step."""
    state = (value for of in optimizer.state.values() for value in of.values() if isinstance(value, Tensor))
    return sum(storages(plain for value in state for plain in _plain_tensors(value)).values())


def _plain_tensors(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the plain tensors in a tensor subclass (quantized optimizer state), or `tensor` if it is a plain tensor."""
    if not is_traceable_wrapper_subclass(tensor):
        yield tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        yield from _plain_tensors(getattr(tensor, name))


class TrainingStep:
    """Training steps of a model on one random batch, as in a plain PyTorch loop.

    Call `forward`, `backward` and `update` in this order, or call the object to run all three methods. The steps change
    the model, so pass a copy.

    Args:
        model: network.
        methods: methods that are already applied to `model`.
        spec: settings of the step.
        device: device of the step.
        first_step: number of the first step.
        build_optimizer: function that builds an optimizer for the model. If None, AdamW is used.
        replace: function that receives the inputs and returns a context manager. The forward pass receives the value
            that the context manager returns on entry instead of the inputs. If None, the inputs are not replaced.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Iterable[Any],
        spec: StepSpec,
        *,
        device: torch.device | str = "cpu",
        first_step: int = 0,
        build_optimizer: BuildOptimizer | None = None,
        replace: Callable[[Any], AbstractContextManager[Any]] | None = None,
    ) -> None:
        self.spec, self.device = spec, torch.device(device)
        self.model = model.to(self.device).train()
        freeze_batch_norm(self.model, spec.frozen_bn)
        self.methods = StepMethods(methods)
        generator = torch.Generator().manual_seed(0)
        inputs, labels = spec.example(self.model, spec.batch_size, generator)
        self.inputs, self.labels = moved(inputs, self.device), labels.to(self.device)
        self.steps, self._first = first_step, True
        self._loss: Tensor | None = None
        self._build_optimizer = build_optimizer
        self._replace = replace or nullcontext
        self._optimizer: torch.optim.Optimizer | None = None

    def forward(self) -> None:
        """Run the forward pass and compute the loss."""
        if self._optimizer is None:  # build the optimizer before a method freezes parameters for this step
            self._optimizer = (self._build_optimizer or self._adamw)(self.model)
        self.methods.begin(self.steps)
        device, dtype = self.labels.device.type, self.spec.dtype
        with torch.autocast(device, dtype=dtype, enabled=dtype is not None), self._replace(self.inputs) as inputs:
            _, self._loss = forward_and_loss(self.model, self.methods, inputs, self.labels, self.spec)

    def _adamw(self, model: nn.Module) -> torch.optim.Optimizer:
        # As in runs, AdamW is fused, because the foreach implementation creates temporary tensors as large as the
        # parameters.
        fused = self.device.type in ("cpu", "cuda") and self.spec.precision != "fp16"
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-5, fused=fused)

    def backward(self) -> None:
        """Run the backward pass."""
        assert self._loss is not None
        self._loss.backward()
        self._loss = None

    def update(self) -> None:
        """Clip the gradient, run the optimizer step, end the training step, and set the gradients to None.

        The first update also returns freed memory to the system before the optimizer step. The first forward and
        backward passes leave free blocks that later steps do not reuse, for example those of compilers. The
        optimizer state would otherwise be placed in larger free blocks, whose remainders stay resident.
        """
        assert self._optimizer is not None
        if self.spec.grad_clip_norm is not None:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.spec.grad_clip_norm)
        if self._first:
            release_freed_memory()
            self._first = False
        self._optimizer.step()
        self.methods.end()
        self._optimizer.zero_grad(set_to_none=True)
        self.steps += 1

    def __call__(self) -> None:
        self.forward()
        self.backward()
        self.update()

    @property
    def optimizer_bytes(self) -> int:
        """Size of the optimizer's state in bytes, or 0 before the first step."""
        return 0 if self._optimizer is None else optimizer_state_bytes(self._optimizer)

    def cuda_peak(self) -> int:
        """Return the peak memory of one forward and backward pass on CUDA in bytes (see `Measured.peak_bytes`)."""
        batch = [*tensors_of(self.inputs), self.labels]
        own = sum(storages([*self.model.parameters(), *self.model.buffers(), *batch]).values())
        torch.cuda.synchronize(self.device)
        torch.cuda.reset_peak_memory_stats(self.device)
        before = torch.cuda.memory_allocated(self.device)
        self.forward()
        self.backward()
        torch.cuda.synchronize(self.device)
        peak = torch.cuda.max_memory_allocated(self.device)
        self.model.zero_grad(set_to_none=True)
        return peak - before + own
