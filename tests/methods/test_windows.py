"""Tests of low-rank backward passes on stages and windows that are stored as tokens (Swin of transformers)."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import timm
import torch
import transformers
from torch import Tensor, nn

from efficient_ft.methods import LBPDCT, LBPWHT, LastStage, apply_methods
from efficient_ft.methods.backprop.low_rank import LowRankLinear
from efficient_ft.models.view import projections_in, view
from efficient_ft.testing import largest_difference, lively
from efficient_ft.testing.steps import gradients_of

_SIZES: dict[str, Any] = {"embed_dim": 32, "depths": [2, 2], "num_heads": [2, 4], "window_size": 4}
_NAMES = {"Swin": "swin_tiny_patch4_window7_224", "Swinv2": "swinv2_tiny_window8_256"}


def network(name: str, image_size: Any = 64) -> nn.Module:
    torch.manual_seed(0)
    about = getattr(transformers, f"{name}Config")(
        **_SIZES, image_size=image_size, patch_size=4, num_labels=5, drop_path_rate=0.0
    )
    return lively(getattr(transformers, f"{name}ForImageClassification")(about)).double().train()


def backward(model: nn.Module, size: tuple[int, int] = (64, 64), **options: Any) -> dict[str, Tensor | None]:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(2, 3, *size, dtype=torch.float64, generator=generator)
    model.zero_grad()
    model(pixel_values=images, labels=torch.tensor([1, 3]), **options).loss.backward()
    return gradients_of(model)


def _basis(side: int) -> Tensor:
    """Return the first two orthonormal Walsh vectors of a side as columns (side, 2): a constant and a sign change."""
    constant = torch.ones(side, dtype=torch.float64)
    return torch.stack([constant, torch.cat([constant[: side // 2], -constant[side // 2 :]])], 1) / side**0.5


def basis_of(height: int, width: int) -> Tensor:
    """Return the bases of order 2 (height · width, rank): frequencies (0, 0), (0, 1) and (1, 0) of each 8×8 tile."""
    side, columns = (min(height, 8), min(width, 8)), []
    rows, cols = _basis(side[0]), _basis(side[1])
    for top in range(0, height, side[0]):
        for left in range(0, width, side[1]):
            for i, j in ((0, 0), (0, 1), (1, 0)):
                column = torch.zeros(height, width, dtype=torch.float64)
                column[top : top + side[0], left : left + side[1]] = torch.outer(rows[:, i], cols[:, j])
                columns.append(column.flatten())
    return torch.stack(columns, 1)


class _Projected(torch.autograd.Function):
    """A linear layer whose backward pass projects both factors onto the columns of `basis` (tokens, rank)."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, basis: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight, basis)
        return x @ weight.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor, None]:  # type: ignore[override]
        x, weight, basis = ctx.saved_tensors
        low_g = basis.T @ g
        return basis @ (low_g @ weight), torch.einsum("bro,bri->oi", low_g, basis.T @ x), None


def project_by_hand(model: nn.Module, grids: dict[str, tuple[int, int]], rank: dict[str, Tensor]) -> None:
    """Replace the forward method of the layers in `grids` by projections onto the bases in `rank`."""
    for name in grids:
        layer: Any = model.get_submodule(name)

        def forward(x: Tensor, layer: Any = layer, basis: Tensor = rank[name]) -> Tensor:
            y: Tensor = _Projected.apply(x, layer.weight, basis)
            return y if layer.bias is None else y + layer.bias

        layer.forward = forward


def grid_of(name: str, image: tuple[int, int]) -> tuple[int, int]:
    """Return the grid of a layer's input from its name: windows of 4×4 tokens, or the grid of the stage."""
    stage = int(name.split("encoder.layers.")[1][0])
    if ".attention." in name:
        return (4, 4)
    stage += ".downsample." in name
    return (image[0] // 4 >> stage, image[1] // 4 >> stage)


@pytest.mark.parametrize("name", _NAMES)
@pytest.mark.parametrize("size", [(64, 64), (32, 64)], ids=["square", "wide"])
def test_gradients_equal_those_of_layers_that_are_projected_by_hand(name: str, size: tuple[int, int]) -> None:
    model = network(name, size)
    plain = copy.deepcopy(model)
    exact = backward(plain, size)
    LBPWHT(order=2).apply(model)
    changed = {n: m.low_rank for n, m in model.named_modules() if isinstance(m, LowRankLinear)}
    grids = {n: grid_of(n, size) for n in changed}
    assert {n: how.first.grid for n, how in changed.items()} == grids
    bases = {}
    for layer, (height, width) in grids.items():
        module: Any = model.get_submodule(layer)
        projection = changed[layer].projection((height, width), (module.in_features, module.out_features))
        bases[layer] = basis_of(height, width)
        assert projection.rank == bases[layer].shape[1]
    project_by_hand(plain, grids, bases)
    expected, found = backward(plain, size), backward(model, size)
    assert largest_difference(expected, found) < 1e-10
    assert largest_difference(exact, found) > 1e-3


@pytest.mark.parametrize("name", _NAMES)
def test_as_many_layers_are_low_rank_as_in_the_network_of_timm(name: str) -> None:
    usual = timm.create_model(_NAMES[name], img_size=64, num_classes=5, **_SIZES)
    layers = LBPDCT(order=2).apply(usual).touched
    touched = LBPDCT(order=2).apply(network(name)).touched
    # The query, key and value are separate layers in transformers.
    assert len(touched) == sum(projections_in(layer) for layer in layers) == 25
    assert not [x for x in view(network(name)).layers if x.why_not is not None and "grid" in str(x.why_not)]


@pytest.mark.parametrize("name", _NAMES)
def test_the_last_stage_is_low_rank(name: str) -> None:
    model = network(name)
    *_, report = apply_methods(model, [LastStage(), LBPWHT(order=2)])
    last = [x for x in report.touched if "encoder.layers.1." in x]
    assert len(last) == 12
