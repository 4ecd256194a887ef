"""Chains of packed operations that run as one autograd function.

A chain is a sequence of operations of this package whose intermediate results are used only by the chain, for example
the attention or the feed-forward network of a transformer block with the normalization before it. Compared with
`PackedOperations`, no function is intercepted, and autograd records one node instead of one node per operation.

The first run of a chain decides which tensors are packed, under which names, and which tensors are computed from other
packed tensors. Runs with inputs of the same form repeat these decisions. The results and the names of packed tensors
are the same as with `PackedOperations`.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.autograd.function import once_differentiable
from torch.nn.attention import SDPBackend

from efficient_ft.ops.autocast import compute_dtype
from efficient_ft.ops.saving.attention import _Attention, _FusedAttention
from efficient_ft.ops.saving.mode import PackingState, Policy
from efficient_ft.ops.saving.norms import _LayerNorm
from efficient_ft.ops.saving.pointwise import _Smooth
from efficient_ft.ops.saving.products import _Linear
from efficient_ft.ops.saving.sharing import SharedUnpack, apply_to, memory_order, to_order
from efficient_ft.ops.storage import PackContext, Packed, Packer

aten = torch.ops.aten


@dataclass
class _Decision:
    """Decision of a chain about a tensor: how the tensor is saved, or that it is the source of other tensors.

    Attributes:
        order: Dimensions in memory order, or None if this is their order.
        inverse: Permutation that restores the order of dimensions, or None.
        known: Index of the packed tensor that is reused, or None if the tensor is packed.
        name: Name of the tensor without the part of the model.
        heads: See `PackContext.heads`.
    """

    order: tuple[int, ...] | None
    inverse: tuple[int, ...] | None
    known: int | None = None
    name: str = ""
    heads: tuple[int, int] | None = None


@dataclass
class Plan:
    """Decisions of a chain for inputs of one form.

    Attributes:
        decisions: Decisions in the order in which the chain needs them.
        places: Contexts of the decisions that pack a tensor, for each name of the part of the model.
    """

    decisions: list[_Decision] = field(default_factory=list)
    places: dict[str, list[PackContext | None]] = field(default_factory=dict)


class _Keeper:
    """Saves the tensors of one run of a chain. Operations use this object like a `PackedOperations` mode."""

    def __init__(
        self, plan: Plan, policy: Policy, state: PackingState, region: str, samples: int, heads: int | None
    ) -> None:
        self.policy, self.state, self.operation = policy, state, ""
        self._plan, self._region, self._samples, self._heads = plan, region, samples, heads
        self._repeats = bool(plan.decisions)
        self._next = 0
        #: Packed tensors and registered sources, in the order of the decisions.
        self._kept: list[Packed] = []
        #: Index of each packed tensor and its storage, which only the first run needs.
        self._index: dict[tuple[Any, ...], tuple[weakref.ref, int]] = {}
        places = plan.places.get(region)
        if places is None:
            places = plan.places[region] = [self._place(decision) for decision in plan.decisions]
        self._places = places

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the weight that a layer uses, and the weight to save (see `PackedOperations.weight`)."""
        return weight, weight

    def keep(
        self,
        x: Tensor,
        packer: Packer,
        dtype: torch.dtype | None = None,
        heads: int | None = None,
        result: bool = False,
        role: str = "input",
    ) -> Packed:
        """Pack x, or return the packed tensor from which x can be computed (see `PackedOperations.keep`)."""
        if self._repeats:
            decision = self._plan.decisions[self._next]
        else:
            decision = self._decide(x, (dtype or x.dtype, packer), heads, role)
        place = self._places[self._next]
        self._next += 1
        if decision.known is None:
            memory = x if decision.order is None else x.permute(decision.order)
            assert place is not None
            packed = packer.pack(memory if dtype is None else memory.to(dtype), place)
            shared = SharedUnpack(packed.unpack, self.state.last)
            packed = Packed(packed.tensors, shared, shared)
        else:
            packed = self._kept[decision.known]
        self._kept.append(packed)
        packed.shared.add_user()
        if decision.known is None and decision.order is None:
            return packed
        unpack = partial(to_order, packed.unpack, decision.inverse, dtype or x.dtype)
        return Packed(packed.tensors, unpack, packed.shared)

    def set_source(self, y: Tensor, packed: Packed) -> None:
        """Register `packed` as the source of y (see `PackedOperations.set_source`)."""
        decision = self._plan.decisions[self._next] if self._repeats else self._decide_source(y)
        self._next += 1
        if decision.order is not None:
            unpack = partial(apply_to, partial(torch.permute, dims=decision.order), packed.unpack)
            packed = Packed(packed.tensors, unpack, packed.shared)
        self._kept.append(packed)

    def _decide(self, x: Tensor, form: tuple[Any, ...], heads: int | None, role: str) -> _Decision:
        order, _, identity = memory_order(x)
        storage = x.untyped_storage()
        known = self._find((*identity, *form), storage)
        if known is None:
            known = self._find((*identity, "derived"), storage)
        groups = None
        if heads is not None and self._heads and heads < x.dim() and x.shape[heads] % self._heads == 0:
            groups = (order.index(heads % x.dim()), self._heads)
        if known is None:
            self._index[*identity, *form] = (weakref.ref(storage), self._next)
        return self._add(order, known, f"{self.operation}/{role}", groups)

    def _decide_source(self, y: Tensor) -> _Decision:
        order, _, identity = memory_order(y)
        self._index[*identity, "derived"] = (weakref.ref(y.untyped_storage()), self._next)
        return self._add(order, -1, "", None)

    def _add(self, order: tuple[int, ...], known: int | None, name: str, groups: tuple[int, int] | None) -> _Decision:
        in_order = order == tuple(range(len(order)))
        inverse = None if in_order else tuple(order.index(d) for d in range(len(order)))
        decision = _Decision(None if in_order else order, inverse, known, name, groups)
        self._plan.decisions.append(decision)
        self._places.append(self._place(decision))
        return decision

    def _find(self, key: tuple[Any, ...], storage: torch.UntypedStorage) -> int | None:
        found = self._index.get(key)
        return found[1] if found is not None and found[0]() is storage else None

    def _place(self, decision: _Decision) -> PackContext | None:
        if decision.known is not None:
            return None
        name, state = f"{self._region}/{decision.name}", self.state
        return PackContext(name, self._samples, state.ranges, state.overflow, decision.heads, state.noise)


class _Record:
    """Stands in for the context that autograd passes to an operation."""

    def __init__(self, needs_input_grad: tuple[bool, ...]) -> None:
        self.needs_input_grad = needs_input_grad
        self.saved_tensors: Sequence[Any] = ()

    def save_for_backward(self, *tensors: Any) -> None:
        """Save tensors, which the chain passes to autograd."""
        self.saved_tensors = tensors


class _Function(torch.autograd.Function):
    """Autograd function of a chain."""

    @staticmethod
    def forward(
        ctx: Any,
        chain: Chain,
        keeper: _Keeper,
        norm: tuple[Any, ...],
        settings: Any,
        x: Tensor,
        *parameters: Tensor | None,
    ) -> Any:
        y, records = chain.run(keeper, norm, settings, x, parameters, ctx.needs_input_grad[4:])
        flat: list[Any] = []
        ctx.counts = []
        for record in records:
            ctx.counts.append(len(record.saved_tensors))
            flat += record.saved_tensors
            record.saved_tensors = ()
        ctx.save_for_backward(*flat)
        ctx.chain, ctx.records, ctx.settings = chain, records, settings
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, at = ctx.saved_tensors, 0
        for record, count in zip(ctx.records, ctx.counts, strict=True):
            record.saved_tensors = saved[at : at + count]
            at += count
        del saved
        return None, None, None, None, *ctx.chain.backward(ctx.records, ctx.settings, g)


class Chain:
    """LayerNorm, a linear layer, the operations between the two linear layers, and a second linear layer.

    The operations run as one autograd function. Subclasses implement the operations between the linear layers.

    Args:
        policy: Storage format of each kind of tensor. The setting `Policy.forward` is not supported.
        modules: Names of the normalization, the first layer, the module between the layers and the second layer, which
            become part of the names of tensors.
    """

    def __init__(self, policy: Policy, *modules: str) -> None:
        assert not policy.forward
        self.policy, self.modules = policy, modules
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.policy, *self.modules)  # plans refer to the state of a method, and are made again

    def __call__(
        self,
        state: PackingState,
        region: str,
        heads: int | None,
        norm: tuple[Any, ...],
        settings: Any,
        x: Tensor,
        *parameters: Any,
    ) -> Tensor:
        """Run the chain on x (B, N, C).

        Args:
            state: Packing state that persists between steps.
            region: Name of the part of the model for this call (see `PackingState.begin_call`).
            heads: Number of attention heads of the part (see `PackedOperations`).
            norm: Shape and ε of the normalization.
            settings: Settings of the operations between the linear layers.
            x: Activations. x or a parameter of the normalization must require a gradient.
            parameters: Weights and biases of the normalization and of the two linear layers.
        """
        device = x.device
        trained = tuple([p is not None and p.requires_grad for p in parameters])
        # Decisions depend on the memory layout of the output of attention, which differs between torch's kernels.
        of = torch.backends.cuda
        kernels = of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.cudnn_sdp_enabled(), of.math_sdp_enabled()
        form = (
            x.shape,
            x.stride(),
            x.dtype,
            compute_dtype(x),
            device,
            x.requires_grad,
            trained,
            heads,
            settings,
            kernels,
        )
        plan = self._plans.get(form) or Plan()
        keeper = _Keeper(plan, self.policy, state, region, x.shape[0], heads)
        y: Tensor = _Function.apply(self, keeper, norm, settings, x, *parameters)
        self._plans[form] = plan
        return y

    def run(
        self,
        keeper: Any,
        norm: tuple[Any, ...],
        settings: Any,
        x: Tensor,
        parameters: Sequence[Any],
        needs: tuple[bool, ...],
    ) -> tuple[Tensor, list[_Record]]:
        """Return the output and the records of the operations. `needs` states which inputs require a gradient."""
        norm_weight, norm_bias, weight_1, bias_1, weight_2, bias_2 = parameters
        of_x, of_norm_weight, of_norm_bias, of_weight_1, of_bias_1, of_weight_2, of_bias_2 = needs
        name_norm, name_1, name_between, name_2 = self.modules

        keeper.operation = f"{name_norm}/layer_norm"
        in_norm = _Record((False, of_x, False, of_norm_weight, of_norm_bias, False))
        y = _LayerNorm.forward(in_norm, keeper, x, norm[0], norm_weight, norm_bias, norm[1])

        keeper.operation = f"{name_1}/linear"
        in_1 = _Record((False, True, of_weight_1, of_bias_1))
        y = _Linear.forward(in_1, keeper, y, weight_1, bias_1)

        between, y = self.between(keeper, name_between, settings, y)

        keeper.operation = f"{name_2}/linear"
        in_2 = _Record((False, True, of_weight_2, of_bias_2))
        return _Linear.forward(in_2, keeper, y, weight_2, bias_2), [in_norm, in_1, between, in_2]

    def backward(self, records: list[_Record], settings: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the parameters. Each record is freed after its operation."""
        in_norm, in_1, between, in_2 = records
        _, g, g_weight_2, g_bias_2 = _linear_backward(in_2, g)
        in_2.saved_tensors = ()
        g = self.between_backward(between, settings, g)
        between.saved_tensors = ()
        _, g, g_weight_1, g_bias_1 = _linear_backward(in_1, g)
        in_1.saved_tensors = ()
        _, g_x, _, g_norm_weight, g_norm_bias, _ = _layer_norm_backward(in_norm, g)
        in_norm.saved_tensors = ()
        return g_x, g_norm_weight, g_norm_bias, g_weight_1, g_bias_1, g_weight_2, g_bias_2

    def between(self, keeper: Any, name: str, settings: Any, y: Tensor) -> tuple[_Record, Tensor]:
        """Return the record and the output of the operations between the linear layers. `name` is their module."""
        raise NotImplementedError  # abstract

    def between_backward(self, record: _Record, settings: Any, g: Tensor) -> Tensor:
        """Return the gradient of the input of `between`."""
        raise NotImplementedError  # abstract


class AttentionChain(Chain):
    """Chain with attention without a mask. The first linear layer computes q, k and v.

    The settings are the number of heads and the dimension of a head.
    """

    def between(self, keeper: Any, name: str, settings: tuple[int, int], y: Tensor) -> tuple[_Record, Tensor]:
        """See `Chain.between`."""
        heads, dim = settings
        keeper.operation = f"{name}/scaled_dot_product_attention"
        record = _Record((False, True, True, True, False, False))
        q, k, v = y.view(*y.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.policy.plain_attention:
            y = _PlainAttention.forward(record, q, k, v)
        elif self.policy.fused is not None:
            y = _FusedAttention.forward(record, keeper, q, k, v, None, None)
        else:
            y = _Attention.forward(record, keeper, q, k, v, dim**-0.5, None)
        return record, y.transpose(1, 2).reshape(len(y), -1, heads * dim)

    def between_backward(self, record: _Record, settings: tuple[int, int], g: Tensor) -> Tensor:
        """See `Chain.between_backward`."""
        g = g.unflatten(-1, settings).transpose(1, 2)
        if self.policy.plain_attention:
            g_qkv = _PlainAttention.backward(record, g)
        elif self.policy.fused is not None:
            g_qkv = _fused_attention_backward(record, g)[1:4]
        else:
            g_qkv = _attention_backward(record, g)[1:4]
        return torch.stack([part.transpose(1, 2) for part in g_qkv], 2).flatten(2)


class _PlainAttention:
    """Attention that saves the same tensors as torch's attention operation on a CPU (see `supports_plain`)."""

    @staticmethod
    def forward(record: _Record, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        y, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu(q, k, v)
        record.save_for_backward(q, k, v, y, logsumexp)
        return y

    @staticmethod
    def backward(record: _Record, g: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v, y, logsumexp = record.saved_tensors
        return aten._scaled_dot_product_flash_attention_for_cpu_backward(g, q, k, v, y, logsumexp, 0.0, False)


class FeedForwardChain(Chain):
    """Chain with GELU. The setting is the approximation of GELU."""

    def between(self, keeper: Any, name: str, settings: str, y: Tensor) -> tuple[_Record, Tensor]:
        """See `Chain.between`."""
        keeper.operation = f"{name}/gelu"
        record = _Record((False, True, False, False))
        return record, _Smooth.forward(record, keeper, y, *_GELU[settings])

    def between_backward(self, record: _Record, settings: str, g: Tensor) -> Tensor:
        """See `Chain.between_backward`."""
        g_y: Tensor = _smooth_backward(record, g)[1]
        return g_y


#: GELU and its gradient for each approximation.
_GELU = {
    kind: (partial(F.gelu, approximate=kind), partial(aten.gelu_backward, approximate=kind))
    for kind in ("none", "tanh")
}

# The backward pass of a chain cannot be differentiated, so that its operations do not have to be marked again.
_linear_backward, _layer_norm_backward, _smooth_backward, _attention_backward, _fused_attention_backward = (
    function.backward.__wrapped__  # type: ignore[attr-defined]
    for function in (_Linear, _LayerNorm, _Smooth, _Attention, _FusedAttention)
)


def supports_plain(x: Tensor, heads: int, dim: int) -> bool:
    """Return True if torch would compute attention in x (B, N, C) with the kernel that `_PlainAttention` uses."""
    shape = (x.shape[0], heads, x.shape[1], dim)
    return x.device.type == "cpu" and _chooses_flash(shape, compute_dtype(x), torch.backends.cuda.flash_sdp_enabled())


@functools.lru_cache(256)
def _chooses_flash(shape: tuple[int, ...], dtype: torch.dtype, enabled: bool) -> bool:
    q = torch.empty(shape, dtype=dtype)
    return enabled and bool(torch._fused_sdp_choice(q, q, q) == SDPBackend.FLASH_ATTENTION.value)
