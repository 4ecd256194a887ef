"""Packing mode, which replaces torch operations with operations that save packed tensors.

A `PackedOperations` mode is active during the forward pass of a part of the model. The mode intercepts the operations
that would save activations: linear layers, convolutions, normalizations, the products and softmax of attention,
activation functions, and products with a learned scale. The results of these operations do not change, but the tensors
are saved in the storage formats that a `Policy` selects. The backward pass applies the formulas of the operation to the
unpacked tensors (Back Razor: Jiang et al., NeurIPS 2022, Equation 3). Gradients that do not depend on a packed tensor
are therefore exact. No tensor is saved for parameters that do not require gradients.

An operation that is not in the `table` runs unchanged, and operations inside this operation are not intercepted. For
example, the mode sees ``nn.MultiheadAttention`` as a single function, which has its own entry in the table.

A tensor that is saved by several operations, for example the input of separate q, k and v layers, is packed only once.

Packers with state identify a tensor by its name. The name consists of the part of the model, the module in that part,
the operation, and the role of the tensor in the operation. Repeated calls of an operation or a module are numbered,
even if these calls save no tensor. A tensor therefore has the same name in every step, even if other layers are frozen
in some steps.
"""

from __future__ import annotations

import weakref
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.overrides import TorchFunctionMode

from efficient_ft.core.context import context
from efficient_ft.ops.saving.sharing import LastUnpacked, SharedUnpack, apply_to, in_order, memory_order
from efficient_ft.ops.saving.table import DenseKept, name_of, packed_operation
from efficient_ft.ops.storage import Dense, Noise, Overflow, PackContext, Packed, Packer, Ranges


@dataclass(frozen=True)
class Policy:
    """Storage format of each kind of tensor that is saved for the backward pass.

    Attributes:
        product: Packer for the inputs of linear layers and convolutions with a trainable weight.
        norm: Packer for the inputs of normalizations and of products with a learned scale.
        attention: Packer for q, k, v and the output of softmax.
        activation: Packer for the inputs of GELU and other smooth activation functions. ReLU and its variants save one
            bit per element.
        normalized: If True, a LayerNorm saves its normalized input x̂ instead of its input. Pruning x̂ causes a smaller
            error, because x̂ is centered. RMSNorm and GroupNorm also save x̂.
        derived: If True, tensors that can be computed from a saved tensor are not saved again. A layer after an
            activation function recomputes its input from the saved input of that function. If `normalized` is True, a
            layer after a LayerNorm recomputes its input from x̂ with the exact γ and β.
        derived_all: If True, more tensors are recomputed instead of saved: the output of a BatchNorm that saves its
            input, the output of a ReLU after this BatchNorm, and the output of fused attention, which the next layer
            would save.
        fused: Packer for q, k and v of fused attention. The backward pass recomputes attention from the unpacked
            tensors, so that all terms of the gradient are consistent. If None, attention is unfused.
        plain_attention: If True, torch's fused attention runs unchanged and saves its tensors without packing.
        position_network: True if a trained network adds a bias to the attention scores. The gradient of such a network
            consists of terms that nearly cancel. Each row of the softmax gradient is therefore computed so that the row
            sums to 0, as without packing.
        forward: If True, the forward pass also uses tensors that were packed and unpacked: the inputs of products and
            normalizations, q, k, v, and the output of softmax. This setting is a negative control for experiments. The
            backward pass is not changed.
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
        """Return True if a packer uses the names of tensors."""
        packers = (self.product, self.norm, self.attention, self.activation, self.fused)
        return any(getattr(packer, "named", False) for packer in packers)

    @property
    def exact(self) -> bool:
        """Return True if the inputs of normalizations, and tensors computed from these inputs, are restored exactly."""
        return isinstance(self.norm, Dense)


@dataclass(eq=False)
class PackingState:
    """Packing state that persists between steps.

    Attributes:
        ranges: Running ranges of 8-bit tensors.
        noise: Seeds for stochastic rounding.
        overflow: Record of values that are too large for fp16.
        last: Tensor that was unpacked last.
        calls: Number of calls of each part of the model in the current forward pass.
        dense: Record of the tensors that are saved without packing, for the report of a method. If None, these tensors
            are not recorded.
    """

    ranges: Ranges = field(default_factory=Ranges)
    noise: Noise = field(default_factory=Noise)
    overflow: Overflow = field(default_factory=Overflow)
    last: LastUnpacked = field(default_factory=LastUnpacked)
    calls: Counter[str] = field(default_factory=Counter)
    dense: DenseKept | None = None

    def begin_call(self, name: str) -> str:
        """Return the name of a part of the model for its next call.

        The second and later calls in a forward pass are numbered. A forward pass ends when a backward pass or an
        optimizer step begins.
        """
        if self.last.in_backward:
            self.last.in_backward = False
            self.calls.clear()
        self.calls[name] += 1
        return numbered(name, self.calls[name])

    def end_step(self) -> None:
        """Update the state at the end of an optimizer step."""
        self.last.held = None
        self.calls.clear()
        self.ranges.end_step()
        self.noise.end_step()

    def state_dict(self) -> dict[str, Any]:
        """Return the running ranges and the seeds as a dict of plain values, which is empty if neither was used."""
        if not self.ranges.by_name and not self.noise.used:
            return {}
        return {"ranges": self.ranges.state_dict(), "noise": self.noise.state_dict() if self.noise.used else None}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the state returned by `state_dict`."""
        if state_dict:
            self.ranges.load_state_dict(state_dict["ranges"])
            if state_dict["noise"] is not None:
                self.noise.load_state_dict(state_dict["noise"])


def numbered(name: str, number: int) -> str:
    """Append `number` in parentheses to `name`, unless `number` is 1."""
    return name if number == 1 else f"{name}({number})"


def current_packing() -> PackedOperations | None:
    """Return the innermost active packing mode, or None if no packing mode is active.

    A mode does not intercept operations inside autograd functions. The autograd functions of this package therefore
    call `current_packing` to pack the tensors that they save.
    """
    mode: PackedOperations | None = context.packing
    return mode


@contextmanager
def packing_suspended() -> Iterator[None]:
    """Suspend packing inside a ``with`` block, for operations on tensors that are not activations of the batch."""
    mode = current_packing()
    if mode is None:
        yield
        return
    before, mode.is_suspended = mode.is_suspended, True
    try:
        yield
    finally:
        mode.is_suspended = before


class PackedOperations(TorchFunctionMode):
    """Mode in which operations on tensors that require gradients save packed tensors.

    Args:
        policy: Storage format of each kind of tensor.
        state: Packing state that persists between steps.
        region: Name of this part of the model, which must be the same in every step.
        samples: Number of images in the batch, B. The first dimension of every activation is a multiple of B.
        heads: Number of attention heads in this part. If given, each head has a separate range. If None, each tensor
            has one range.
        modules: Names of the modules in this part, which become part of the names of tensors. If None, the names of
            tensors do not contain module names.

    Attributes:
        records: True if the forward pass saves tensors and therefore counts as a call (see `PackingState.begin_call`).
        is_suspended: True if operations run unchanged (see `packing_suspended`).
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
        self.is_suspended = False
        self._kept: dict[tuple[Any, ...], tuple[weakref.ref, Packed]] = {}

    def __enter__(self) -> PackedOperations:
        self._outer = current_packing()
        context.packing = self
        self.state.last.held = None  # an interrupted backward pass may have left a tensor
        if self.records:
            self.region = self.state.begin_call(self.region)
        if self._modules is not None:
            # Global hooks are used while this part runs, because hooks on the modules would modify the model.
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
        """Start an operation. Operations that save no tensor must also be started, because repeated calls are numbered.

        The name of the operation becomes part of the names of the tensors that are saved next.
        """
        module = self._running[-1]
        self._calls[module, operation] += 1
        operation = numbered(operation, self._calls[module, operation])
        self._operation = f"{module}/{operation}" if module else operation

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = packed_operation(func)
        if self.is_suspended or not torch.is_grad_enabled():
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

    def keep(
        self,
        x: Tensor,
        packer: Packer,
        dtype: torch.dtype | None = None,
        heads: int | None = None,
        result: bool = False,
        role: str = "input",
    ) -> Packed:
        """Pack x only once for all operations that save x.

        Args:
            x: Tensor to save.
            packer: Packer for x, which is not used if x is already packed or can be computed from a packed tensor.
            dtype: Dtype of x in the operation (under autocast) and after unpacking. Default: the dtype of x.
            heads: Dimension of x that is divided into heads.
            result: True if x is the output of the operation itself. x is then saved without its autograd graph, because
                saving a view of x would create a reference cycle.
            role: Role of x in the operation.
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
        packed.shared.add_user()
        return in_order(packed, order, dtype or x.dtype)

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor | Packed]:
        """Return the weight that a linear layer or convolution uses, and the tensor to save for the backward pass."""
        return weight, weight

    def find_source(self, x: Tensor) -> Packed | None:
        """Return the packed tensor from which x can be computed, or None if no such tensor exists.

        An operation that saves the packed tensor must register itself with ``shared.add_user()``.
        """
        order, _, identity = memory_order(x)
        packed = self._find((*identity, "derived"), x.untyped_storage())
        return None if packed is None else in_order(packed, order, x.dtype)

    def set_source(self, y: Tensor, packed: Packed) -> None:
        """Register `packed`, which unpacks to y, as the source of y. Operations that save y then reuse `packed`."""
        order, _, identity = memory_order(y)
        from_kept = Packed(
            packed.tensors, partial(apply_to, partial(torch.permute, dims=order), packed.unpack), packed.shared
        )
        self._kept[*identity, "derived"] = (weakref.ref(y.untyped_storage()), from_kept)

    def share(self, packed: Packed) -> Packed:
        """Return a copy of `packed` with a separate user count. Its consecutive users share one unpacked tensor."""
        shared = SharedUnpack(packed.unpack, self.state.last)
        return Packed(packed.tensors, shared, shared)

    def supports(self, *tensors: Tensor, trained: Sequence[Tensor | None] = ()) -> bool:
        """Return True if the mode supports an operation with these arguments.

        All `tensors` must be activations of the batch, and at least one of `tensors` and `trained` must require a
        gradient. The backward passes of this package do not support complex tensors.
        """
        given = [t for t in (*tensors, *trained) if t is not None]
        return (
            any(t.requires_grad for t in given)
            and all(t.is_floating_point() for t in given)
            and all(t.dim() and t.numel() and t.shape[0] % self.samples == 0 for t in tensors)
        )

    def _find(self, key: tuple[Any, ...], storage: torch.UntypedStorage) -> Packed | None:
        """Return the packed tensor for `key`, or None if no such tensor exists or its memory has been reused."""
        found = self._kept.get(key)
        return found[1] if found is not None and found[0]() is storage else None
