"""SWAT: compute with sparse weights, and save sparse activations for the backward pass.

Source: Raihan, Aamodt, "Sparse Weight Activation Training", NeurIPS 2020. The method is a baseline in the Back Razor
paper (Table 2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from efficient_ft.methods.checks import check_integer, check_sparsity
from efficient_ft.methods.declarations import Adds
from efficient_ft.methods.forwards import forwards_of, refuse_export
from efficient_ft.methods.memory.base import MemoryForward
from efficient_ft.methods.memory.packing import DENSE_FORWARD, Part, PartwiseMethod
from efficient_ft.methods.registry import register
from efficient_ft.models.view import ModelView, Reason, Skipped
from efficient_ft.ops.saving import PackingState
from efficient_ft.ops.swat import SparseProducts, Thresholds, largest


class _SparseForward(MemoryForward):
    """Forward pass that uses sparse weights in training and in evaluation."""

    not_compiled = "sparse weights"

    def __init__(self, module: nn.Module, name: str, thresholds: Thresholds, layers: dict[str, nn.Module]) -> None:
        super().__init__(module)
        self.name, self.thresholds, self.layers = name, thresholds, layers

    def weights(self) -> dict[str, nn.Parameter]:
        """Return a mapping from names to weights. A weight that is shared by several layers appears only once."""
        found: dict[int, tuple[str, nn.Parameter]] = {}
        for name, layer in self.layers.items():
            assert isinstance(layer.weight, nn.Parameter)
            found.setdefault(id(layer.weight), (f"{name}.weight", layer.weight))
        return dict(found.values())

    @torch.compiler.disable  # The mode intercepts operations, which is not possible in compiled code.
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        x = next((t for t in tree_leaves((args, kwargs)) if isinstance(t, Tensor)), None)
        if x is None or not x.numel():
            return self.within(*args, **kwargs)
        refuse_export(
            "method swat: an exported network would compute with dense weights.",
            "Remove the method first: swat.remove(model). The removal sets the dropped weights to zero.",
        )
        names = {id(weight): name for name, weight in self.weights().items()}
        modules = None
        if self.training and torch.is_grad_enabled():
            self.refuse_recomputation(SWAT.name)
            modules = {module: name for name, module in self.module.named_modules()}
        with SparseProducts(self.thresholds, self.name, x.shape[0], names, self.training, modules):
            return self.within(*args, **kwargs)

    @torch.no_grad()
    def settle(self) -> None:
        for name, weight in self.weights().items():
            weight.copy_(largest(self.thresholds.in_evaluation(name, weight), weight))


@register
class SWAT(PartwiseMethod):
    """Compute with the largest weights of each layer, and save the largest activations for the backward pass.

    Linear layers and convolutions ignore the smallest weights in the forward pass and in the computation of the input
    gradient. The computation of the weight gradient ignores the smallest activations. The weight gradient is dense, so
    that dropped weights are still trained and may be used again later. Each layer has one threshold for all values of
    the weight, and one threshold for the activations of all images in the batch. The first layer of the network and all
    layers other than linear layers and convolutions are exact. In a model with attention, the patch embedding and the
    head are also exact. ReLU saves one bit per element.

    The trained network has sparse weights. Evaluation uses the sparse weights, and dropped values are zero in exported
    weights. `remove` does not restore the dropped values. In steps that compute the thresholds, the fraction of dropped
    values equals `sparsity`. In other steps and at the end of training, this fraction depends on how the weights have
    changed.

    Args:
        sparsity: fraction of the weights and activations that is dropped. Must be in [0, 1).
        refresh_interval: number of optimizer steps between two computations of the thresholds.

    Raises:
        SettingError: If a setting is invalid.
    """

    name = "swat"
    changes_weights = True  # `_remove` sets the dropped weights to zero
    adds = frozenset({Adds.SPARSE_WEIGHTS})
    acts_per_step = True
    conflicts: Mapping[str, str] = {Adds.LOW_RANK_LAYERS: DENSE_FORWARD}

    def __init__(self, sparsity: float = 0.8, refresh_interval: int = 10):
        super().__init__()
        check_sparsity(sparsity)
        check_integer("refresh_interval", refresh_interval)
        self.sparsity, self.refresh_interval = sparsity, refresh_interval

    def _new_state(self) -> PackingState:
        return Thresholds(sparsity=self.sparsity, refresh=self.refresh_interval)

    def _left_plain(self, view: ModelView) -> dict[str, Skipped]:
        first = next((layer.name for layer in view.layers if isinstance(layer.module, nn.Conv2d)), view.layers[0].name)
        return {first: Skipped(Reason.AS_PUBLISHED, "dense, as published")}

    def _packs(self, module: nn.Module) -> bool:
        return isinstance(module, nn.Linear | nn.Conv2d)

    def _forward_of(self, part: Part, packing: PackingState) -> MemoryForward:
        assert isinstance(packing, Thresholds)
        return _SparseForward(part.module, part.name, packing, part.layers)

    def _remove(self, model: nn.Module) -> None:
        for module in model.modules():
            for forward in forwards_of(module):
                if isinstance(forward, _SparseForward):
                    forward.settle()
        super()._remove(model)

    def step_begin(self, step: int) -> None:
        super().step_begin(step)
        if isinstance(self._packing, Thresholds):
            self._packing.step = step
