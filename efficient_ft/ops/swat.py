"""Sparse weights and activations in training (SWAT: Raihan, Aamodt, NeurIPS 2020).

A linear layer or convolution computes with the largest of its weights, w̃, and keeps the largest values of its input, x̃,
for the backward pass::

    y = x ∗ w̃ + b,    g_x from g_y and w̃,    g_w from g_y and x̃ (dense: dropped weights train too),    g_b exact

What is dropped lies below a threshold, one for a weight and one for an input over the whole batch, that holds for
several steps. So the number of values kept follows the data between two refreshes; zeros are never kept.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.packed import _OPERATIONS, PackedOperations, Policy, Session
from efficient_ft.ops.packing import Dense, Packed, Place, bitmap_bytes, magnitude_bits, pack_bits, unpack_bits

_PRODUCTS = (F.linear, F.conv2d, torch.conv2d)
#: What is not SWAT's to make sparse is served where it keeps less without a change of its result.
_SERVED = (
    *(*_PRODUCTS, F.relu, torch.relu, Tensor.relu, F.relu6, F.hardtanh),
    *(F.batch_norm, F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool2d, torch.max_pool2d),
)


@dataclass
class Thresholds(Session):
    """The smallest magnitudes kept, by place, from step to step.

    Attributes:
        sparsity: share of the values dropped.
        refresh: they are taken anew in every step whose number is a multiple of this.
        step: optimizer steps done.
        of: by parameter name, or by the place of an input.
    """

    sparsity: float = 0.8
    refresh: int = 10
    step: int = 0
    of: dict[str, float] = field(default_factory=dict)

    def in_training(self, name: str, x: Tensor) -> float:
        """The threshold of x, refreshed where that is due."""
        if isinstance(x, FakeTensor):
            return 0.0
        if name not in self.of or self.step % self.refresh == 0:
            self.of[name] = self._taken(x)
        return self.of[name]

    def at_rest(self, name: str, x: Tensor) -> float:
        """That of the last step, or, before training, x's own."""
        if isinstance(x, FakeTensor):
            return 0.0
        return self.of[name] if name in self.of else self._taken(x)

    def _taken(self, x: Tensor) -> float:
        dropped = self.dropped(x.numel())
        if not dropped:
            return 0.0
        x = x.detach().flatten()
        return float(x[magnitude_bits(x).kthvalue(dropped + 1).indices].abs())

    def dropped(self, n: int) -> int:
        """Of n values."""
        return math.floor(n * self.sparsity)

    def state_dict(self) -> dict[str, Any]:
        return {"step": self.step, "of": dict(self.of)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.step, self.of = state_dict["step"], dict(state_dict["of"])


def largest(threshold: float, x: Tensor) -> Tensor:
    """x where its magnitude is at least `threshold`, and 0 elsewhere."""
    return torch.where(x.abs() >= threshold, x, 0)


@dataclass(frozen=True, eq=False)
class LargestOfBatch:
    """A packer: the values from a threshold up, over the whole batch, and a bitmap."""

    thresholds: Thresholds

    def pack(self, x: Tensor, place: Place) -> Packed:
        n = x.numel()
        if isinstance(x, FakeTensor):  # the budget, which holds in steps of a refresh
            values = x.new_empty(n - self.thresholds.dropped(n))
            bits = x.new_empty(bitmap_bytes(n), dtype=torch.uint8)
        else:
            mask = (x.abs() >= self.thresholds.in_training(place.name, x)) & (x != 0)
            values, bits = x[mask], pack_bits(mask)
        return Packed((values, bits), partial(_spread, x.shape))


def _spread(shape: torch.Size, values: Tensor, bits: Tensor) -> Tensor:
    if isinstance(values, FakeTensor):
        return values.new_empty(shape)
    return values.new_zeros(shape).masked_scatter_(unpack_bits(bits, shape), values)


class SparseProducts(PackedOperations):
    """While entered, linear layers and convolutions are SWAT's, and ReLU keeps a bit for each element.

    Args:
        thresholds: kept from step to step.
        region, samples: see `PackedOperations`.
        weights: names of the weights that are sparse, by the identity of the parameter.
        training: else the forward pass is plain, with sparse weights.
    """

    def __init__(
        self, thresholds: Thresholds, region: str, samples: int, weights: dict[int, str], training: bool
    ) -> None:
        dense = Dense()
        super().__init__(Policy(LargestOfBatch(thresholds), dense, dense, dense), thresholds, region, samples)
        self.thresholds, self.weights, self.training = thresholds, weights, training

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func not in _SERVED or self._suspended:
            return func(*args, **kwargs)
        if self.training and torch.is_grad_enabled():
            result = _OPERATIONS[func](self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._with_sparse_weight(func, *args, **kwargs) if func in _PRODUCTS else func(*args, **kwargs)

    def _with_sparse_weight(self, func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return func(input, self.weight(weight)[0], *args, **kwargs)

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor | Packed]:
        name = self.weights.get(id(weight))
        if name is None:  # computed from a parameter, or another module's
            return weight, weight
        threshold = (self.thresholds.in_training if self.training else self.thresholds.at_rest)(name, weight)
        # The weight lives anyway: its sparse form is made again in the backward pass.
        return largest(threshold, weight), Packed((weight,), partial(largest, threshold))
