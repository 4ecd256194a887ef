"""Tests of FLOPs per layer: forward and backward operations belong to the layer that requested them."""

from __future__ import annotations

from typing import Any

import pytest
import timm
import torch
from torch import Tensor, nn

from efficient_ft.cost import executed, layer_flops
from efficient_ft.cost.meter import Meter
from tests.cost.flat import SMALL_SWIN, SMALL_VIT, Checkpointed, Flat


class _Doubled(torch.autograd.Function):
    """A linear layer that computes its weight gradient twice."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return x @ w.T

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor, Tensor]:
        x, w = ctx.saved_tensors
        return g @ w, (g.T @ x + g.T @ x) / 2


class Doubled(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return _Doubled.apply(x, self.weight)


def test_flops_inside_custom_functions_belong_to_their_layer():
    model = Flat(Doubled(48, 20), nn.ReLU(), Doubled(20, 30), nn.ReLU(), nn.Linear(30, 5))
    for size in ("fp32", "bf16"):
        flops = layer_flops(model, 3, (4, 4), precision=size)
        assert flops["layers.0"] == (2 * 48 * 20, 6 * 48 * 20, 1)  # g_x is computed although no gradient is required
        assert flops["layers.2"] == (2 * 20 * 30, 6 * 20 * 30, 1)
        assert flops["layers.4"] == (2 * 30 * 5, 4 * 30 * 5, 1)


def test_a_product_of_a_matrix_and_a_vector_is_counted():
    matrix, vector = torch.randn(5, 7), torch.randn(7)
    with Meter([matrix, vector]) as meter:
        torch.mv(matrix, vector)
        torch.matmul(matrix, vector)
    assert sum(meter.flops.values()) == 2 * 2 * 5 * 7


@pytest.mark.first(1, "exhaustive")
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize(
    ("name", "arguments", "side"),
    [
        ("vit_tiny_patch16_224", SMALL_VIT, 64),
        ("swinv2_tiny_window8_256", SMALL_SWIN, 64),
        ("resnet18", {}, 64),
    ],
)
def test_layers_add_up(name: str, arguments: dict[str, Any], side: int):
    model, size = timm.create_model(name, num_classes=10, **arguments), (side, side)
    flops, count = layer_flops(model, 1, size), executed(model, 1, size)
    assert sum(f.forward for f in flops.values()) == count.forward_flops
    assert sum(f.backward for f in flops.values()) == count.backward_flops
    assert "" not in flops  # all operations belong to a module
    linears = {n for n, m in model.named_modules() if isinstance(m, nn.Linear | nn.Conv2d)}
    assert linears <= set(flops)
    assert all(flops[n].forward > 0 and flops[n].backward > 0 for n in linears)


def test_a_layer_that_is_never_reached_has_zeros():
    model = Flat(nn.Linear(48, 5))
    model.spare = nn.Linear(9, 9)
    assert layer_flops(model, 2, (4, 4))["spare"] == (0, 0, 0)


def test_recomputed_layers_keep_their_owner():
    model = Checkpointed(Doubled(48, 20), nn.ReLU(), nn.Linear(20, 5))
    flops = layer_flops(model, 3, (4, 4))
    assert flops["layers.0"] == (2 * 48 * 20, 8 * 48 * 20, 2)
    assert flops.get("", (0, 0, 1)) == (0, 0, 1)
