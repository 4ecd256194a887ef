"""Sparse weights and activations in training (SWAT: Raihan, Aamodt, NeurIPS 2020).

A linear layer or convolution uses only its largest weights, w̃, and saves only the largest values of its input, x̃, for
the backward pass::

    y = x ∗ w̃ + b,    g_x from g_y and w̃,    g_w from g_y and x̃ (dense, so that dropped weights train),    g_b exact

Values whose magnitude is below a threshold are dropped. Each weight has its own threshold. Each input has one threshold
for all images of the batch. A threshold is used for several steps. Between two refreshes of a threshold, the number of
stored values varies with the data. Zeros are never stored.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.saving import PackedOperations, PackingState, Policy, packed_operation
from efficient_ft.ops.saving.table import name_of
from efficient_ft.ops.storage import Dense, PackContext, Packed, bitmap_bytes, magnitude_bits, pack_bits, unpack_bits

_PRODUCTS = (F.linear, F.conv2d, torch.conv2d)
#: Operations that are replaced by packed versions. Only `_PRODUCTS` use sparse weights. Other results do not change.
_SUPPORTED = (
    *(*_PRODUCTS, F.relu, torch.relu, Tensor.relu, F.relu6, F.hardtanh),
    *(F.batch_norm, F.avg_pool2d, F.adaptive_avg_pool2d, F.max_pool2d, torch.max_pool2d),
)


@dataclass(eq=False)
class Thresholds(PackingState):
    """Magnitude thresholds that persist between steps.

    As a packer, the object stores the values whose magnitude is at least a threshold, and a bitmap of their positions.

    Attributes:
        sparsity: Fraction of the values that is dropped.
        refresh: Number of steps between refreshes. Thresholds are recomputed in every step whose number is a multiple
            of `refresh`. The threshold of a layer that is frozen in such a step is recomputed at its next use.
        step: Number of completed optimizer steps.
        by_name: Thresholds. The keys are parameter names for weights and `PackContext.name` for inputs.
        computed: Step in which each threshold was computed, with the same keys.
    """

    sparsity: float = 0.8
    refresh: int = 10
    step: int = 0
    by_name: dict[str, float] = field(default_factory=dict)
    computed: dict[str, int] = field(default_factory=dict)

    def in_training(self, name: str, x: Tensor) -> float:
        """Return the threshold of x in a training step, and recompute the threshold if a refresh is due."""
        if isinstance(x, FakeTensor):
            return 0.0
        last = self.computed.get(name)
        due = last is None or self.step % self.refresh == 0 or last // self.refresh != self.step // self.refresh
        if due and bool(x.isfinite().all()):  # keep the stored threshold if x is not finite
            self.by_name[name], self.computed[name] = self._compute(x), self.step
        return self.in_evaluation(name, x)

    def in_evaluation(self, name: str, x: Tensor) -> float:
        """Return the last threshold used in training, or compute a threshold from x if none exists."""
        if isinstance(x, FakeTensor):
            return 0.0
        return self.by_name[name] if name in self.by_name else self._compute(x)

    def _compute(self, x: Tensor) -> float:
        dropped = self.dropped(x.numel())
        if not dropped:
            return 0.0
        x = x.detach().flatten()
        return float(x[magnitude_bits(x).kthvalue(dropped + 1).indices].abs())

    def dropped(self, n: int) -> int:
        """Return how many of n values are dropped."""
        return math.floor(n * self.sparsity)

    def pack(self, x: Tensor, context: PackContext) -> Packed:
        """Pack all samples of x with one threshold."""
        n = x.numel()
        if isinstance(x, FakeTensor):  # this size is exact in steps that refresh the threshold
            values, bits = x.new_empty(n - self.dropped(n)), x.new_empty(bitmap_bytes(n), dtype=torch.uint8)
        else:
            mask = (x.abs() >= self.in_training(context.name, x)) & (x != 0)
            values, bits = x[mask], pack_bits(mask)
        return Packed((values, bits), partial(_spread, x.shape))

    def state_dict(self) -> dict[str, Any]:
        """Return the step and the thresholds."""
        return {"step": self.step, "of": dict(self.by_name), "computed": dict(self.computed)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Restore the step and the thresholds."""
        self.step, self.by_name = state_dict["step"], dict(state_dict["of"])
        self.computed = dict(state_dict["computed"])


def largest(threshold: float, x: Tensor) -> Tensor:
    """Return x with zeros where the magnitude is below `threshold`."""
    return torch.where(x.abs() >= threshold, x, 0)


def _spread(shape: torch.Size, values: Tensor, bits: Tensor) -> Tensor:
    if isinstance(values, FakeTensor):
        return values.new_empty(shape)
    return values.new_zeros(shape).masked_scatter_(unpack_bits(bits, shape), values)


class SparseProducts(PackedOperations):
    """Mode that runs linear layers and convolutions with sparse weights (SWAT). ReLU saves one bit per element.

    Args:
        thresholds: Thresholds that persist between steps.
        region, samples, modules: See `PackedOperations`.
        weights: Names of the sparse weights. The keys are the ids of the parameters.
        training: If True, activations are packed. If False, only the weights in the forward pass are sparse.
    """

    def __init__(
        self,
        thresholds: Thresholds,
        region: str,
        samples: int,
        weights: dict[int, str],
        training: bool,
        modules: Mapping[nn.Module, str] | None = None,
    ) -> None:
        dense = Dense()
        policy = Policy(thresholds, dense, dense, dense)
        super().__init__(policy, thresholds, region, samples, modules=modules)
        self.thresholds, self.weights, self.training, self.records = thresholds, weights, training, training

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        operation = packed_operation(func) if func in _SUPPORTED else None
        if operation is None or self.is_suspended:
            return func(*args, **kwargs)
        if self.training and torch.is_grad_enabled():
            self.begin(name_of(func))
            result = operation(self, *args, **kwargs)
            if result is not NotImplemented:
                return result
        return self._with_sparse_weight(func, *args, **kwargs) if func in _PRODUCTS else func(*args, **kwargs)

    def _with_sparse_weight(self, func: Any, input: Tensor, weight: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        return func(input, self.weight(weight)[0], *args, **kwargs)

    def weight(self, weight: Tensor) -> tuple[Tensor, Tensor | Packed]:
        """Return the sparse weight for the forward pass, and the dense weight to save."""
        name = self.weights.get(id(weight))
        if name is None:  # the weight is computed from a parameter, or is not sparse
            return weight, weight
        threshold = (self.thresholds.in_training if self.training else self.thresholds.in_evaluation)(name, weight)
        # The dense weight stays in memory, and the backward pass recomputes the sparse weight from the dense weight.
        return largest(threshold, weight), Packed((weight,), partial(largest, threshold))
