"""Count the FLOPs of each phase and layer, the live bytes and their peak, and the saved bytes of a training step.

The counts come from the executed operations and the live storages. The meter therefore works for any model and method,
on real and fake tensors.
"""

from __future__ import annotations

import weakref
from collections import defaultdict
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from math import prod
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, sdpa_flop_count

from efficient_ft.models.view.probe import RunningModules

Phase = Literal["forward", "backward"]

aten = torch.ops.aten


def storage_id(tensor: Tensor) -> int:
    """Return an id that all views of a tensor's storage share and that is unique while the storage is alive."""
    return tensor.untyped_storage()._cdata


def storages(tensors: Iterable[Tensor]) -> dict[int, int]:
    """Return the size in bytes of each storage of `tensors`. Views of the same storage are counted once."""
    return {storage_id(t): t.untyped_storage().nbytes() for t in tensors}


class LayerFlops(NamedTuple):
    """FLOPs per image of one layer, and the number of calls of its ``forward``."""

    forward: float
    backward: float
    calls: int


class LiveTensor(NamedTuple):
    """Live tensor created during the step: the operation that created it, its shape, and its storage size in bytes."""

    operation: str
    shape: tuple[int, ...]
    nbytes: int


def _conv_backward_flops(grad: Tensor, x: Tensor, w: Tensor, *args: Any, out_val: Any = None, **kwargs: Any) -> int:
    """Count the FLOPs of a convolution's backward pass: each of the two gradients costs as much as the forward pass.

    The formula in torch.utils.flop_counter counts the weight gradient of a grouped convolution once per *pair* of
    groups. For a depthwise layer with C channels, the result is C times too large.
    """
    transposed, wanted = args[4], args[7]
    positions = prod(x.shape[2:]) if transposed else prod(grad.shape[2:])
    return 2 * x.shape[0] * positions * prod(w.shape) * (bool(wanted[0]) + bool(wanted[1]))


#: Operations of oneDNN that compute a layer and an activation. The FLOPs of the layer are counted.
_FUSED_LAYERS = {torch.ops.mkldnn._convolution_pointwise, torch.ops.mkldnn._linear_pointwise}
_ATTENTION_BACKWARD = {
    getattr(aten, f"_scaled_dot_product_{kind}_backward")
    for kind in ("flash_attention", "efficient_attention", "flash_attention_for_cpu", "cudnn_attention")
}


def operation_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], out: Any) -> int:
    """Return the number of FLOPs of an operation, or 0 for elementwise operations.

    The formulas come from torch.utils.flop_counter, which has no formula for ``mv``. The formulas for the backward
    passes of convolutions and fused attention are corrected. For fused attention, the four products of unfused
    attention are counted, but the recomputation of the scores in the kernel is not.

    Args:
        func: executed operator overload.
        args, kwargs: arguments of the operation.
        out: result of the operation.
    """
    packet = func._overloadpacket
    if packet is aten.convolution_backward:
        return _conv_backward_flops(*args, **kwargs)
    if packet in _ATTENTION_BACKWARD:
        _, query, key, value = args[:4]
        shapes = (query.shape, key.shape, value.shape)
        return 2 * int(sdpa_flop_count(*shapes))
    if packet is aten.mv:
        return 2 * args[0].numel()
    if packet in _FUSED_LAYERS:
        channels = out.shape[1 if packet is torch.ops.mkldnn._convolution_pointwise else -1]
        return 2 * out.numel() * args[1].numel() // channels
    if packet in flop_registry:
        return int(flop_registry[packet](*args, **kwargs, out_val=out))
    return 0


class Meter(TorchDispatchMode):
    """Count FLOPs and live bytes inside a ``with`` block. Use ``with meter.phase("backward"): ...`` to set the phase.

    Args:
        resident: tensors that live throughout the step (parameters, buffers, the batch). These tensors are included in
            `live` and `peak` from the start. Other tensors that existed before the step are added at their first use.
        layers: model. FLOPs are attributed to the modules of this model (see `layer_flops`). If None, FLOPs are not
            attributed.
        outside: tensors that are not counted.

    Attributes:
        live: total size of the live storages in bytes.
        peak: largest value of `live`. `live` is read after each operation, while both the operands and the results of
            the operation are alive.
        largest: size of the largest tensor created by an operation, in bytes.
        flops: number of FLOPs of the batch in each phase. A multiply-add is 2 FLOPs.
    """

    def __init__(
        self, resident: Iterable[Tensor] = (), layers: nn.Module | None = None, outside: Iterable[Tensor] = ()
    ) -> None:
        super().__init__()
        self._outside = {storage_id(tensor): tensor for tensor in outside}
        self.flops: dict[Phase, int] = {"forward": 0, "backward": 0}
        self._phase: Phase = "forward"
        self.live = 0
        self.largest = 0
        self._tracked: dict[int, tuple[weakref.ref, LiveTensor | None]] = {}
        self._layers = None if layers is None else _Attribution(layers)
        for tensor in resident:
            self._track(tensor, None)
        self.peak = self.live

    @contextmanager
    def phase(self, phase: Phase) -> Iterator[None]:
        """Attribute the FLOPs counted inside the ``with`` block to `phase`."""
        before, self._phase = self._phase, phase
        try:
            yield
        finally:
            self._phase = before

    def created(self) -> dict[int, LiveTensor]:
        """Return the live tensors that operations of this step created, keyed by storage id."""
        return {key: made for key, (_, made) in self._tracked.items() if made is not None}

    def layer_flops(self, images: int) -> dict[str, LayerFlops]:
        """Stop attributing FLOPs, and return a dict from module names to FLOPs divided by `images`."""
        assert self._layers is not None
        return self._layers.table(images)

    def _track(self, tensor: Tensor, operation: str | None) -> None:
        if tensor.layout != torch.strided:
            return
        storage = tensor.untyped_storage()
        key = storage._cdata
        if key in self._tracked or key in self._outside:
            return
        nbytes = storage.nbytes()

        def gone(_: object) -> None:
            self.live -= nbytes
            del self._tracked[key]
            if self._layers is not None:
                self._layers.forget(key)

        made = None if operation is None else LiveTensor(operation, tuple(tensor.shape), nbytes)
        if made is not None:
            self.largest = max(self.largest, nbytes)
        self._tracked[key] = (weakref.ref(storage, gone), made)
        self.live += nbytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        out = func(*args, **kwargs)
        for operand in tree_leaves((args, kwargs)):
            if isinstance(operand, Tensor):  # an operand that is not tracked yet is a constant cached before the step
                self._track(operand, None)
        for result in tree_leaves(out):
            if isinstance(result, Tensor):
                self._track(result, str(func))
        self.peak = max(self.peak, self.live)
        flops = operation_flops(func, args, kwargs, out)
        self.flops[self._phase] += flops
        if self._layers is not None:
            self._layers.add(func._overloadpacket, args, out, flops, self._phase)
        return out


class _Attribution:
    """Attribute the FLOPs of operations to modules.

    In the forward pass, the FLOPs of an operation are attributed to the module whose weight is an operand. If there is
    no such module, the FLOPs are attributed to the innermost running module. The weight also identifies layers whose
    ``forward`` method is never called, for example SwinV2's qkv layers. In the backward pass, an autograd node has the
    sequence number of its forward operation. All FLOPs of the node, including those of custom Functions, are attributed
    to the layer that created the node. Module hooks on gradients, as in torch.utils.module_tracker, would miss layers
    whose input does not require gradients.
    """

    def __init__(self, model: nn.Module) -> None:
        self._flops: dict[str, dict[Phase, int]] = defaultdict(lambda: {"forward": 0, "backward": 0})
        self._owner: dict[int, str] = {}
        self._copies: dict[int, str] = {}
        self._modules = RunningModules(model)
        self._running = self._modules.names
        self._maker: dict[int, tuple[str, bool]] = {}
        for name, module in model.named_modules():
            for parameter in module.parameters(recurse=False):
                if parameter.ndim >= 2:
                    self._owner.setdefault(storage_id(parameter), name)
            if isinstance(module, (nn.Linear, nn.modules.conv._ConvNd)):
                self._flops[name]  # creates an entry of zeros for a layer that is never reached

    def forget(self, storage: int) -> None:
        self._copies.pop(storage, None)

    def add(self, packet: Any, args: tuple[Any, ...], out: Any, flops: int, phase: Phase) -> None:
        if packet in (aten._to_copy, aten.clone):  # an autocast copy of a weight counts as the weight
            owner = self._owner_of(args[0])
            if owner is not None:
                self._copies[storage_id(out)] = owner
            return
        if not flops:
            return
        node = torch._C._current_autograd_node()
        owners = [owner for a in args if isinstance(a, Tensor) and (owner := self._owner_of(a)) is not None]
        by_weight = bool(owners)
        name = owners[-1] if owners else (self._running[-1] if self._running else "")
        if node is not None and node._sequence_nr() in self._maker and not self._running:
            name = self._maker[node._sequence_nr()][0]
        elif node is None or self._running:
            # The current operation's node has the latest sequence number. Recomputation inside the backward pass also
            # runs modules and takes this branch. The owner of a weight takes precedence over a running module.
            made = torch._C._autograd._get_sequence_nr() - 1
            if made not in self._maker or (by_weight and not self._maker[made][1]):
                self._maker[made] = (name, by_weight)
        self._flops[name][phase] += flops

    def _owner_of(self, tensor: Tensor) -> str | None:
        key = storage_id(tensor)
        return self._owner.get(key) or self._copies.get(key)

    def table(self, images: int) -> dict[str, LayerFlops]:
        """Remove the hooks from the model, and return the counts per image, keyed by module name."""
        self._modules.remove_hooks()
        return {
            name: LayerFlops(f["forward"] / images, f["backward"] / images, self._modules.calls[name])
            for name, f in self._flops.items()
        }


class SavedTensors(saved_tensors_hooks):
    """Record the storages that autograd saves for the backward pass, without keeping them alive.

    Run the forward pass inside ``with saved:``, and then call ``saved.alive()``.
    """

    def __init__(self) -> None:
        self._seen: dict[int, tuple[weakref.ref, int]] = {}
        super().__init__(self._pack, lambda t: t)

    def _pack(self, tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        self._seen[storage._cdata] = (weakref.ref(storage), storage.nbytes())
        return tensor

    def alive(self) -> dict[int, int]:
        """Return the full size in bytes of each saved storage that is still alive, keyed by storage id."""
        return {key: nbytes for key, (ref, nbytes) in self._seen.items() if ref() is not None}
