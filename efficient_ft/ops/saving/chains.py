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
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, ClassVar

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from efficient_ft.ops.autocast import compute_dtype
from efficient_ft.ops.first_order import first_order
from efficient_ft.ops.saving.attention import (
    attention_again,
    attention_backward,
    cpu_kernel_backward,
    unfused_attention,
    unfused_attention_backward,
    uses_cpu_kernel,
)
from efficient_ft.ops.saving.mode import PackingState, Policy
from efficient_ft.ops.saving.norms import affine, layer_norm, layer_norm_backward
from efficient_ft.ops.saving.products import input_gradient, parameter_gradients
from efficient_ft.ops.saving.sharing import memory_order
from efficient_ft.ops.storage import Dense, PackContext, Packer

aten = torch.ops.aten

_FORMS = 64  # maximum number of plans of a chain


@dataclass
class _Decision:
    """Decision of a chain about a tensor: how the tensor is saved, or from which tensor it is computed.

    Attributes:
        order: Dimensions in memory order, or None if this is their order.
        inverse: Permutation that restores the order of dimensions, or None.
        dtype: Dtype of the unpacked tensor.
        known: Index of the decision about the tensor that is reused, -1 if `compute` computes the tensor, or None if
            the tensor is packed.
        compute: Function that computes the tensor in the backward pass, or None if the tensor is unpacked.
        is_shared: True if several operations need the unpacked tensor.
        name: Name of the tensor without the part of the model.
        heads: See `PackContext.heads`.
    """

    order: tuple[int, ...] | None
    inverse: tuple[int, ...] | None
    dtype: torch.dtype
    known: int | None = None
    compute: Callable[[_Saved], Tensor] | None = None
    name: str = ""
    heads: tuple[int, int] | None = None
    is_shared: bool = False


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
    """Saves the tensors of one run of a chain.

    Attributes:
        tensors: Tensors to save with autograd.
        parts: Mapping from the index of each decision that packs a tensor to the positions of the packed tensors in
            `tensors`, and the function that unpacks them.
    """

    def __init__(
        self, plan: Plan, policy: Policy, state: PackingState, region: str, samples: int, heads: int | None
    ) -> None:
        self.policy, self.state, self.decisions = policy, state, plan.decisions
        self.tensors: list[Tensor | None] = []
        self.parts: dict[int, tuple[int, int, Callable[..., Tensor]]] = {}
        self._region, self._samples, self._heads = region, samples, heads
        self._next = 0
        places = plan.places.get(region)
        if places is None:
            places = plan.places[region] = [self._place(decision) for decision in plan.decisions]
        self._places = places
        #: Index of each tensor and its storage, which only the first run needs.
        self._index: dict[tuple[Any, ...], tuple[weakref.ref, int]] | None = None if plan.decisions else {}

    def keep(
        self, x: Tensor, packer: Packer, name: str, dtype: torch.dtype | None = None, heads: int | None = None
    ) -> int:
        """Pack x unless x is already packed or can be computed. Return the index of the decision about x.

        See `PackedOperations.keep` for the arguments. `name` is the name of the tensor without the part of the model.
        """
        at = self._next
        self._next = at + 1
        if self._index is None:
            decision = self.decisions[at]
        else:
            decision = self._decide(x, (dtype or x.dtype, packer), name, heads)
        if decision.known is None:
            place = self._places[at]
            assert place is not None
            memory = x if decision.order is None else x.permute(decision.order)
            packed = packer.pack(memory if memory.dtype == decision.dtype else memory.to(decision.dtype), place)
            start = len(self.tensors)
            self.tensors += packed.tensors
            self.parts[at] = start, len(self.tensors), packed.unpack
        return at

    def computed(
        self, y: Tensor, compute: Callable[[_Saved], Tensor], source: int | None = None, of: Tensor | None = None
    ) -> None:
        """Register a function that computes y in the backward pass. Operations that would save y then call it.

        `source` is the index of the tensor that the function needs. If `of` is given, and y is not a view of `of`, the
        function is not used.
        """
        if self._index is not None:
            order, _, identity = memory_order(y)
            storage = y.untyped_storage()
            if of is None or of.untyped_storage()._cdata == storage._cdata:
                self._index[*identity, "derived"] = (weakref.ref(storage), self._next)
                if source is not None:
                    self.decisions[source].is_shared = True
            self._add(order, y.dtype, -1, "", None, compute)
        self._next += 1

    def _decide(self, x: Tensor, form: tuple[Any, ...], name: str, heads: int | None) -> _Decision:
        assert self._index is not None
        order, _, identity = memory_order(x)
        storage = x.untyped_storage()
        known = self._find((*identity, *form), storage)
        if known is None:
            known = self._find((*identity, "derived"), storage)
        groups = None
        if heads is not None and self._heads and heads < x.dim() and x.shape[heads] % self._heads == 0:
            groups = (order.index(heads % x.dim()), self._heads)
        if known is None:
            self._index[*identity, *form] = (weakref.ref(storage), len(self.decisions))
        return self._add(order, form[0], known, name, groups)

    def _add(
        self,
        order: tuple[int, ...],
        dtype: torch.dtype,
        known: int | None,
        name: str,
        groups: tuple[int, int] | None,
        compute: Callable[[_Saved], Tensor] | None = None,
    ) -> _Decision:
        in_order = order == tuple(range(len(order)))
        inverse = None if in_order else tuple(order.index(d) for d in range(len(order)))
        decision = _Decision(None if in_order else order, inverse, dtype, known, compute, name, groups)
        if known is not None and known >= 0:
            self.decisions[known].is_shared = True
        self.decisions.append(decision)
        self._places.append(self._place(decision))
        return decision

    def _find(self, key: tuple[Any, ...], storage: torch.UntypedStorage) -> int | None:
        assert self._index is not None
        found = self._index.get(key)
        return found[1] if found is not None and found[0]() is storage else None

    def _place(self, decision: _Decision) -> PackContext | None:
        if decision.known is not None:
            return None
        name, state = f"{self._region}/{decision.name}", self.state
        return PackContext(name, self._samples, state.ranges, state.overflow, decision.heads, state.noise)


class _Saved:
    """Saved tensors of one run of a chain in its backward pass.

    Consecutive operations that need the same tensor share the unpacked tensor, which is freed when another tensor is
    needed.
    """

    def __init__(self, keeper: _Keeper, tensors: Sequence[Any]) -> None:
        self.tensors = tensors
        self._decisions, self._parts = keeper.decisions, keeper.parts
        self._last: tuple[int, Tensor] | None = None
        #: Recomputed attention that the next operation needs.
        self.attention: Tensor | None = None

    def get(self, at: int) -> Tensor:
        """Return the tensor for which `_Keeper.keep` returned `at`."""
        decision = self._decisions[at]
        if decision.known is None:
            x = self._unpacked(at, decision)
        else:
            source = self._decisions[decision.known]
            if source.compute is None:
                x = self._unpacked(decision.known, source)
            else:
                x = source.compute(self)
                x = x if source.order is None else x.permute(source.order)
        if x.dtype != decision.dtype:
            x = x.to(decision.dtype)
        return x if decision.inverse is None else x.permute(decision.inverse)

    def release(self) -> None:
        """Free the unpacked tensor that was kept for the next operation."""
        self._last = None

    def _unpacked(self, at: int, decision: _Decision) -> Tensor:
        last, self._last = self._last, None
        if last is not None and last[0] == at:
            x = last[1]
        else:
            del last  # free the last tensor before this tensor is unpacked
            start, stop, unpack = self._parts[at]
            x = unpack(*self.tensors[start:stop])
        if decision.is_shared:
            self._last = at, x
        return x


class _Function(torch.autograd.Function):
    """Autograd function of a chain."""

    @staticmethod
    def forward(
        ctx: Any, chain: Chain, keeper: _Keeper, norm: tuple[Any, ...], settings: Any, x: Tensor, *parameters: Any
    ) -> Tensor:
        needs = ctx.needs_input_grad[4:]
        y, ctx.kept = chain.run(keeper, norm, settings, x, parameters, needs)
        ctx.save_for_backward(*keeper.tensors)
        keeper.tensors = []
        ctx.chain, ctx.keeper, ctx.settings = chain, keeper, settings
        return y

    @staticmethod
    @first_order
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        last = ctx.keeper.state.last
        last.held, last.in_backward = None, True
        saved = _Saved(ctx.keeper, ctx.saved_tensors)
        return None, None, None, None, *ctx.chain.backward(saved, ctx.kept, ctx.settings, ctx.needs_input_grad[4:], g)


class Chain:
    """LayerNorm, a linear layer, the operations between the two linear layers, and a second linear layer.

    The operations run as one autograd function. Subclasses implement the operations between the linear layers.

    Args:
        policy: Storage format of each kind of tensor. The setting `Policy.forward` is not supported.
        modules: Names of the normalization, the first layer, the module between the layers and the second layer, which
            become part of the names of tensors.
    """

    #: Name of the operation between the linear layers.
    operation: ClassVar[str]

    def __init__(self, policy: Policy, *modules: str) -> None:
        assert not policy.forward
        self.policy, self.modules = policy, modules
        operations = ("layer_norm", "linear", self.operation, "linear")
        self._names = [f"{module}/{name}" for module, name in zip(modules, operations, strict=True)]
        self._norm_name = f"{self._names[0]}/{'normalized' if policy.normalized else 'input'}"
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
        trained = tuple([p is not None and p.requires_grad for p in parameters])
        form = (
            *(x.shape, x.stride(), x.dtype, compute_dtype(x), x.device, x.requires_grad),
            *(trained, heads, settings, self._kernels()),
        )
        if len(self._plans) > _FORMS:  # the number of tokens differs between steps
            self._plans.clear()
        plan = self._plans.get(form) or Plan()
        keeper = _Keeper(plan, self.policy, state, region, x.shape[0], heads)
        y: Tensor = _Function.apply(self, keeper, norm, settings, x, *parameters)
        self._plans[form] = plan
        return y

    def run(
        self,
        keeper: _Keeper,
        norm: tuple[Any, ...],
        settings: Any,
        x: Tensor,
        parameters: Sequence[Any],
        needs: Sequence[bool],
    ) -> tuple[Tensor, tuple[Any, ...]]:
        """Return the output, and the values that `backward` needs in addition to the saved tensors.

        `needs` states which inputs require a gradient.
        """
        policy, names = self.policy, self._names
        norm_weight, norm_bias, weight_1, bias_1, weight_2, bias_2 = parameters
        y, normalized, rstd, mean = layer_norm(x, norm[0], norm_weight, norm_bias, norm[1], policy.normalized)
        keeper.tensors = [norm_weight, norm_bias, weight_1, weight_2, rstd, mean]
        of_norm = keeper.keep(normalized, policy.norm, self._norm_name, None, -1)
        del normalized
        if policy.normalized and policy.derived:
            keeper.computed(y, partial(_affine_again, of_norm), of_norm)
        z = F.linear(y, weight_1, bias_1)
        of_1 = keeper.keep(y, policy.product, f"{names[1]}/input", z.dtype, -1) if needs[3] else None
        dtype_1 = y.dtype
        del y
        between, z = self.between(keeper, names[2], settings, z)
        y = F.linear(z, weight_2, bias_2)
        of_2 = keeper.keep(z, policy.product, f"{names[3]}/input", y.dtype, -1) if needs[5] else None
        return y, (norm[0], of_norm, of_1, between, of_2, dtype_1, z.dtype)

    def backward(
        self, saved: _Saved, kept: tuple[Any, ...], settings: Any, needs: Sequence[bool], g: Tensor
    ) -> tuple[Tensor | None, ...]:
        """Return the gradients of the input and the parameters."""
        of_x, of_norm_weight, of_norm_bias, _, of_bias_1, _, of_bias_2 = needs
        shape, of_norm, of_1, between, of_2, dtype_1, dtype_2 = kept
        norm_weight, norm_bias, weight_1, weight_2, rstd, mean = saved.tensors[:6]
        # Each unpacked input is freed before the gradient of this input is created.
        g_weight_2, g_bias_2 = parameter_gradients(g, None if of_2 is None else saved.get(of_2), of_bias_2)
        g = self.between_backward(saved, between, settings, input_gradient(g, weight_2, dtype_2))
        saved.release()
        g_weight_1, g_bias_1 = parameter_gradients(g, None if of_1 is None else saved.get(of_1), of_bias_1)
        g = input_gradient(g, weight_1, dtype_1)
        wanted = [of_x, of_norm_weight, of_norm_bias]
        found = layer_norm_backward(g, saved.get(of_norm), shape, norm_weight, norm_bias, rstd, mean, wanted)
        return *found, g_weight_1, g_bias_1, g_weight_2, g_bias_2

    def between(self, keeper: _Keeper, name: str, settings: Any, y: Tensor) -> tuple[Any, Tensor]:
        """Return the values that `between_backward` needs, and the output of the operations between the linear layers.

        `name` is the name of the operation with its module.
        """
        raise NotImplementedError  # abstract

    def between_backward(self, saved: _Saved, kept: Any, settings: Any, g: Tensor) -> Tensor:
        """Return the gradient of the input of `between`, given the gradient g of the output. g may be overwritten."""
        raise NotImplementedError  # abstract

    def _kernels(self) -> tuple[bool, ...]:
        """Return the settings of torch on which the decisions depend."""
        return ()


def _affine_again(of_norm: int, saved: _Saved) -> Tensor:
    return affine(saved.get(of_norm), *saved.tensors[:2])


class AttentionChain(Chain):
    """Chain with attention without a mask. The first linear layer computes q, k and v.

    The settings are the number of heads and the dimension of a head.
    """

    operation = "scaled_dot_product_attention"

    def between(self, keeper: _Keeper, name: str, settings: tuple[int, int], y: Tensor) -> tuple[Any, Tensor]:
        """See `Chain.between`."""
        heads, dim = settings
        policy, packer = self.policy, self.policy.attention if self.policy.fused is None else self.policy.fused
        q, k, v = y.view(*y.shape[:2], 3, heads, dim).permute(2, 0, 3, 1, 4).unbind(0)
        kept: Any
        if policy.plain_attention:
            # The same tensors are saved as by torch's attention operation on a CPU (see `supports_plain`).
            z, logsumexp = aten._scaled_dot_product_flash_attention_for_cpu.default(q, k, v)
            kept = len(keeper.tensors)
            keeper.tensors += (q, k, v, z, logsumexp)
        elif policy.fused is not None:
            z = F.scaled_dot_product_attention(q, k, v, scale=dim**-0.5)
            kept = [
                keeper.keep(x, packer, f"{name}/{role}", z.dtype, 1) for x, role in zip((q, k, v), "qkv", strict=True)
            ]
        else:
            q, k, v, p, z = unfused_attention(q, k, v, dim**-0.5, None)
            kept = [
                keeper.keep(x, packer, f"{name}/{role}", z.dtype, 1)
                for x, role in zip((q, k, p, v), "qkpv", strict=True)
            ]
        out = z.transpose(1, 2).reshape(*y.shape[:2], -1)
        if policy.fused is not None and policy.derived_all and not policy.plain_attention:
            keeper.computed(out, partial(self._output_again, kept, dim), of=z)
        return kept, out

    def between_backward(self, saved: _Saved, kept: Any, settings: tuple[int, int], g: Tensor) -> Tensor:
        """See `Chain.between_backward`."""
        heads, dim = settings
        g = g.view(*g.shape[:2], heads, dim).transpose(1, 2)
        g_qkv: Any
        if self.policy.plain_attention:
            q, k, v, y, logsumexp = saved.tensors[kept : kept + 5]
            g_qkv = cpu_kernel_backward(g, q, k, v, y, logsumexp, dim**-0.5)
        elif self.policy.fused is not None:
            y, saved.attention = self._again(kept, dim, saved), None
            g_qkv = attention_backward(y, g, dim**-0.5, self._compiled)
            del y
        else:
            of_q, of_k, of_p, of_v = (partial(saved.get, at) for at in kept)
            g_qkv = unfused_attention_backward(g, of_v, of_p, of_k, of_q, dim**-0.5, True)
        return torch.stack([part.transpose(1, 2) for part in g_qkv], 2).flatten(2)

    @property
    def _compiled(self) -> bool:
        return not isinstance(self.policy.fused, Dense)  # exact methods do not load the compiler of the kernels

    def _again(self, kept: list[int], dim: int, saved: _Saved) -> Tensor:
        """Return the recomputed output of attention, which the next operation reuses."""
        if saved.attention is None:
            q, k, v = [saved.get(at) for at in kept]
            saved.attention = attention_again(q, k, v, None, dim**-0.5, self._compiled)
        return saved.attention

    def _output_again(self, kept: list[int], dim: int, saved: _Saved) -> Tensor:
        return self._again(kept, dim, saved).detach().transpose(1, 2).flatten(2)

    def _kernels(self) -> tuple[bool, ...]:
        # Decisions depend on the memory layout of the output of attention, which differs between torch's kernels.
        of = torch.backends.cuda
        return of.flash_sdp_enabled(), of.mem_efficient_sdp_enabled(), of.cudnn_sdp_enabled(), of.math_sdp_enabled()


class FeedForwardChain(Chain):
    """Chain with GELU. The setting is the approximation of GELU."""

    operation = "gelu"

    def between(self, keeper: _Keeper, name: str, settings: str, y: Tensor) -> tuple[int, Tensor]:
        """See `Chain.between`."""
        z = F.gelu(y, approximate=settings)
        kept = keeper.keep(y, self.policy.activation, f"{name}/input", None, -1)
        if self.policy.derived:
            keeper.computed(z, partial(_gelu_again, kept, settings), kept)
        return kept, z

    def between_backward(self, saved: _Saved, kept: int, settings: str, g: Tensor) -> Tensor:
        """See `Chain.between_backward`."""
        g_y: Tensor = aten.gelu_backward.grad_input(g, saved.get(kept), approximate=settings, grad_input=g)
        return g_y


def _gelu_again(kept: int, approximate: str, saved: _Saved) -> Tensor:
    return F.gelu(saved.get(kept), approximate=approximate)


def supports_plain(x: Tensor, heads: int, dim: int) -> bool:
    """Return True if torch would compute attention in x (B, N, C) with its fused kernel for CPUs."""
    shape = (x.shape[0], heads, x.shape[1], dim)
    return x.device.type == "cpu" and _chooses_flash(shape, compute_dtype(x), torch.backends.cuda.flash_sdp_enabled())


@functools.lru_cache(256)
def _chooses_flash(shape: tuple[int, ...], dtype: torch.dtype, enabled: bool) -> bool:
    with unset_fake_temporarily():  # for fake tensors, torch selects another kernel
        q = torch.empty(shape, dtype=dtype)
        return enabled and uses_cpu_kernel(q, q, q)
