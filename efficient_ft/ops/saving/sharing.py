"""Sharing of packed tensors: operations that save the same tensor pack it only once and share the unpacked tensor."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_ft.ops.storage import Packed


class LastUnpacked:
    """Tensor that was unpacked last.

    The tensor is stored until all operations that saved it have received it, or until another tensor is unpacked. In
    the backward pass, operations that saved the same tensor often run consecutively, for example a normalization and
    the next layer, or the softmax and the second product of attention.
    """

    def __init__(self) -> None:
        # The backward pass may run in several threads, so the state is one attribute that is replaced atomically.
        self.held: tuple[SharedUnpack, Tensor] | None = None
        #: True if a tensor has been unpacked since `in_backward` was reset.
        self.in_backward = False


class SharedUnpack:
    """Unpack function that several operations share.

    Attributes:
        users: Number of operations that save the packed tensor.
        calls: Number of times that the unpacked tensor has been requested.
    """

    def __init__(self, unpack: Callable[..., Tensor], last: LastUnpacked) -> None:
        self.unpack, self.last, self.users, self.calls = unpack, last, 0, 0

    def __call__(self, *tensors: Tensor) -> Tensor:
        """Return the unpacked tensor to one of the operations that saved the tensor."""
        held, self.last.held = self.last.held, None
        self.last.in_backward = True
        dense = held[1] if held is not None and held[0] is self else None
        del held  # free the last tensor before this tensor is unpacked
        if dense is None:
            dense = self.unpack(*tensors)
        self.calls += 1
        if self.calls % self.users:
            self.last.held = self, dense
        return dense

    def add_user(self) -> None:
        """Register another operation that saves the packed tensor."""
        self.users += 1

    def in_forward(self, unpack: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
        """Call `unpack`, which calls this object, in the forward pass, and do not count the call as a request."""
        dense = unpack(*tensors)
        self.calls -= 1
        self.last.held, self.last.in_backward = None, False
        return dense


class BothShared:
    """User count of a product of packed tensors. An operation that saves the product is counted for both factors."""

    def __init__(self, *shared: Any) -> None:
        self.shared = shared

    def add_user(self) -> None:
        """Register another operation that saves the product."""
        for shared in self.shared:
            shared.add_user()


def memory_order(x: Tensor) -> tuple[tuple[int, ...], Tensor, tuple[Any, ...]]:
    """Return the memory order of x, a view of x in this order, and a key that is equal for x and its transpose.

    Returns:
        order: Dimensions of x in memory order. The first dimension stays first.
        memory: View of x with the dimensions in memory order.
        identity: Key that is equal for tensors with the same memory and version.
    """
    order = (0, *sorted(range(1, x.dim()), key=x.stride().__getitem__, reverse=True))
    memory = x.permute(order)
    identity = (x.untyped_storage()._cdata, x.storage_offset(), memory.shape, memory.stride(), x._version)
    return order, memory, identity


def in_order(packed: Packed, order: tuple[int, ...], dtype: torch.dtype) -> Packed:
    """Return a packed tensor with the original order of dimensions and a new dtype.

    Unpacking `packed` returns a tensor whose dimensions are ordered by decreasing stride. `order` lists the original
    dimensions in memory order.
    """
    in_memory_order = order == tuple(range(len(order)))
    inverse = None if in_memory_order else tuple(order.index(d) for d in range(len(order)))
    return Packed(packed.tensors, partial(to_order, packed.unpack, inverse, dtype), packed.shared)


def apply_to(function: Callable[[Tensor], Tensor], unpack: Callable[..., Tensor], *tensors: Tensor) -> Tensor:
    """Return the result of `function` for the unpacked tensor."""
    return function(unpack(*tensors))


def to_order(
    unpack: Callable[..., Tensor], inverse: tuple[int, ...] | None, dtype: torch.dtype, *tensors: Tensor
) -> Tensor:
    """Return the unpacked tensor in a dtype, with its dimensions permuted by `inverse` unless `inverse` is None."""
    x = unpack(*tensors).to(dtype)
    return x if inverse is None else x.permute(inverse)
