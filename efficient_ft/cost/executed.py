"""Count the FLOPs that a training step executes and the bytes that it saves, without a device, data or weights.

A step consists of the forward pass in training mode (with frozen BatchNorm statistics), the loss and the backward pass.
The step runs on a copy of the model and its methods, with fake tensors of the given batch size. The counts are:

* **FLOPs** per image, separately for the forward and the backward pass. A multiply-add is 2 FLOPs. The formulas come
  from torch.utils.flop_counter (`meter` corrects two of them). Elementwise operations are not counted. The FLOPs of
  attention are counted without fused kernels, because these kernels differ between devices and recompute the scores in
  the backward pass.
* **Saved bytes** per image: size of the storages that autograd keeps for the backward pass after the forward pass and
  the loss. Each storage is counted once, with its full size. Parameters, buffers and their views are not counted.
  Tensors that are computed from parameters or buffers (autocast copies of weights, cached constants) are counted. The
  input batch is also counted if it is saved. Saved bytes are counted with the attention kernels that the model uses.
* **Peak** size of all live tensors in the forward and backward pass of the batch, including parameters, buffers, the
  batch, gradients and recomputed tensors. torch.cuda.max_memory_allocated reports this size plus the rounding of the
  allocator and the workspaces of kernels. The optimizer's state is *not* included. If an optimizer updates parameters
  inside the backward pass, the counted step does the same: each gradient is freed after its update, and the
  temporary tensors of the updates are counted.
* **Optimizer bytes**: size of the optimizer's state after every parameter has been updated. The optimizer's state is
  counted only if an optimizer is given.

If steps differ, for example because layers are sampled in each step, FLOPs and saved bytes are means over
``cost_steps`` steps, and the peak is the maximum over these steps. The methods declare ``cost_steps``.
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
from efficient_ft.models.view.inputs import refuse_required_inputs

__all__ = ["AUTOCAST", "Executed", "Kept", "count", "executed", "kept_after_forward", "layer_flops"]

ON_FAKE_TENSORS = "fake tensors"

#: Batch size of the largest real run that is counted if a model cannot run on fake tensors.
FEW = 8


@dataclass(frozen=True)
class Executed:
    """Executed FLOPs and saved bytes of one training step.

    Attributes:
        forward_flops: number of FLOPs of the forward pass, per image.
        backward_flops: number of FLOPs of the backward pass, per image, including recomputation.
        saved_bytes: number of bytes saved for the backward pass, per image.
        peak_bytes: peak size of all live tensors in the forward and backward pass of the batch, including the model.
        model_bytes: size of the parameters and buffers, which are included in `peak_bytes`.
        batch_bytes: size of the images and labels, which are included in `peak_bytes`.
        batch_size: number of images in the batch.
        counted_on: ``"fake tensors"``. If the model does not support fake tensors, the text describes the real runs
            from which the counts were extrapolated to `batch_size`, and states the reason.
        optimizer_bytes: size of the optimizer's state, or None if no optimizer was given.
        largest_bytes: size of the largest tensor that an operation creates for the batch.
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
        """Number of FLOPs of the forward and backward pass, per image."""
        return self.forward_flops + self.backward_flops

    @property
    def step_peak_bytes(self) -> int:
        """Peak size of all live tensors except the model and the batch, which exist before the step."""
        return self.peak_bytes - self.model_bytes - self.batch_bytes

    def as_dict(self) -> dict[str, float | int | str | None]:
        """Return the attributes as a JSON-serializable dict."""
        return asdict(self)


@dataclass(frozen=True)
class Kept:
    """Size of the storages that are alive after a forward pass, counted in two ways by `kept_after_forward`.

    Attributes:
        saved_bytes: size of the live storages that the forward pass created and that the saved-tensors hook saw.
        live_bytes: size of all live storages that the forward pass created, without the outputs.
        hidden: live tensors that the hook did not see. `hidden` is empty unless a method bypasses
            ``save_for_backward``.
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
    """Count one training step of `model` with `methods`. The model, methods and random states are not changed.

    Args:
        model: classifier that maps images (B, in_chans, H, W) to logits (B, classes), on any device.
        batch_size: number of images in the batch.
        input_size: (H, W) of the images in pixels.
        methods: methods of the run (see `StepMethods`). The methods may already be applied to `model`. If a method has
            ``warmup_steps``, these steps run first, with two random images, on a copy that has real tensors. The
            counted step follows these warm-up steps.
        build_optimizer: function that builds the run's optimizer for a model. If None, no optimizer is counted.
        options: ``precision``, ``label_smoothing``, ``in_chans`` and ``frozen_bn`` (see `StepSpec`).

    Raises:
        SettingError: If a setting is out of range.
        UserError: If the model does not return logits, or if it requires inputs in addition to images.
    """
    probe = Probe(model, methods, StepSpec(batch_size, input_size, **options), build_optimizer)
    with undisturbed():
        try:
            probe.warm_up()
            return count(probe)
        except TypeError:
            refuse_required_inputs(model, "the counted step")
            raise


def layer_flops(
    model: nn.Module,
    batch_size: int,
    input_size: Sequence[int],
    *,
    methods: Iterable[Any] = (),
    **options: Unpack[StepOptions],
) -> dict[str, LayerFlops]:
    """Count the FLOPs per image and the calls of each module in one training step.

    Every linear and convolutional layer has an entry, which is zero if the layer is not reached. Other modules that run
    matrix products (attention) also have an entry. FLOPs are attributed to the module whose weight is used. ``calls``
    is the number of times that the ``forward`` method of a module is called. A layer whose weight is used by its parent
    (for example, SwinV2's qkv) has FLOPs but no calls. The sums over all modules equal the counts of `executed`. See
    `executed` for the arguments and errors.

    Returns:
        A dict from the full names of modules to their counts.
    """
    probe = Probe(model, methods, StepSpec(batch_size, input_size, **options))
    with undisturbed():
        probe.warm_up()
        try:
            return probe.watch(batch_size, True, [(0, True)], layers=True)[0].layers
        except UserError:
            raise
        except Exception:  # the model does not support fake tensors (see `count`)
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
    """Count the tensors kept for the backward pass in two ways, to check that the saved-tensors hook sees all of them.

    `live_bytes` is computed from the results of all operations, and `saved_bytes` from the tensors that the hook sees.

    Args:
        fake: if True, count on fake tensors instead of real tensors. See `executed` for other arguments and errors.
    """
    probe = Probe(model, methods, StepSpec(batch_size, input_size, **options))
    with undisturbed():
        probe.warm_up()
        # The second step is checked, because the first step fills the caches.
        step = probe.watch(batch_size, fake, [(0, False), (1, False)], backward=False)[1]
    return Kept(
        saved_bytes=sum(nbytes for key, nbytes in step.saved.items() if key in step.created),
        live_bytes=sum(made.nbytes for made in step.created.values()),
        hidden=tuple(made for key, made in step.created.items() if key not in step.saved),
    )


def count(probe: Probe) -> Executed:
    """Count the step of `probe` on fake tensors, or in small real runs if the model does not support fake tensors."""
    images = probe.spec.batch_size
    try:
        return count_batch(probe, images, fake=True)
    except UserError:
        raise
    except Exception as error:  # if the model itself fails, the real run raises the error again
        if not probe.has_weights:
            raise
        reason = f"{type(error).__name__}: {(str(error).strip().splitlines() or [''])[0]}"
    if images <= FEW:
        return replace(count_batch(probe, images, fake=False), counted_on=f"a real run ({reason})")
    half, few = count_batch(probe, FEW // 2, fake=False), count_batch(probe, FEW, fake=False)
    return _extrapolate(half, few, images, reason)


def count_batch(probe: Probe, images: int, fake: bool) -> Executed:
    """Return the counts of one step, averaged over `cost_steps` steps. The peak is the maximum over the steps."""
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
    """Extrapolate the counts of two small batches linearly to `images` images.

    The result is exact for FLOPs and saved bytes, and approximate for the peak.
    """

    def total(a: float, b: float) -> float:
        return b + (b - a) * (images - FEW) / (FEW - FEW // 2)

    def per_image(a: float, b: float) -> float:
        return total(a * (FEW // 2), b * FEW) / images

    return replace(
        few,
        forward_flops=per_image(half.forward_flops, few.forward_flops),
        backward_flops=per_image(half.backward_flops, few.backward_flops),
        saved_bytes=per_image(half.saved_bytes, few.saved_bytes),
        peak_bytes=round(total(half.peak_bytes, few.peak_bytes)),
        batch_bytes=few.batch_bytes // FEW * images,
        batch_size=images,
        counted_on=f"real runs of {FEW // 2} and {FEW} images, extrapolated to {images} images ({reason})",
        largest_bytes=few.largest_bytes // FEW * images,
    )
