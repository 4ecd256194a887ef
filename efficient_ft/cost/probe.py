"""Run and count training steps of a copy of the model, on fake or real tensors.

Fake tensors have a shape and a dtype, but no data. On fake tensors, a step takes a few seconds for any batch size, and
the counts do not depend on the machine.
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
from efficient_ft.core.fake import FakeTensors
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter, Phase, SavedTensors, storages
from efficient_ft.cost.step import BuildOptimizer, StepMethods, StepSpec, forward_and_loss
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm
from efficient_ft.models.weight_dtype import stores_bf16
from efficient_ft.optim import state_tensors
from efficient_ft.task import Inputs, tensors_of

#: Batch size of the warm-up steps, which run on real tensors.
WARMUP_IMAGES = 2


@dataclass
class WatchedStep:
    """Counts of one step for the whole batch.

    Attributes:
        saved: a dict from storage ids to sizes in bytes, for each storage that is saved for the backward pass and alive
            after the forward pass. Parameters and buffers are not included.
        created: a dict from storage ids to the tensors that the forward pass created and that are alive after the
            forward pass. The logits and the loss are not included.
        peak: peak size of the live tensors in bytes, without the optimizer's state.
        largest: size of the largest tensor that an operation created, in bytes.
        layers: a dict from module names to FLOPs. The dict is empty unless the FLOPs of modules are requested.
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
    """Copy a model and its methods, and count steps of the copy.

    Methods that are not applied yet are applied to the copy. `model` and `methods` are not changed. If there is an
    optimizer, its state is counted. Optimizer steps are counted only if they run inside the backward pass.
    """

    def __init__(
        self, model: nn.Module, methods: Iterable[Any], spec: StepSpec, build_optimizer: BuildOptimizer | None = None
    ) -> None:
        self.model, self.methods, self.spec = model, StepMethods(methods), spec
        self.build_optimizer = build_optimizer
        #: Number of steps before the first counted step.
        self.steps_before = self.methods.warmup_steps
        #: Original model and methods, which are not applied yet. Real copies are made from the originals. The value is
        #: None if `model` has real tensors.
        self._plain: tuple[nn.Module, StepMethods] | None = None
        if not self.methods.all_applied:
            plain = self.model, self.methods
            if not self.steps_before:  # no tensor values are needed, so the copy is on the meta device
                with contextlib.suppress(RuntimeError):  # methods that read weights in `apply` raise this error
                    self.model, self.methods = _applied(plain, _on_meta(self.model))
                    self._plain = plain
            if self._plain is None:
                self.model, self.methods = _applied(plain, {})

    @property
    def has_weights(self) -> bool:
        """Return True if no parameter of the original model is on the meta device. Real steps require this."""
        model = self.model if self._plain is None else self._plain[0]
        return not any(parameter.is_meta for parameter in model.parameters())

    def warm_up(self) -> None:
        """Run the warm-up steps of the methods on real tensors, because the methods' choices depend on tensor values.

        These steps always run in fp32, unless weights are stored in bfloat16. The choices are therefore the same on all
        machines, and the steps are fast on processors without bf16 units.
        """
        if not self.steps_before:
            return
        self.model, self.methods = self.copy(None)
        precision = "bf16" if stores_bf16(self.model) else "fp32"
        spec = replace(self.spec, precision=precision)
        batch = spec.example(self.model, WARMUP_IMAGES)
        for step in range(self.steps_before):
            self.methods.begin(step)
            forward_and_loss(self.model, self.methods, *batch, spec)[1].backward()
            self.methods.end()
            self.model.zero_grad(set_to_none=True)

    def watch(
        self, images: int, fake: bool, which: Sequence[tuple[int, bool]], layers: bool = False, backward: bool = True
    ) -> list[WatchedStep]:
        """Run and count several steps of one copy with `images` samples, on fake tensors if `fake` is True.

        For each step, `which` contains the number of the step, and True if attention runs without fused kernels. If
        `layers` is True, FLOPs are also attributed to modules. If `backward` is False, each step ends after the loss.
        """
        with FakeTensors() if fake else contextlib.nullcontext() as mode:
            model, methods = self.copy(mode)
            batch = self.spec.example(model, images)
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
        """Return the size of the optimizer's state in bytes after an update of all trainable parameters."""
        with FakeTensors() as mode:
            model, _ = self.copy(mode)
            optimizer = self._optimizer(model)
            return 0 if optimizer is None else sum(storages(state_tensors(optimizer)).values())

    def _optimizer(self, model: nn.Module) -> torch.optim.Optimizer | None:
        """Build the optimizer for a copy, and run one optimizer step, which creates the state of every parameter."""
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
            if backward and loss.requires_grad:  # the loss requires no gradient if no parameter is trained
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
        """Copy the methods and the model (in training mode) to the CPU, or to fake tensors if `mode` is given."""
        if mode is None and self._plain is not None:
            self.model, self.methods = _applied(self._plain, {})
            self._plain = None
        with contextlib.nullcontext() if mode is None else FakeCopyOnCPU(mode):
            # The model and the methods are copied together, so that a method's references to the model point to the
            # copy.
            model, methods = copy.deepcopy((self.model, self.methods))
        if mode is None:
            model.to("cpu")
        model.train()
        model.zero_grad(set_to_none=True)
        freeze_batch_norm(model, self.spec.frozen_bn)
        return model, methods


def _applied(plain: tuple[nn.Module, StepMethods], tensors: dict[int, Tensor]) -> tuple[nn.Module, StepMethods]:
    """Copy a model and its methods, and apply them. `tensors` maps ids of tensors to existing copies."""
    model, methods = copy.deepcopy(plain, tensors)
    methods.apply(model)
    return model, methods


def _on_meta(model: nn.Module) -> dict[int, Tensor]:
    """Return copies of the parameters and buffers on the meta device, keyed by the ids of the originals."""
    copies: dict[int, Tensor] = {}
    for tensor in (*model.parameters(), *model.buffers()):
        if type(tensor) in (Tensor, nn.Parameter):
            like = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype, device="meta")
            copies[id(tensor)] = nn.Parameter(like, tensor.requires_grad) if type(tensor) is nn.Parameter else like
    return copies


class FakeCopyOnCPU(FakeCopyMode):
    """Make deepcopy create fake tensors on the CPU, even if the originals are on another device or the meta device."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out: Any = super().__torch_function__(func, types, args, kwargs)
        if isinstance(out, FakeTensor) and out.device.type != "cpu":
            with self.fake_mode:
                # Meta tensors do not support `to`.
                like = torch.empty_strided(out.size(), out.stride(), dtype=out.dtype, device="cpu")
                out = like.requires_grad_(out.requires_grad)
            if func is Tensor.__deepcopy__:
                args[1][id(args[0])] = out
        return out


@contextlib.contextmanager
def undisturbed(cuda: Sequence[torch.device] = ()) -> Iterator[None]:
    """Enable gradients and disable autocast and collectives inside a ``with`` block, and restore global random states.

    The restored states include those of the CUDA devices in `cuda`.
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
