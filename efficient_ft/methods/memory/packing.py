"""Base classes of the methods that pack activations, and functions that select the parts of a model to pack.

In training, the forward passes of the parts (blocks, stem, downsampling layers) run in a `PackedOperations` mode.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_ft.core.context import context
from efficient_ft.core.errors import hint
from efficient_ft.core.format import format_bytes
from efficient_ft.methods.base import Applied
from efficient_ft.methods.forwards import forwards_of, put_around
from efficient_ft.methods.memory.base import MemoryForward, MemoryMethod
from efficient_ft.methods.memory.sub_blocks import PackedBlock
from efficient_ft.methods.quantized import refuse_quantized
from efficient_ft.methods.summary import are, count, left, within
from efficient_ft.models.marks import is_inside
from efficient_ft.models.view import ModelView, Reason, Skipped, is_norm, parameters_under
from efficient_ft.models.view.probe import BATCH, call, fake_copy
from efficient_ft.ops.saving import (
    DenseKept,
    PackedOperations,
    PackingState,
    Policy,
    packed_operation,
    packing_suspended,
)
from efficient_ft.ops.storage import Dense, GroupBits, Packer, Sparse

#: Reason why low-rank methods cannot be combined with methods that change the forward pass of layers.
DENSE_FORWARD = "low-rank layers have their own dense forward pass and save their projected input"
#: Reasons why a layer is not packed although it belongs to a packed module. The input of such a layer has no dimension
#: for the images of the batch.
_NO_BATCH = (Reason.NOT_FROM_IMAGES, Reason.ROUTED)


@dataclass(frozen=True)
class Part:
    """Part of a model that a method packs.

    Attributes:
        layers: packed layers inside the part. The keys are the full names of the layers.
        networks: layers that compute an attention bias from token positions.
        is_head: True if the part contains the classifier of a model with attention.
    """

    name: str
    module: nn.Module
    layers: dict[str, nn.Module]
    networks: tuple[nn.Module, ...]
    is_head: bool


class PackedForward(MemoryForward):
    """Forward pass that packs the tensors that the module saves in training. `packing` persists between steps."""

    not_compiled = "packed activations"

    def __init__(
        self,
        module: nn.Module,
        name: str,
        policy: Policy,
        packing: PackingState,
        method: str,
        networks: Sequence[nn.Module] = (),
    ) -> None:
        super().__init__(module)
        self.name, self.policy, self.packing, self.method, self.networks = name, policy, packing, method, networks
        counts = (getattr(m, "num_heads", None) for m in module.modules())
        self.heads: int | None = next((count for count in counts if type(count) is int), None)
        usual = PackedBlock.is_usual(module, policy)
        self._block = PackedBlock(module, policy, packing, self.heads) if usual else None

    @torch.compiler.disable  # The mode intercepts operations, which is not possible in compiled code.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not self.training or not torch.is_grad_enabled():
            return self.within(*args, **kwargs)
        x = args[0] if args else None
        if not isinstance(x, Tensor):
            x = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        if x is None or not x.numel():
            return self.within(*args, **kwargs)
        self.refuse_recomputation(self.method)
        policy = self.policy
        if self.networks and any(p.requires_grad for layer in self.networks for p in layer.parameters()):
            policy = with_position_network(policy)
        samples = x.shape[0]
        if self._block is not None and policy is self.policy and self.inner is None and len(args) == 1 and not kwargs:
            y = self._block(x, partial(self._begin, samples))
            if y is not None:
                return y
        with self._mode(policy, self.name, samples):
            return self.within(*args, **kwargs)

    def _begin(self, samples: int) -> tuple[str, Callable[[], PackedOperations]]:
        """Start a call of the part. Return its name for this call, and a function that returns a mode in this call."""
        self.packing.last.held = None  # an interrupted backward pass may have left a tensor
        region = self.packing.begin_call(self.name)
        return region, partial(self._mode, self.policy, region, samples, records=False)

    def _mode(self, policy: Policy, region: str, samples: int, records: bool = True) -> PackedOperations:
        modules = {module: name for name, module in self.module.named_modules()} if policy.named else None
        mode = PackedOperations(policy, self.packing, region, samples, self.heads, modules)
        mode.records = records
        return mode


def uniform_policy(packer: Packer, **options: Any) -> Policy:
    """Return a policy that packs all kinds of activations with `packer`, except for the kinds given in `options`."""
    return Policy(**(dict.fromkeys(("product", "norm", "attention", "activation"), packer) | options))


def with_position_network(policy: Policy) -> Policy:
    """Return the policy for a part in which a trained network computes an attention bias from token positions.

    The gradient of the bias equals the gradient of the attention scores, summed over images and windows. Each row of
    this gradient sums to 0, so that most of the terms in the gradient of the network cancel out. If q, k, v and the
    output of the softmax were stored in low precision, errors would dominate the gradient of the network. Therefore,
    `Sparse` and `GroupBits` are replaced by a format with 8 bits per value.
    """
    packer = policy.attention
    if isinstance(packer, Dense) or (isinstance(packer, Sparse) and not packer.sparsity and not packer.eight_bits):
        return policy  # This format saves exact values.
    if policy.forward:  # In the negative control, the forward pass also uses pruned tensors.
        return replace(policy, position_network=True)
    if isinstance(packer, Sparse):
        packer = GroupBits(8)
    elif isinstance(packer, GroupBits):
        packer = replace(packer, bits=8)
    return replace(policy, attention=packer, position_network=True)


class _PlainForward(MemoryForward):
    """Forward pass without packing, for a module whose input has no dimension for the images of the batch."""

    not_compiled = PackedForward.not_compiled

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        with packing_suspended():
            return self.within(*args, **kwargs)


class PartwiseMethod(MemoryMethod):
    """Base class of the methods that save the activations of a model in a different storage format, part by part.

    In a model with attention, the blocks, the modules between stages, and a stem with several convolutions are packed.
    The patch embedding, the final normalization and the head stay dense and exact, as published. In a network without
    attention, all layers are packed, including the stem and the classifier, as published. Layers that compute no
    gradients do not save tensors. The selection method determines which parameters are trained. torch.compile does not
    compile packed parts.

    Attributes:
        packs_tail: if True, the final normalization of a model with attention is also packed. The head then saves an
            exact copy of its input (the class token), so that the tensor with all tokens can be freed.
    """

    packs_tail: bool = False

    def _left_plain(self, view: ModelView) -> dict[str, Skipped]:
        """Return the reason for each additional layer that is not changed. The keys are the names of the layers."""
        return {}

    def _packs(self, module: nn.Module) -> bool:
        """Return True if the report lists modules of the same type as `module`."""
        return isinstance(module, nn.Linear | nn.Conv2d) or is_norm(module)

    @abstractmethod
    def _forward_of(self, part: Part, packing: PackingState) -> MemoryForward:
        """Return the replacement for the forward pass of a part. The state `packing` persists between steps."""

    def _apply(self, model: nn.Module, view: ModelView) -> Applied:
        parts, heads, skipped = _parts(view, self.packs_tail)
        plain = {x.name: x.why_not for x in view.layers if x.why_not is not None and x.why_not.reason in _NO_BATCH}
        plain.update(self._left_plain(view))
        inside = {
            part: [
                f"{part}.{name}" if name else part
                for name, module in model.get_submodule(part).named_modules()
                if self._packs(module)
            ]
            for part in parts
        }
        names = [name for part in parts for name in inside[part]]
        unpacked = {name: Skipped(Reason.UNPACKED_OPERATION) for name in names if not _runs_packed(view, name)}
        skipped.update({name: why for name, why in (unpacked | plain).items() if name in names})
        touched = tuple(name for name in names if name not in skipped)
        if not touched:
            return Applied(self.name, (), skipped)
        refuse_quantized(self.name, model, parameters_under(model, [part for part in parts if part not in plain]))
        packing = self._begin()
        for part in parts:
            module = model.get_submodule(part)
            if part not in plain:
                layers = {name: model.get_submodule(name) for name in inside[part] if name not in plain}
                networks = tuple(model.get_submodule(layer) for layer in _position_networks(view, part, parts))
                put_around(module, self._forward_of(Part(part, module, layers, networks, part in heads), packing))
        for name in plain:
            module = model.get_submodule(name)
            if name in names and name not in parts:
                put_around(module, _PlainForward(module))
        which = f"{count(len(touched), 'layer')} in {within(touched)}" if skipped else f"all {len(touched)} layers"
        summary = f"{which} packed{left(skipped, 'dense')}"
        notes = self._notes(model, view, packing)
        if (left_out := _left_out(view, parts)) is not None:
            summary, notes = f"{summary}; {left_out}", (left_out, *notes)
        return Applied(self.name, touched, skipped, notes, summary=summary)

    def _notes(self, model: nn.Module, view: ModelView, packing: PackingState) -> tuple[str, ...]:
        """Return additional sentences for the report after all parts have been packed."""
        return ()


class ActivationPacking(PartwiseMethod):
    """Base class of the methods that pack activations according to a `Policy`. A subclass implements `policy`.

    `PartwiseMethod` describes which parts are packed. A constructor must call ``super().__init__()``.

    Raises:
        UserError: Raised by `apply` if no layer of the model can be packed, and by `step_end` if a packed value exceeds
            the range of fp16.
    """

    #: Class that replaces the forward passes of the parts.
    _forward: type[PackedForward] = PackedForward

    @abstractmethod
    def policy(self) -> Policy:
        """Return the policy, which contains the packer for each kind of activation. `apply` calls this function."""

    def policy_of(self, part: str) -> Policy:
        """Return the policy for the part with the full name `part`. By default, all parts have the same policy."""
        return self.policy()

    def _forward_of(self, part: Part, packing: PackingState) -> MemoryForward:
        policy = self.policy_of(part.name)
        policy = replace(policy, product=Dense(alone=True)) if part.is_head else policy
        return self._forward(part.module, part.name, policy, packing, self.name, part.networks)

    def _notes(self, model: nn.Module, view: ModelView, packing: PackingState) -> tuple[str, ...]:
        if context.short_reports:
            return ()
        notes = []
        forwards = {
            name: f for name, m in model.named_modules() for f in forwards_of(m) if isinstance(f, PackedForward)
        }
        finer = [
            name
            for name, forward in forwards.items()
            if forward.networks and with_position_network(forward.policy).attention != forward.policy.attention
        ]
        if finer:
            notes.append(
                "q, k, v and softmax are saved in 8 bits, because a trained network computes the attention bias"
                f" ({within(finer)})"
            )
        kept = _dense_bytes(model, view, packing)
        named = [f"{name} {format_bytes(size)}" for name, size in sorted(kept.items(), key=lambda x: -x[1])]
        if named:
            notes.append(
                f"operations that do not support packing save the following memory per image: {', '.join(named)}"
            )
        return tuple(notes)


def _dense_bytes(model: nn.Module, view: ModelView, packing: PackingState) -> dict[str, float]:
    """Return the number of bytes per image that operations without a packed version save in a training step.

    The keys are the names of the operations. The bytes are counted on a copy of the model with fake tensors, which
    requires no memory or arithmetic. Operations that save less than 0.01 MiB are omitted. The result is empty if the
    model cannot run on fake tensors because its forward pass depends on the values of tensors.
    """
    packing.dense = DenseKept(BATCH)
    try:
        mode, (copied, state) = fake_copy((model, packing))
    finally:
        packing.dense = None
    state.dense.exclude([*copied.parameters(), *copied.buffers()])
    try:
        with mode:
            call(copied.train(), view.image_size)
    except Exception:  # The model may raise any exception on fake tensors. In this case, the report has no note.
        return {}
    found = {name: size / BATCH for name, size in state.dense.bytes_of.items()}
    return {name: size for name, size in found.items() if size >= 2**20 / 100}


def _position_networks(view: ModelView, part: str, parts: Sequence[str]) -> list[str]:
    """Return the names of layers in `part`, or outside of all parts, whose input does not come from the images."""
    names = [x.name for x in view.layers if x.why_not is not None and x.why_not.reason is Reason.NOT_FROM_IMAGES]
    others = tuple(f"{other}." for other in parts if other != part)
    return [name for name in names if not name.startswith(others)]


def _runs_packed(view: ModelView, name: str) -> bool:
    """Return False if the layer is a normalization that calls torch functions, none of which has a packed version."""
    functions = view.functions(name)
    if functions is None or not is_norm(view.model.get_submodule(name)):
        return True
    return any(packed_operation(function) is not None for function in functions)


def _around(module: nn.Module, inner: list[str], prefix: str = "") -> Iterator[str]:
    """Yield the names of the largest modules outside of `inner` that have a forward method."""
    for name, part in module.named_children():
        path = f"{prefix}{name}"
        if not _has_forward(part) or any(one.startswith(f"{path}.") for one in inner):
            yield from _around(part, inner, f"{path}.")
        elif path not in inner:
            yield path


def _has_forward(module: nn.Module) -> bool:
    return type(module).forward is not nn.Module.forward


def _unrecognized_blocks(view: ModelView, attention: list[str], known: Sequence[str]) -> list[str]:
    """Return the names of the modules in lists with attention that are outside of `known` and of the tail.

    The view recognizes blocks by the name of their list. Here, a list is a container with at least two modules that
    contain layers in `attention`. An item of a list that has no forward method is replaced by its submodules.
    """
    found: list[str] = []
    for name, module in view.model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.ModuleDict | nn.Sequential):
            continue
        if is_inside(name, frozenset([*known, *view.tail, *found])) or any(one.startswith(f"{name}.") for one in known):
            continue
        items = [f"{name}.{item}" if name else item for item, _ in module.named_children()]
        if sum(any(layer.startswith(f"{item}.") for layer in attention) for item in items) < 2:
            continue
        for item in items:
            part = view.model.get_submodule(item)
            found += [item] if _has_forward(part) else [f"{item}.{inner}" for inner, _ in part.named_children()]
    return found


def _parts(view: ModelView, packs_tail: bool) -> tuple[list[str], list[str], dict[str, Skipped]]:
    """Return the modules to pack, the modules that contain the head, and the reasons for the dense modules.

    All modules are given by name. The modules to pack are disjoint. The second list is empty if the model has no
    attention.
    """
    blocks = (name for block in view.blocks for name in view.called_modules(block))
    inner = [*blocks, *(name for extras in view.stage_extras for name in extras)]
    attention = [layer.name for layer in view.layers if layer.in_attention]
    if not attention:
        around = list(_around(view.model, inner))
        return [*around, *inner] if inner else around, [], {}
    inner += _unrecognized_blocks(view, attention, inner)
    parts, heads, dense = list(inner), [], {}
    for name in _around(view.model, inner):
        module = view.model.get_submodule(name)
        convolutions = sum(isinstance(m, nn.Conv2d) for m in module.modules())
        is_head = any(h == name or h.startswith(f"{name}.") for h in view.head)
        # Without recognized blocks, the tail is unknown. A normalization outside of all blocks is usually the last one.
        in_tail = is_inside(name, frozenset(view.tail)) or (not view.blocks and is_norm(module))
        if packs_tail and (in_tail or is_head):
            parts.append(name)
            heads += [name] if is_head else []
        elif in_tail or is_head:
            dense[name] = Skipped(Reason.AS_PUBLISHED, "dense, as published")
        elif convolutions > 1 or any(layer == name or layer.startswith(f"{name}.") for layer in attention):
            parts.append(name)
        elif convolutions:
            dense[name] = Skipped(Reason.AS_PUBLISHED, "dense, as published")
        elif any(isinstance(m, nn.Linear) or is_norm(m) for m in module.modules()):
            dense[name] = Skipped(Reason.OTHER, "outside of the blocks")
    return parts, heads, dense


def _left_out(view: ModelView, parts: Sequence[str]) -> str | None:
    """Return a note that lists the layers outside of `parts` if they are at least a quarter of all layers, or None.

    A head that is a single layer and the stem are not counted. If the head was inferred, it may contain blocks.
    """
    within_parts = frozenset(parts)
    stem = {x.name for x in view.layers if x.why_not is not None and x.why_not.reason is Reason.STEM}
    layers = [x.name for x in view.layers if x.name not in stem and x.name not in view.head]
    outside = [name for name in layers if not is_inside(name, within_parts)]
    if 4 * len(outside) < len(layers) or not outside:
        return None
    advice = hint(" (if they belong to blocks, pass the names of all blocks as the argument blocks)")
    return f"{count(len(outside), 'layer')} in {within(outside)} {are(len(outside))} outside of the blocks{advice}"
