"""What a training step really executes and keeps, counted without a device, data or weights.

The step is: forward in training mode (BatchNorm statistics frozen), cross-entropy, backward. It runs on fake tensors
(shapes and storages without memory), with the batch asked for, on a copy of the model and of the methods applied to it;
so it takes seconds for any batch, and is the same on every machine. What is counted:

* **FLOPs** per image, forward and backward apart; a multiply-add is 2. The formulas are torch.utils.flop_counter's
  (one mended: see `meter`): matrix products, convolutions, attention; elementwise work counts 0. Attention is counted
  unfused: a fused backward recomputes the scores inside one kernel, and kernels differ between devices.
* **Saved bytes** per image: the storages autograd holds for the backward pass once the forward pass and the loss are
  done, each once and whole. Parameters and buffers, and views of them, are left out: they live anyway. What was made
  of them counts (autocast's low-precision weight copies, constants in a cache), and so does the input batch where it
  is saved. Attention is as the model has it.
* Where steps differ (layers sampled per step), the mean over as many as the methods say (``cost_steps``).
* **Peak** of live tensor bytes for the whole batch: everything that lives during forward and backward, parameters,
  buffers and the batch included, gradients and what recomputation holds included. This is what
  torch.cuda.max_memory_allocated reports, but for the allocator's rounding and the kernels' own workspaces. The
  optimizer's state is *not* in it.
"""

from __future__ import annotations

import contextlib
import copy
import random
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeCopyMode, FakeTensor, FakeTensorMode
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.functional import cross_entropy

from efficient_ft.core.distributed import local_only
from efficient_ft.core.errors import SettingError, UserError
from efficient_ft.cost.meter import LayerFlops, LiveTensor, Meter, Phase, SavedTensors, storages
from efficient_ft.models.frozen_batch_norm import freeze_batch_norm

if TYPE_CHECKING:
    from efficient_ft.methods.base import Method

AUTOCAST: dict[str, torch.dtype | None] = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}

ON_FAKE_TENSORS = "fake tensors"

#: Images in the largest real run that stands in where fake tensors cannot follow a model.
FEW = 8


@dataclass(frozen=True)
class Executed:
    """What one training step executes and keeps.

    Attributes:
        forward_flops, backward_flops: FLOPs per image.
        saved_bytes: bytes kept for the backward pass, per image.
        peak_bytes: peak of live tensor bytes in forward and backward, of the whole batch, model included.
        model_bytes: the parameters' and buffers' share of the peak.
        batch_size: images in the batch.
        counted_on: ``"fake tensors"``; or, for a model that cannot run on them, the real runs whose line was drawn out
            to `batch_size`, and the reason.
    """

    forward_flops: float
    backward_flops: float
    saved_bytes: float
    peak_bytes: int
    model_bytes: int
    batch_size: int
    counted_on: str = ON_FAKE_TENSORS

    @property
    def flops(self) -> float:
        """Forward and backward FLOPs per image."""
        return self.forward_flops + self.backward_flops

    def as_dict(self) -> dict[str, float | int | str]:
        return asdict(self)


@dataclass(frozen=True)
class Kept:
    """What lives after a forward pass, seen twice (`kept_after_forward`).

    Attributes:
        saved_bytes: storages the saved-tensors hook saw, made during the forward pass and still alive.
        live_bytes: storages made during the forward pass and still alive, the outputs left out.
        hidden: those alive that the hook did not see: kept past the meter. Empty for an honest method.
    """

    saved_bytes: int
    live_bytes: int
    hidden: tuple[LiveTensor, ...]


def executed(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    *,
    methods: Sequence[Method] = (),
    precision: str = "fp32",
    label_smoothing: float = 0.0,
    in_chans: int = 3,
    frozen_bn: bool = True,
) -> Executed:
    """Count one training step of `model` with `methods`; neither, nor any random state, is changed.

    Args:
        model: a classifier, images (B, in_chans, H, W) to logits (B, classes), on any device.
        batch_size: images in the batch.
        input_size: (H, W) of the images.
        methods: the methods of the run, applied to `model` or not yet. Those that profile first
            (``warmup_steps``) take their steps on a real copy with at most two random images, so that the steady step
            is counted.
        precision: ``fp32``, or ``bf16`` or ``fp16`` autocast.
        frozen_bn: BatchNorm layers use their running statistics, as in training by default.

    Raises:
        UserError: a setting that cannot be, or a model that does not return logits.
    """
    probe = Probe(model, methods, input_size, precision, label_smoothing, in_chans, frozen_bn)
    with undisturbed():
        probe.warm_up()
        return probe.executed(batch_size)


def layer_flops(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    *,
    methods: Sequence[Method] = (),
    precision: str = "fp32",
    label_smoothing: float = 0.0,
    in_chans: int = 3,
    frozen_bn: bool = True,
) -> dict[str, LayerFlops]:
    """By full module name: forward and backward FLOPs per image and the number of calls, in one training step.

    Every linear and convolutional layer has an entry (zeros: never reached); so has each other module that runs matrix
    products of its own (attention). FLOPs go to the module whose weight is used, and its ``calls`` count its own
    ``forward``: a layer whose weight is used by its parent (SwinV2's qkv) has FLOPs and no calls. Sums over all names
    equal `executed`'s. Arguments as there.
    """
    probe = Probe(model, methods, input_size, precision, label_smoothing, in_chans, frozen_bn)
    positive("batch_size", batch_size)
    with undisturbed():
        probe.warm_up()
        try:
            return probe.steps(batch_size, True, [(0, True)], layers=True)[0].layers
        except UserError:
            raise
        except Exception:  # as in `Probe.executed`
            return probe.steps(min(batch_size, FEW), False, [(0, True)], layers=True)[0].layers


def kept_after_forward(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    *,
    methods: Sequence[Method] = (),
    precision: str = "fp32",
    label_smoothing: float = 0.0,
    in_chans: int = 3,
    frozen_bn: bool = True,
    fake: bool = True,
) -> Kept:
    """Hold the saved-tensors hook against all that lives: does anything kept for the backward pass hide from the meter?

    `live_bytes` comes from watching every operation's results, `saved_bytes` from the hook; neither knows of the other.
    Arguments as in `executed`; ``fake=False`` runs really.
    """
    probe = Probe(model, methods, input_size, precision, label_smoothing, in_chans, frozen_bn)
    with undisturbed():
        probe.warm_up()
        # The second step: what the first one put into caches was there before it.
        seen = probe.steps(batch_size, fake, [(0, False), (1, False)])[1]
    return Kept(
        saved_bytes=sum(nbytes for key, nbytes in seen.saved.items() if key in seen.created),
        live_bytes=sum(made.nbytes for made in seen.created.values()),
        hidden=tuple(made for key, made in seen.created.items() if key not in seen.saved),
    )


@dataclass
class _Seen:
    """One step as the meter saw it; totals of the whole batch."""

    flops: dict[Phase, int]
    saved: dict[int, int]
    """By storage: what the hook saw that is alive after the forward pass, parameters and buffers left out."""
    created: dict[int, LiveTensor]
    """By storage: what the forward pass made that is alive after it, logits and loss left out."""
    model_bytes: int
    peak: int
    layers: dict[str, LayerFlops]


class Probe:
    """Copies of a model and its methods, real or on fake tensors, and the step they are watched in."""

    def __init__(
        self,
        model: nn.Module,
        methods: Sequence[Method],
        input_size: Sequence[int],
        precision: str,
        label_smoothing: float,
        in_chans: int,
        frozen_bn: bool,
    ) -> None:
        if precision not in AUTOCAST:
            raise SettingError("precision", precision, list(AUTOCAST))
        if len(input_size) != 2:
            raise SettingError("input_size", tuple(input_size), "a pair (height, width)")
        for side in (*input_size, in_chans):
            positive("input_size", side)
        self.model, self.methods = model, list(methods)
        self.shape = (in_chans, *input_size)
        self.dtype = AUTOCAST[precision]
        self.label_smoothing = label_smoothing
        self.frozen_bn = frozen_bn
        if any(m.applied is None for m in self.methods):
            from efficient_ft.methods.base import apply_methods

            self.model, self.methods = copy.deepcopy((self.model, self.methods))
            apply_methods(self.model, self.methods)
        self.steps_before = max((m.warmup_steps for m in self.methods), default=0)

    def warm_up(self, images: int = 2) -> None:
        """Let methods that profile first do so, on a real copy: what they choose depends on values."""
        if not self.steps_before:
            return
        self.model, self.methods = self.copy(None)
        batch = self._batch(images)
        for step in range(self.steps_before):
            for method in self.methods:
                method.step_begin(step)
            self._forward(self.model, self.methods, *batch)[1].backward()
            for method in self.methods:
                method.step_end()
            self.model.zero_grad(set_to_none=True)

    def executed(self, images: int) -> Executed:
        """Counted on fake tensors, or, where those cannot follow the model, by real runs of few images."""
        positive("batch_size", images)
        try:
            return self.count(images, fake=True)
        except UserError:
            raise
        except Exception as error:  # whatever fake tensors cannot do; a fault of the model's own comes up again below
            reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
        if images <= FEW:
            return replace(self.count(images, fake=False), counted_on=f"a real run ({reason})")
        return _line(self.count(FEW // 2, fake=False), self.count(FEW, fake=False), images, reason)

    def count(self, images: int, fake: bool) -> Executed:
        """One step, or the mean over as many as the methods ask for; the peak is that of the costliest."""
        count = max((m.cost_steps for m in self.methods), default=1)
        pairs = [(step, without) for step in range(count) for without in (True, False)]
        seen = self.steps(images, fake, pairs)
        unfused, fused = seen[::2], seen[1::2]
        return Executed(
            forward_flops=sum(s.flops["forward"] for s in unfused) / count / images,
            backward_flops=sum(s.flops["backward"] for s in unfused) / count / images,
            saved_bytes=sum(sum(s.saved.values()) for s in fused) / count / images,
            peak_bytes=max(s.peak for s in fused),
            model_bytes=fused[0].model_bytes,
            batch_size=images,
        )

    def steps(self, images: int, fake: bool, which: Sequence[tuple[int, bool]], layers: bool = False) -> list[_Seen]:
        """For each of `which`, on one copy: (number of the step, attention without its fused kernel)."""
        with FakeTensorMode(allow_non_fake_inputs=True) if fake else contextlib.nullcontext() as mode:
            model, methods = self.copy(mode)
            batch = self._batch(images)
            seen = []
            for step, without in which:
                for method in methods:
                    method.step_begin(self.steps_before + step)
                with sdpa_kernel(SDPBackend.MATH) if without else contextlib.nullcontext():
                    seen.append(self._watch(model, methods, batch, layers))
                for method in methods:
                    method.step_end()
                model.zero_grad(set_to_none=True)
            return seen

    def _watch(self, model: nn.Module, methods: Sequence[Method], batch: tuple[Tensor, Tensor], layers: bool) -> _Seen:
        """Forward, loss, backward under the meter."""
        state = [*model.parameters(), *model.buffers()]
        model_state = storages(state)
        meter = Meter([*state, *batch], layers=model if layers else None)
        hook = SavedTensors()
        with meter:
            with hook:
                logits, loss = self._forward(model, methods, *batch)
            created, saved = meter.created(), hook.alive()
            if loss.requires_grad:  # else nothing trains: the step is its forward pass
                with meter.phase("backward"):
                    loss.backward()
        outputs = storages([logits, loss])
        return _Seen(
            flops=meter.flops,
            saved={key: nbytes for key, nbytes in saved.items() if key not in model_state},
            created={k: made for k, made in created.items() if k in saved or k not in outputs},
            model_bytes=sum(model_state.values()),
            peak=meter.peak,
            layers=meter.layer_flops(len(batch[1])) if layers else {},
        )

    def copy(self, mode: FakeTensorMode | None) -> tuple[nn.Module, list[Method]]:
        """The model in training mode, and its methods: real ones on the CPU, or on fake tensors of `mode`."""
        with contextlib.nullcontext() if mode is None else FakeCopyOnCPU(mode):
            # Jointly: a method's references into the model must lead into the copy.
            model, methods = copy.deepcopy((self.model, self.methods))
        if mode is None:
            model.to("cpu")
        model.train()
        model.zero_grad(set_to_none=True)
        if self.frozen_bn:
            freeze_batch_norm(model)
        return model, methods

    def _batch(self, images: int) -> tuple[Tensor, Tensor]:
        return torch.randn(images, *self.shape), torch.zeros(images, dtype=torch.long)

    def _forward(self, model: nn.Module, methods: Sequence[Method], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        with torch.autocast("cpu", dtype=self.dtype, enabled=self.dtype is not None):
            logits = model(x)
            if not isinstance(logits, Tensor) or logits.ndim != 2:
                raise UserError(
                    f"{type(model).__name__} does not return logits (images, classes) but"
                    f" {tuple(logits.shape) if isinstance(logits, Tensor) else type(logits).__name__}."
                )
            loss = cross_entropy(logits, y, label_smoothing=self.label_smoothing)
            for method in methods:
                loss = method.total_loss(loss)
            return logits, loss


class FakeCopyOnCPU(FakeCopyMode):
    """deepcopy to fake tensors that say they are on the CPU, wherever the originals are: one device, one autocast.

    A model on the meta device, without any memory, is counted like any other.
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


def _line(half: Executed, few: Executed, images: int, reason: str) -> Executed:
    """The straight line through two small batches, at `images`; FLOPs and kept bytes lie on it, the peak nearly."""

    def total(a: float, b: float) -> float:
        return b + (b - a) * (images - FEW) / (FEW - FEW // 2)

    def per_image(a: float, b: float) -> float:
        return total(a * (FEW // 2), b * FEW) / images

    return Executed(
        forward_flops=per_image(half.forward_flops, few.forward_flops),
        backward_flops=per_image(half.backward_flops, few.backward_flops),
        saved_bytes=per_image(half.saved_bytes, few.saved_bytes),
        peak_bytes=round(total(half.peak_bytes, few.peak_bytes)),
        model_bytes=few.model_bytes,
        batch_size=images,
        counted_on=f"real runs of {FEW // 2} and {FEW} images, drawn out to {images} ({reason})",
    )


def positive(setting: str, value: int) -> None:
    if not isinstance(value, int) or value < 1:
        raise SettingError(setting, value, "an integer of at least 1")


@contextlib.contextmanager
def undisturbed(cuda: Sequence[torch.device] = ()) -> Iterator[None]:
    """Gradients on, autocast off, no other process asked; every global random state as before afterwards.

    That is the CPU's, and that of the devices `cuda`.
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
