"""Watch steps of a model's copy with the meter, on fake tensors or real ones.

On fake tensors (shapes and storages without memory) a step takes seconds for any batch size and gives the same counts
on every machine.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel

from efficient_ft.core.distributed import local_only
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter, Phase, SavedTensors, storages
from efficient_ft.cost.step import BuildOptimizer, StepMethods, StepSpec, forward_and_loss
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.optim import state_tensors
from efficient_ft.task import Inputs, tensors_of

#: Images in the batch of the warm-up steps, which run on real tensors.
WARMUP_IMAGES = 2


@dataclass
class WatchedStep:
    """One step as the meter counted it; totals of the whole batch.

    Attributes:
        flops: by phase.
        saved: bytes by storage: what the saved-tensors hook saw that is alive after the forward pass, without
            parameters and buffers.
        created: by storage: what the forward pass made that is alive after it, without logits and loss.
        model_bytes: of parameters and buffers.
        batch_bytes: of the images and labels.
        peak: bytes of live tensors at their peak, without the optimizer's state.
        largest: bytes of the largest tensor that an operation made.
        optimizer_bytes: of the optimizer's state; None: no optimizer was given.
        layers: FLOPs by module, if asked for.
    """

    flops: dict[Phase, int]
    saved: dict[int, int]
    created: dict[int, LiveTensor]
    model_bytes: int
    batch_bytes: int
    peak: int
    largest: int
    optimizer_bytes: int | None
    layers: dict[str, LayerFlops]


class Probe:
    """Copies of a model and its methods, and the steps in which the meter watches them.

    Methods not yet applied are applied to a copy; `model` and `methods` are never changed.

    Args:
        model: a classifier of images, on any device.
        methods: the methods of the run, see `StepMethods`.
        spec: the settings of the step.
        build_optimizer: builds the optimizer over a copy's trainable parameters. Its state is counted; its step is
            watched only if it happens inside the backward pass. None: no optimizer.
    """

    def __init__(
        self,
        model: nn.Module,
        methods: Iterable[Any],
        spec: StepSpec,
        build_optimizer: BuildOptimizer | None = None,
    ) -> None:
        self.model, self.methods, self.spec = model, StepMethods(methods), spec
        self.build_optimizer = build_optimizer
        #: Steps taken before the first one watched.
        self.steps_before = self.methods.warmup_steps
        #: What methods are applied to again when values are needed; None: `model` has values.
        self._plain: tuple[nn.Module, StepMethods] | None = None
        if not self.methods.all_applied:
            plain = self.model, self.methods
            if not self.steps_before:  # warm-up steps need values; without them the copy takes no memory
                with contextlib.suppress(RuntimeError):  # of a method that looks at weights when it is applied
                    self.model, self.methods = _applied(plain, _on_meta(self.model))
                    self._plain = plain
            if self._plain is None:
                self.model, self.methods = _applied(plain, {})

    def warm_up(self) -> None:
        """Take the methods' warm-up steps on a real copy, since what they choose there depends on values.

        In fp32 with every precision of the step: so they choose the same on all machines, and a processor that emulates
        bf16 does not take many times as long.
        """
        if not self.steps_before:
            return
        self.model, self.methods = self.copy(None)
        batch, spec = self._batch(WARMUP_IMAGES), replace(self.spec, precision="fp32")
        for step in range(self.steps_before):
            self.methods.begin(step)
            forward_and_loss(self.model, self.methods, *batch, spec)[1].backward()
            self.methods.end()
            self.model.zero_grad(set_to_none=True)

    def watch(
        self,
        images: int,
        fake: bool,
        which: Sequence[tuple[int, bool]],
        layers: bool = False,
        backward: bool = True,
    ) -> list[WatchedStep]:
        """Watch several steps of one copy.

        Args:
            images: in the batch.
            fake: on fake tensors; else on real ones.
            which: for each step its number, and True for attention in parts (without the fused kernel).
            layers: attribute FLOPs to modules as well.
            backward: False: the steps end after the loss.
        """
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext() as mode:
            model, methods = self.copy(mode)
            batch = self._batch(images)
            optimizer = self._optimizer(model) if backward else None
            watched = []
            for step, unfused in which:
                methods.begin(self.steps_before + step)
                with sdpa_kernel(SDPBackend.MATH) if unfused else contextlib.nullcontext():
                    watched.append(self._watch_one(model, methods, batch, optimizer, layers, backward))
                methods.end()
                model.zero_grad(set_to_none=True)
                if optimizer is not None:
                    optimizer.zero_grad(set_to_none=True)
            return watched

    def optimizer_bytes(self) -> int:
        """Bytes of the optimizer's state once every parameter that trains has been updated; counted without a step."""
        with FakeTensorMode(allow_non_fake_inputs=True) as mode:
            model, _ = self.copy(mode)
            optimizer = self._optimizer(model)
            return 0 if optimizer is None else sum(storages(state_tensors(optimizer)).values())

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Build the optimizer of a copy, with the state of every parameter, as after some steps."""
        if self.build_optimizer is None:
            return None
        optimizer = self.build_optimizer(model)
        for group in optimizer.param_groups:
            for parameter in group["params"]:
                parameter.grad = torch.zeros_like(parameter)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return optimizer

    def _watch_one(
        self,
        model: nn.Module,
        methods: StepMethods,
        batch: tuple[Inputs, Tensor],
        optimizer: torch.optim.Optimizer | None,
        layers: bool,
        backward: bool,
    ) -> WatchedStep:
        """Forward, loss and backward under the meter."""
        state = [*model.parameters(), *model.buffers()]
        tensors = [*tensors_of(batch[0]), batch[1]]
        model_state = storages(state)
        moments = [] if optimizer is None else state_tensors(optimizer)
        meter = Meter([*state, *tensors], layers=model if layers else None, outside=moments)
        hook = SavedTensors()
        with meter:
            with hook:
                logits, loss = forward_and_loss(model, methods, *batch, self.spec)
            created, saved = meter.created(), hook.alive()
            if backward and loss.requires_grad:  # else nothing trains and the step is its forward pass
                with meter.phase("backward"):
                    loss.backward()
        outputs = storages([logits, loss])
        return WatchedStep(
            flops=meter.flops,
            saved={key: nbytes for key, nbytes in saved.items() if key not in model_state},
            created={k: made for k, made in created.items() if k in saved or k not in outputs},
            model_bytes=sum(model_state.values()),
            batch_bytes=sum(storages(tensors).values()),
            peak=meter.peak,
            largest=meter.largest,
            optimizer_bytes=None if optimizer is None else sum(storages(moments).values()),
            layers=meter.layer_flops(len(batch[1])) if layers else {},
        )

    def copy(self, mode: FakeTensorMode | None) -> tuple[nn.Module, StepMethods]:
        """Copy the model, in training mode, and its methods: real on the CPU, or on fake tensors of `mode`."""
        if mode is None and self._plain is not None:
            self.model, self.methods = _applied(self._plain, {})
            self._plain = None
        with contextlib.nullcontext() if mode is None else FakeCopyOnCPU(mode):
            # Jointly: a method's references into the model must point into the copy.
            model, methods = copy.deepcopy((self.model, self.methods))
        if mode is None:
            model.to("cpu")
        model.train()
        model.zero_grad(set_to_none=True)
        if self.spec.frozen_bn:
            freeze_batch_norm(model)
        return model, methods

    def _batch(self, images: int) -> tuple[Inputs, Tensor]:
        return self.spec.example(images)


def _applied(plain: tuple[nn.Module, StepMethods], tensors: dict[int, Tensor]) -> tuple[nn.Module, StepMethods]:
    """A copy of a model and its methods, applied to it; `tensors` by id take the place of copies."""
    model, methods = copy.deepcopy(plain, tensors)
    methods.apply(model)
    return model, methods


def _on_meta(model: nn.Module) -> dict[int, Tensor]:
    """Parameters and buffers without memory by the id of the real ones, for `copy.deepcopy`."""
    copies: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (Tensor, nn.Parameter):
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            copies[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if type(tensor) is nn.Parameter else like
    return copies


class FakeCopyOnCPU(FakeCopyMode):
    """Make deepcopy produce fake tensors on the CPU, wherever the originals are: one device, one autocast.

    So a model on the meta device, without any memory, is counted like any other.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, FakeTensor) and out.device.type != "cpu":
            with self.fake_mode:
                # empty_strided and not `to`, which a model on the meta device refuses
                like = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="cpu")
                out = like.requires_grad_(out.requires_grad)
            if func is Tensor.__deepcopy__:
                args[1][id(args[0])] = out
        return out


@contextlib.contextmanager
def undisturbed(cuda: Sequence[torch.device] = ()) -> Iterator[None]:
    """Enable gradients, disable autocast and collectives, and restore every global random state at the end.

    Args:
        cuda: devices whose random states are restored too.
    """
    python, numpy = random.getstate(), np.random.get_state()  # noqa: NPY002
    try:
        with (
            torch.inference_mode(False),
            torch.enable_grad(),
            torch.autocast("cpu", enabled=False),
            torch.random.fork_rng(devices=cuda),
            local_only(),
        ):
            torch.default_generator.manual_seed(0)
            yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)  # noqa: NPY002
