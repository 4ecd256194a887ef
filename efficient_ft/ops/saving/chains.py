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

    heads: int

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
        ctx: Any, chain: Chain, keeper: _Keeper, settings: tuple[Any, ...], x: Tensor, *parameters: Tensor | None
    ) -> Any:
        y, records = chain.run(keeper, settings, x, parameters, ctx.needs_input_grad[3:])
        flat: list[Any] = []
        ctx.counts = []
        for record in records:
            ctx.counts.append(len(record.saved_tensors))
            flat += record.saved_tensors
            record.saved_tensors = ()
        ctx.save_for_backward(*flat)
        ctx.chain, ctx.records = chain, records
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        saved, at = ctx.saved_tensors, 0
        for record, count in zip(ctx.records, ctx.counts, strict=True):
            record.saved_tensors = saved[at : at + count]
            at += count
        del saved
        return None, None, None, *ctx.chain.backward(ctx.records, g)


class Chain:
    """Operations that run as one autograd function.

    Args:
        policy: Storage format of each kind of tensor. The setting `Policy.forward` is not supported.
        modules: Names of the modules of the chain, which become part of the names of tensors.
    """

    def __init__(self, policy: Policy, *modules: str) -> None:
        assert not policy.forward
        self.policy, self.modules = policy, modules
        self._plans: dict[tuple[Any, ...], Plan] = {}

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), (self.policy, *self.modules)  # plans refer to the state of a method, and are made again

    def run(
        self, keeper: Any, settings: tuple[Any, ...], x: Tensor, parameters: Sequence[Any], needs: tuple[bool, ...]
    ) -> tuple[Tensor, list[_Record]]:
        """Return the output and the records of the operations. `needs` states which inputs require a gradient."""
        raise NotImplementedError  # abstract

    def backward(self, records: list[_Record], g: Tensor) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the parameters. Each record is freed after its operation."""
        raise NotImplementedError  # abstract

    def __call__(
        self,
        state: PackingState,
        region: str,
        heads: int | None,
        settings: tuple[Any, ...],
        x: Tensor,
        *parameters: Any,
    ) -> Tensor:
        """Run the chain on x (B, N, C).

        Args:
            state: Packing state that persists between steps.
            region: Name of the part of the model for this call (see `PackingState.begin_call`).
            heads: Number of attention heads of the part (see `PackedOperations`).
            settings: Settings of the layers.
            x: Activations. x or a parameter of the normalization must require a gradient.
            parameters: Parameters of the layers.
        """
        device = x.device
        autocast = torch.is_autocast_enabled(device.type) and torch.get_autocast_dtype(device.type)
        trained = tuple([p is not None and p.requires_grad for p in parameters])
        form = (x.shape, x.stride(), x.dtype, device, x.requires_grad, trained, autocast, heads, settings)
        plan = self._plans.get(form) or Plan()
        keeper = _Keeper(plan, self.policy, state, region, x.shape[0], heads)
        y: Tensor = _Function.apply(self, keeper, settings, x, *parameters)
        self._plans[form] = plan
        return y


class AttentionChain(Chain):
    """LayerNorm, a layer for q, k and v, attention without mask, and the output layer.

    The names are those of the normalization, the layer for q, k and v, the attention, and the output layer. The
    settings are the shape and ε of the normalization, the number of heads and the dimension of a head. The parameters
    are the weights and biases of the three layers.
    """

    def run(
        self, keeper: Any, settings: tuple[Any, ...], x: Tensor, parameters: Sequence[Any], needs: tuple[bool, ...]
    ) -> tuple[Tensor, list[_Record]]:
        """See `Chain.run`."""
        shape, eps, heads, dim = settings
        norm_weight, norm_bias, qkv_weight, qkv_bias, proj_weight, proj_bias = parameters
        of_x, of_norm_weight, of_norm_bias, of_qkv_weight, of_qkv_bias, of_proj_weight, of_proj_bias = needs
        norm, qkv, attention, proj = self.modules

        keeper.operation = f"{norm}/layer_norm"
        in_norm = _Record((False, of_x, False, of_norm_weight, of_norm_bias, False))
        y = _LayerNorm.forward(in_norm, keeper, x, shape, norm_weight, norm_bias, eps)

        keeper.operation = f"{qkv}/linear"
        in_qkv = _Record((False, True, of_qkv_weight, of_qkv_bias))
        y = _Linear.forward(in_qkv, keeper, y, qkv_weight, qkv_bias)

        keeper.operation = f"{attention}/scaled_dot_product_attention"
        in_attention = _Record((False, True, True, True, False, False))
        q, k, v = y.view(*y.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        if self.policy.plain_attention:
            y = _PlainAttention.forward(in_attention, q, k, v)
        elif self.policy.fused is not None:
            y = _FusedAttention.forward(in_attention, keeper, q, k, v, None, None)
        else:
            y = _Attention.forward(in_attention, keeper, q, k, v, dim**-0.5, None)
        del q, k, v

        keeper.operation = f"{proj}/linear"
        in_proj = _Record((False, True, of_proj_weight, of_proj_bias))
        y = _Linear.forward(in_proj, keeper, y.transpose(1, 2).reshape(*x.shape[:2], -1), proj_weight, proj_bias)
        in_attention.heads = heads
        return y, [in_norm, in_qkv, in_attention, in_proj]

    def backward(self, records: list[_Record], g: Tensor) -> tuple[Tensor | None, ...]:
        """See `Chain.backward`."""
        in_norm, in_qkv, in_attention, in_proj = records
        _, g, g_proj_weight, g_proj_bias = _linear_backward(in_proj, g)
        in_proj.saved_tensors = ()
        g = g.unflatten(-1, (in_attention.heads, -1)).transpose(1, 2)
        if self.policy.plain_attention:
            g_qkv = _PlainAttention.backward(in_attention, g)
        elif self.policy.fused is not None:
            g_qkv = _fused_attention_backward(in_attention, g)[1:4]
        else:
            g_qkv = _attention_backward(in_attention, g)[1:4]
        in_attention.saved_tensors = ()
        g = torch.stack([part.transpose(1, 2) for part in g_qkv], 2).flatten(2)
        del g_qkv
        _, g, g_qkv_weight, g_qkv_bias = _linear_backward(in_qkv, g)
        in_qkv.saved_tensors = ()
        _, g_x, _, g_norm_weight, g_norm_bias, _ = _layer_norm_backward(in_norm, g)
        in_norm.saved_tensors = ()
        return g_x, g_norm_weight, g_norm_bias, g_qkv_weight, g_qkv_bias, g_proj_weight, g_proj_bias


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
    """LayerNorm, a linear layer, GELU, and a second linear layer.

    The names are those of the four modules. The settings are the shape and ε of the normalization, and the
    approximation of GELU. The parameters are the weights and biases of the normalization and of the linear layers.
    """

    def run(
        self, keeper: Any, settings: tuple[Any, ...], x: Tensor, parameters: Sequence[Any], needs: tuple[bool, ...]
    ) -> tuple[Tensor, list[_Record]]:
        """See `Chain.run`."""
        shape, eps, approximate = settings
        norm_weight, norm_bias, weight_1, bias_1, weight_2, bias_2 = parameters
        of_x, of_norm_weight, of_norm_bias, of_weight_1, of_bias_1, of_weight_2, of_bias_2 = needs
        norm, layer_1, act, layer_2 = self.modules

        keeper.operation = f"{norm}/layer_norm"
        in_norm = _Record((False, of_x, False, of_norm_weight, of_norm_bias, False))
        y = _LayerNorm.forward(in_norm, keeper, x, shape, norm_weight, norm_bias, eps)

        keeper.operation = f"{layer_1}/linear"
        in_layer_1 = _Record((False, True, of_weight_1, of_bias_1))
        y = _Linear.forward(in_layer_1, keeper, y, weight_1, bias_1)

        keeper.operation = f"{act}/gelu"
        in_act = _Record((False, True, False, False))
        y = _Smooth.forward(in_act, keeper, y, *_GELU[approximate])

        keeper.operation = f"{layer_2}/linear"
        in_layer_2 = _Record((False, True, of_weight_2, of_bias_2))
        y = _Linear.forward(in_layer_2, keeper, y, weight_2, bias_2)
        return y, [in_norm, in_layer_1, in_act, in_layer_2]

    def backward(self, records: list[_Record], g: Tensor) -> tuple[Tensor | None, ...]:
        """See `Chain.backward`."""
        in_norm, in_layer_1, in_act, in_layer_2 = records
        _, g, g_weight_2, g_bias_2 = _linear_backward(in_layer_2, g)
        in_layer_2.saved_tensors = ()
        _, g, _, _ = _smooth_backward(in_act, g)
        in_act.saved_tensors = ()
        _, g, g_weight_1, g_bias_1 = _linear_backward(in_layer_1, g)
        in_layer_1.saved_tensors = ()
        _, g_x, _, g_norm_weight, g_norm_bias, _ = _layer_norm_backward(in_norm, g)
        in_norm.saved_tensors = ()
        return g_x, g_norm_weight, g_norm_bias, g_weight_1, g_bias_1, g_weight_2, g_bias_2


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
    autocast = torch.is_autocast_enabled("cpu")
    dtype = torch.get_autocast_dtype("cpu") if autocast else x.dtype
    shape = (x.shape[0], heads, x.shape[1], dim)
    return x.device.type == "cpu" and _chooses_flash(shape, dtype, torch.backends.cuda.flash_sdp_enabled())


@functools.lru_cache(256)
def _chooses_flash(shape: tuple[int, ...], dtype: torch.dtype, enabled: bool) -> bool:
    q = torch.empty(shape, dtype=dtype)
    return enabled and bool(torch._fused_sdp_choice(q, q, q) == SDPBackend.FLASH_ATTENTION.value)
