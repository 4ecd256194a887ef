"""FLOPs that a training step executes and bytes that it keeps, counted without a device, data or weights.

The step is: forward in training mode (BatchNorm statistics frozen), cross-entropy, backward. It runs on fake tensors,
with the batch size asked for, on a copy of the model and of its methods. Counted are:

* **FLOPs** per image, forward and backward separately; a multiply-add is 2. The formulas are torch.utils.flop_counter's
  (one corrected: see `meter`): matrix products, convolutions, attention; elementwise work counts 0. Attention is
  counted unfused: a fused backward recomputes the scores inside one kernel, and kernels differ between devices.
* **Saved bytes** per image: the storages autograd holds for the backward pass after the forward pass and the loss,
  each once and whole. Parameters and buffers, and views of them, are left out: they live anyway. What was made of them
  counts (autocast's low-precision weight copies, constants in a cache), and so does the input batch if it is saved.
  Attention is as the model has it.
* The mean over several steps if steps differ (layers sampled per step); the methods say how many (``cost_steps``).
* **Peak** of live tensor bytes for the whole batch: everything that lives during forward and backward, with
  parameters, buffers, the batch, gradients and what recomputation holds. This is what
  torch.cuda.max_memory_allocated reports, except for the allocator's rounding and the kernels' workspaces. The
  optimizer's state is *not* included. An optimizer that steps inside the backward pass does so here: gradients are then
  freed one by one, and what its updates hold in passing counts.
* **Optimizer bytes**: its state once every parameter has been updated, if an optimizer is given.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Unpack

from torch import nn

from efficient_ft.core.errors import UserError
from efficient_ft.cost.meter import LayerFlops, LiveTensor
from efficient_ft.cost.probe import Probe, undisturbed
from efficient_ft.cost.step import AUTOCAST, BuildOptimizer, StepOptions, StepSpec

__all__ = ["AUTOCAST", "Executed", "Kept", "count", "executed", "kept_after_forward", "layer_flops"]

ON_FAKE_TENSORS = "fake tensors"

#: Images in the largest real run that replaces fake tensors if these cannot follow a model.
FEW = 8


@dataclass(frozen=True)
class Executed:
    """Executed FLOPs and kept bytes of one training step.

    Attributes:
        forward_flops: FLOPs per image of the forward pass.
        backward_flops: FLOPs per image of the backward pass, recomputation included.
        saved_bytes: bytes kept for the backward pass, per image.
        peak_bytes: peak of live tensor bytes in forward and backward, of the whole batch, model included.
        model_bytes: the parameters' and buffers' share of the peak.
        batch_bytes: the share of the batch: images and labels.
        batch_size: images in the batch.
        counted_on: ``"fake tensors"``; or, for a model that cannot run on them, the real runs from which the counts
            were extrapolated to `batch_size`, and the reason.
        optimizer_bytes: bytes of the optimizer's state; None: no optimizer was given.
        largest_bytes: of the largest tensor that an operation makes, of the whole batch.
    """

    forward_flops: float
    backward_flops: float
    saved_bytes: float
    peak_bytes: int
    model_bytes: int
    batch_bytes: int
    batch_size: int
    counted_on: str = ON_FAKE_TENSORS
    optimizer_bytes: int | None = None
    largest_bytes: int = 0

    @property
    def flops(self) -> float:
        """Forward and backward FLOPs per image."""
        return self.forward_flops + self.backward_flops

    @property
    def step_peak_bytes(self) -> int:
        """The peak above what is there before the step: without the model and the batch."""
        return self.peak_bytes - self.model_bytes - self.batch_bytes

    def as_dict(self) -> dict[str, float | int | str | None]:
        """The attributes, for JSON."""
        return asdict(self)


@dataclass(frozen=True)
class Kept:
    """Bytes alive after a forward pass, counted in two ways (`kept_after_forward`).

    Attributes:
        saved_bytes: storages the saved-tensors hook saw, made during the forward pass and still alive.
        live_bytes: storages made during the forward pass and still alive, without the outputs.
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
    methods: Iterable[Any] = (),
    build_optimizer: BuildOptimizer | None = None,
    **options: Unpack[StepOptions],
) -> Executed:
    """Count one training step of `model` with `methods`; neither, nor any random state, is changed.

    Args:
        model: a classifier, images (B, in_chans, H, W) to logits (B, classes), on any device.
        batch_size: images in the batch.
        input_size: (H, W) of the images in pixels.
        methods: the methods of the run, applied to `model` or not yet; any object that takes part in steps, see
            `StepMethods`. Methods with ``warmup_steps`` take these on a real copy with two random images, so that the
            settled step is counted.
        build_optimizer: builds the run's optimizer over a model's trainable parameters; None: none is counted.
        options: ``precision``, ``label_smoothing``, ``in_chans``, ``frozen_bn``, with meaning and defaults of
            `StepSpec`.

    Raises:
        SettingError: a setting that is out of range.
        UserError: a model that does not return logits.
    """
    probe = Probe(model, methods, StepSpec(batch_size, input_size, **options), build_optimizer)
    with undisturbed():
        probe.warm_up()
        return count(probe)


def layer_flops(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    *,
    methods: Iterable[Any] = (),
    **options: Unpack[StepOptions],
) -> dict[str, LayerFlops]:
    """Count FLOPs per image and calls of each module in one training step.

    Every linear and convolutional layer has an entry (zeros: never reached); so has each other module that runs matrix
    products of its own (attention). FLOPs go to the module whose weight is used, and its ``calls`` count its own
    ``forward``: a layer whose weight is used by its parent (SwinV2's qkv) has FLOPs and no calls. The sums over all
    names equal `executed`'s. Arguments and errors are those of `executed`.

    Returns:
        Counts by full module name.
    """
    probe = Probe(model, methods, StepSpec(batch_size, input_size, **options))
    with undisturbed():
        probe.warm_up()
        try:
            return probe.watch(batch_size, True, [(0, True)], layers=True)[0].layers
        except UserError:
            raise
        except Exception:  # as in `count`
            return probe.watch(min(batch_size, FEW), False, [(0, True)], layers=True)[0].layers


def kept_after_forward(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    *,
    methods: Iterable[Any] = (),
    fake: bool = True,
    **options: Unpack[StepOptions],
) -> Kept:
    """Compare the saved-tensors hook with all that lives: does anything kept for the backward pass hide from it?

    `live_bytes` comes from watching the results of every operation, `saved_bytes` from the hook; the two are
    independent. Arguments and errors are those of `executed`.

    Args:
        fake: count on fake tensors; False: on real ones.
    """
    probe = Probe(model, methods, StepSpec(batch_size, input_size, **options))
    with undisturbed():
        probe.warm_up()
        # The second step: what the first one put into caches existed before it.
        step = probe.watch(batch_size, fake, [(0, False), (1, False)], backward=False)[1]
    return Kept(
        saved_bytes=sum(nbytes for key, nbytes in step.saved.items() if key in step.created),
        live_bytes=sum(made.nbytes for made in step.created.values()),
        hidden=tuple(made for key, made in step.created.items() if key not in step.saved),
    )


def count(probe: Probe) -> Executed:
    """Count the step of `probe` on fake tensors, or, if these cannot follow the model, by real runs of few images."""
    images = probe.spec.batch_size
    try:
        return count_batch(probe, images, fake=True)
    except UserError:
        raise
    except Exception as error:  # anything fake tensors cannot do; an error of the model's own is raised again below
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if images <= FEW:
        return replace(count_batch(probe, images, fake=False), counted_on=f"a real run ({reason})")
    half, few = count_batch(probe, FEW // 2, fake=False), count_batch(probe, FEW, fake=False)
    return _extrapolate(half, few, images, reason)


def count_batch(probe: Probe, images: int, fake: bool) -> Executed:
    """Count one step, or the mean over as many as the methods ask for; the peak is that of the costliest step."""
    steps = probe.methods.cost_steps
    watched = probe.watch(images, fake, [(step, unfused) for step in range(steps) for unfused in (True, False)])
    unfused, as_it_is = watched[::2], watched[1::2]
    return Executed(
        forward_flops=sum(s.flops["forward"] for s in unfused) / steps / images,
        backward_flops=sum(s.flops["backward"] for s in unfused) / steps / images,
        saved_bytes=sum(sum(s.saved.values()) for s in as_it_is) / steps / images,
        peak_bytes=max(s.peak for s in as_it_is),
        model_bytes=as_it_is[0].model_bytes,
        batch_bytes=as_it_is[0].batch_bytes,
        batch_size=images,
        optimizer_bytes=as_it_is[0].optimizer_bytes,
        largest_bytes=max(s.largest for s in as_it_is),
    )


def _extrapolate(half: Executed, few: Executed, images: int, reason: str) -> Executed:
    """The straight line through two small batches, at `images`: exact for FLOPs and kept bytes, nearly for the peak."""

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
        batch_bytes=few.batch_bytes // FEW * images,
        batch_size=images,
        counted_on=f"real runs of {FEW // 2} and {FEW} images, extrapolated to {images} ({reason})",
        optimizer_bytes=few.optimizer_bytes,
        largest_bytes=few.largest_bytes // FEW * images,
    )
