"""Tests of convolutions with a frozen weight or a frozen input: results against torch, and saved tensors."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from efficient_ft.ops.frozen import frozen_conv2d, frozen_input_conv2d

GEOMETRIES: dict[str, dict[str, Any]] = {
    "1x1": {"kernel": (1, 1)},
    "1x1 of stride 2": {"kernel": (1, 1), "stride": (2, 2)},
    "3x3": {"kernel": (3, 3), "padding": (1, 1)},
    "5x3 with steps": {"kernel": (5, 3), "stride": (3, 2), "padding": (2, 0), "dilation": (1, 2)},
    "grouped": {"kernel": (3, 3), "padding": (1, 1), "groups": 2},
    "depthwise": {"kernel": (3, 3), "stride": (2, 1), "groups": 4},
}


def case(kernel: tuple[int, int], **geometry: Any) -> tuple[Tensor, Tensor, Tensor, dict[str, Any]]:
    generator = torch.Generator().manual_seed(0)
    full = {"stride": (1, 1), "padding": (0, 0), "dilation": (1, 1), "groups": 1, **geometry}

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator)

    return draw(2, 4, 11, 9), draw(8, 4 // full["groups"], *kernel), draw(8), full


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("geometry", GEOMETRIES.values(), ids=list(GEOMETRIES))
def test_output_and_gradients_are_torch_s(geometry: dict[str, Any], memory: torch.memory_format) -> None:
    x, weight, bias, full = case(**geometry)
    x = x.contiguous(memory_format=memory)
    inputs = [(x.clone().requires_grad_(), bias.clone().requires_grad_()) for _ in range(2)]
    own = frozen_conv2d(inputs[0][0], weight, inputs[0][1], **full)
    expected = F.conv2d(inputs[1][0], weight, inputs[1][1], **full)
    torch.testing.assert_close(own, expected, rtol=1e-13, atol=1e-13)
    upstream = torch.randn_like(expected)
    own.backward(upstream)
    expected.backward(upstream)
    for mine, theirs in zip(*inputs, strict=True):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-12, atol=1e-12)


def test_the_weight_alone_is_kept() -> None:
    x, weight, bias, full = case((3, 3))
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        frozen_conv2d(x.requires_grad_(), weight, bias, **full)
    assert [t.data_ptr() for t in kept] == [weight.data_ptr()]


def test_under_autocast_it_computes_in_its_type_and_gradients_have_their_own() -> None:
    x, weight, bias, full = case((3, 3))
    x, bias = x.float().requires_grad_(), bias.float().requires_grad_()
    with torch.autocast("cpu", torch.bfloat16):
        y = frozen_conv2d(x, weight.float(), bias, **full)
        expected = F.conv2d(x, weight.float(), bias, **full)
    assert y.dtype == torch.bfloat16
    assert torch.equal(y, expected)
    y.float().sum().backward()
    assert x.grad is not None
    assert bias.grad is not None
    assert x.grad.dtype == bias.grad.dtype == torch.float32


@pytest.mark.parametrize("memory", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(("kernel", "stride", "padding"), [((3, 3), 2, 1), ((1, 1), 1, 0), ((5, 3), 3, 2)])
def test_with_a_frozen_input_gradients_are_torch_s(
    kernel: tuple[int, int], stride: int, padding: int, memory: torch.memory_format
) -> None:
    x, weight, bias, _ = case(kernel)
    x = x.contiguous(memory_format=memory)
    expected = F.conv2d(x, weight.requires_grad_(), bias.requires_grad_(), stride, padding)
    own = frozen_input_conv2d(x, weight, bias, stride, padding)
    torch.testing.assert_close(own, expected, rtol=1e-13, atol=1e-13)
    g = torch.randn_like(expected)
    for a, b in zip(*(torch.autograd.grad(y, (weight, bias), g) for y in (own, expected)), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)
