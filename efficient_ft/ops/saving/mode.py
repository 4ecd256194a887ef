"""The packing mode: it replaces torch's operations by those that save packed tensors.

A `PackedOperations` mode around a part of a model's forward pass takes the operations that would save activations
(linear layers, convolutions, normalizations, attention's products and softmax, activation functions, products with a
learned scale) and computes the same result, but saves what a `Policy` says. The backward pass uses the formulas of the
operation on the unpacked tensors (Back Razor: Jiang et al., NeurIPS 2022, Equation 3): gradients that do not depend on
a packed tensor stay exact. So any model whose forward pass consists of torch's functions is supported, and nothing is
saved for parameters that need no gradient. An operation without a packed form (`table`) runs as it is, and so do the
operations that it calls (``nn.MultiheadAttention`` is one function to a mode).

A tensor that several operations save (the input of separate q, k and v layers, softmax's output) is packed once.

A packer that keeps state gets the tensor's name: the part of the model, the module inside it, the operation that the
module calls, and the tensor's role in it. A module that calls an operation twice, or that runs twice, numbers its
calls, whether they keep a tensor or not. A tensor therefore has the same name in every step, also if other layers are
frozen in some steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from efficient_ft.core.context import context
from efficient_ft.ops.saving.dense import DenseKept
from efficient_ft.ops.saving.sharing import (
    LastUnpacked,
    SharedUnpack,
    add_user,
    apply_to,
    in_order,
    memory_order,
    permuted,
)
from efficient_ft.ops.saving.table import name_of, packed_operation
from efficient_ft.ops.storage import Dense, Noise, Overflow, PackContext, Packed, Packer, Ranges


@dataclass(frozen=True)
class Policy:
    """How each kind of tensor is kept for the backward pass.

    Attributes:
        product: inputs of linear layers and convolutions whose weight trains.
        norm: inputs of normalizations and of products with a learned scale.
        attention: q, k, v and softmax's output.
        activation: inputs of GELU and other smooth activation functions. ReLU and its relatives keep one bit per
            element.
        normalized: LayerNorm keeps its normalized input x̂ (centered, and so better pruned) instead of its input.
        derived: what can be computed from a kept tensor is not kept again: a product after an activation function
            computes its input from that function's kept input, and one after a LayerNorm (if `normalized`) from x̂,
            with γ and β exact.
        derived_all: further tensors are computed instead of kept: what follows a BatchNorm that keeps its input, and a
            ReLU after it; and the result of attention that stays fused, for the layer after it.
        fused: the packer of q, k and v for attention that stays fused; the backward pass recomputes attention from
            them, so that all its terms are consistent. None: unfused attention.
        plain_attention: torch's fused attention stays as it is, with what it keeps.
        position_network: scores of attention have a bias from a trained network. Softmax's gradient then has rows that
            sum to 0, as they do without packing: that network's gradient is what remains of terms that cancel.
        forward: the forward pass, too, computes with the packed inputs of products and normalizations, q, k, v and
            softmax's output. A negative control; the formulas of the backward pass stay the same.
    """

    product: Packer
    norm: Packer
    attention: Packer
    activation: Packer
    normalized: bool = False
    derived: bool = False
    derived_all: bool = False
    fused: Packer | None = None
    plain_attention: bool = False
    position_network: bool = False
    forward: bool = False

    @property
    def named(self) -> bool:
        """Whether a packer uses the names of tensors."""
        packers = (self.product, self.norm, self.attention, self.activation, self.fused)
        return any(getattr(packer, "named", False) for packer in packers)

    @property
    def exact(self) -> bool:
        """Whether inputs of normalizations, and what is computed from them, come back unchanged."""
        return isinstance(self.norm, Dense)


@dataclass
class PackingState:
    """State that packing keeps from step to step.

    Attributes:
        ranges: running ranges of 8-bit tensors.
        noise: of stochastic rounding.
        overflow: whether a value was too large for fp16.
        last: the tensor unpacked last.
        calls: number of times that each part of the model has run in the current forward pass.
        dense: records what stays dense, for the report of a method; None: nothing is recorded.
    """

    ranges: Ranges = field(default_factory=Ranges)
    noise: Noise = field(default_factory=Noise)
    overflow: Overflow = field(default_factory=Overflow)
    last: LastUnpacked = field(default_factory=LastUnpacked)
    calls: Counter[str] = field(default_factory=Counter)
    dense: DenseKept | None = None

    def begin_call(self, name: str) -> str:
        """Return a part's name with the number of its call in this forward pass, from the second one on.

        A forward pass ends where a backward pass or an optimizer step begins.
        """
        if self.last.in_backward:
            self.last.in_backward = False
            self.calls.clear()
        self.calls[name] += 1
        return numbered(name, self.calls[name])

    def end_step(self) -> None:
        """Finish an optimizer step."""
        self.last.held = None
        self.calls.clear()
        self.ranges.end_step()
        self.noise.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the running ranges and the noise as plain containers; empty if neither was used."""
        if not self.ranges.by_name and not self.noise.used:
            return {}
        return {"ranges": self.ranges.state_dict(), "noise": self.noise.state_dict() if self.noise.used else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Continue from the state of `state_dict`."""
        if state_dict:
            self.ranges.load_state_dict(state_dict["ranges"])
            if state_dict["noise"] is not None:
                self.noise.load_state_dict(state_dict["noise"])


def numbered(name: str, number: int) -> str:
    """Return `name`, from the second use on with its number."""
    return name if number == 1 else f"{name}({number})"


def current_packing() -> PackedOperations | None:
    """Return the innermost packing mode entered, or None.

    Autograd functions of ours, whose operations no mode sees, use it to pack what they save.
    """
    mode: PackedOperations | None = context.packing
    return mode


def packing_suspended() -> AbstractContextManager[None]:
    """Run operations as they are inside a ``with`` block, even in a packed part of a model.

    For tensors that are not activations of the images.
    """
    mode = current_packing()
    return nullcontext() if mode is None else mode.suspended()


class PackedOperations(TorchFunctionMode):
    """While entered, operations on tensors that need a gradient save packed tensors.

    Args:
        policy: how each kind of tensor is kept.
        state: kept from step to step.
        region: a name for this part of the model, the same in every step.
        samples: B, number of images in the batch; every activation's first dimension is a multiple of it.
        heads: number of attention heads in this part, for one range per head; None: one range per tensor.
        modules: names of the modules in this part, for the names of tensors; None: only operations are named.

    Attributes:
        records: the pass keeps tensors, so that it counts as a call of the part.
    """

    records = True

    def __init__(
        self,
        policy: Policy,
        state: PackingState,
        region: str,
        samples: int,
        heads: int | None = None,
        modules: Mapping[nn.Module, str] | None = None,
    ) -> None:
        super().__init__()
        self.policy, self.state, self.region, self.samples, self.heads = policy, state, region, samples, heads
        self._modules, self._running, self._hooks = modules, [""], []  # type: ignore[var-annotated]
        self._calls: Counter[tuple[str, str]] = Counter()
        self._operation = ""
        self._suspended = False
        self._kept: dict[tuple[Any, ...], tuple[weakref.ref, Packed]] = {}

    def __enter__(self) -> PackedOperations:
        self._outer = current_packing()
        context.packing = self
        self.state.last.held = None  # left by a backward pass that was not finished
        if self.records:
            self.region = self.state.begin_call(self.region)
        if self._modules is not None:
            # Of all modules, while this part runs: the model itself stays as it is.
            self._hooks = [
                register_module_forward_pre_hook(self._enter_module),
                register_module_forward_hook(self._leave_module, always_call=True),
            ]
        super().__enter__()
        return self

    def __exit__(self, *exc: Any) -> None:
        super().__exit__(*exc)
        context.packing = self._outer
        self._kept.clear()
        for hook in self._hooks:
            hook.remove()

    def _enter_module(self, module: nn.Module, _: Any) -> None:
        if current_packing() is self and self._modules is not None:
            self._running.append(self._modules.get(module, self._running[-1]))

    def _leave_module(self, module: nn.Module, *_: Any) -> None:
        if current_packing() is self and len(self._running) > 1:
            self._running.pop()

    def begin(self, operation: str) -> None:
        """Note the operation whose tensors are kept next; call it whether it keeps any or not."""
        module = self._running[-1]
        self._calls[module, operation] += 1
        operation = numbered(operation, self._calls[module, operation])
        self._operation = f"{module}/{operation}" if module else operation

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = packed_operation(func)
        if self._suspended or not torch.is_grad_enabled():
            return func(*args, **kwargs)
        if operation is not None:
            self.begin(name_of(func))
            result = operation(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        if self.state.dense is None:
            return func(*args, **kwargs)
        with self.state.dense.watch(func):
            return func(*args, **kwargs)

    @contextmanager
    def suspended(self) -> Iterator[None]:
        """Leave operations as they are inside a ``with`` block (see `packing_suspended`)."""
        before, self._suspended = self._suspended, True
        try:
            yield
        finally:
            self._suspended = before

    def keep(
        self,
        x: Tensor,
        packer: Packer,
        dtype: torch.dtype | None = None,
        heads: int | None = None,
        result: bool = False,
        role: str = "input",
    ) -> Packed:
        """Pack x, once for all operations that save it.

        Args:
            x: the tensor to save.
            packer: packs x, if it is not packed already.
            dtype: in which x takes part in the operation (autocast), and is unpacked; None: its own.
            heads: the dimension of x that is divided into heads.
            result: x is the operation's own output: saving a view of it would create a reference cycle.
            role: of x in the operation.
        """
        order, memory, identity = memory_order(x)
        storage, key = x.untyped_storage(), (*identity, dtype or x.dtype, packer)
        packed = self._find(key, storage) or self._find((*identity, "derived"), storage)
        if packed is None:
            groups = None
            if heads is not None and self.heads and heads < x.dim() and x.shape[heads] % self.heads == 0:
                groups = (order.index(heads % x.dim()), self.heads)
            name = f"{self.region}/{self._operation}/{role}"
            where = PackContext(name, self.samples, self.state.ranges, self.state.overflow, groups, self.state.noise)
            with torch.no_grad():
                memory = memory.data if result else memory
                packed = packer.pack(memory if dtype is None else memory.to(dtype), where)
            if self.state.dense is not None:
                self.state.dense.exclude(packed.tensors)
            shared = SharedUnpack(packed.unpack, self.state.last)
            packed = Packed(packed.tensors, shared, shared)
            self._kept[key] = (weakref.ref(storage), packed)
        return add_user(packed, order, dtype or x.dtype)

    def keep_for_attention(self, x: Tensor, role: str) -> Packed:
        """Pack x, a q, k or v (B, H, N, D), as attention packs it; if that is unfused, x is contiguous."""
        return self.keep(x, self.policy.fused or self.policy.attention, x.dtype, 1, role=role)

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor | Packed]:
        """Return the weight that a linear layer or convolution computes with, and the form of it that is saved."""
        return weight, weight

    def find_source(self, x: Tensor) -> Packed | None:
        """Return the packed form that x can be computed from, or None."""
        order, _, identity = memory_order(x)
        packed = self._find((*identity, "derived"), x.untyped_storage())
        return packed and add_user(packed, order, x.dtype)

    def derive(self, y: Tensor, x: Tensor, function: Callable[[Tensor], Tensor]) -> None:
        """Let operations that save y = function(x) compute it from what x can be computed from, if there is such."""
        order, _, identity = memory_order(x)
        packed = self._find((*identity, "derived"), x.untyped_storage())
        if packed is not None:
            source = in_order(packed, order, x.dtype)
            self.set_source(y, Packed(source.tensors, partial(apply_to, function, source.unpack), source.shared))

    def set_source(self, y: Tensor, packed: Packed) -> None:
        """Let operations that save y use `packed`, which unpacks to the values of y."""
        order, _, identity = memory_order(y)
        from_kept = Packed(packed.tensors, partial(permuted, packed.unpack, order), packed.shared)
        self._kept[*identity, "derived"] = (weakref.ref(y.untyped_storage()), from_kept)

    def share(self, packed: Packed) -> Packed:
        """Return `packed` with users of its own, which share what one of them unpacks where they are neighbors."""
        shared = SharedUnpack(packed.unpack, self.state.last)
        return Packed(packed.tensors, shared, shared)

    def supports(self, *tensors: Tensor, trained: Sequence[Tensor | None] = ()) -> bool:
        """Return whether `tensors` are activations of this batch, and one of them or of `trained` needs a gradient."""
        return any(t is not None and t.requires_grad for t in (*tensors, *trained)) and all(
            t.dim() and t.numel() and t.shape[0] % self.samples == 0 for t in tensors
        )

    def _find(self, key: tuple[Any, ...], storage: torch.UntypedStorage) -> Packed | None:
        """Return what is kept under `key`, unless its tensor is gone and another one has its memory."""
        found = self._kept.get(key)
        return found[1] if found is not None and found[0]() is storage else None
