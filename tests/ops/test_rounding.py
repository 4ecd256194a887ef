"""Tests of stochastic rounding to bfloat16 against a float64 reference."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from efficient_ft.ops.rounding import _kernels, round_reference, round_to_bf16


def _rounded(x: Tensor, seed: int) -> Tensor:
    y = torch.empty_like(x, dtype=torch.bfloat16)
    round_to_bf16(x, y, seed)
    return y


def test_the_expectation_is_the_value() -> None:
    x = torch.randn(200, generator=torch.Generator().manual_seed(0)) * 2.0 ** torch.arange(-100, 100)
    rounds = 4000
    total = sum(_rounded(x, seed * 0x9E3779B9 % 2**32).double() for seed in range(rounds))
    spacing = 2.0 ** (x.double().abs().log2().floor() - 7)
    error = (total / rounds - x.double()) / spacing
    # The error of a mean has a standard deviation of at most half a spacing divided by the root of the rounds.
    assert error.abs().max() < 4.5 * 0.5 / rounds**0.5
    assert abs(error.mean()) < 4 * 0.5 / (rounds * len(x)) ** 0.5


def test_a_result_is_one_of_the_two_neighbors() -> None:
    x = torch.randn(10_000, generator=torch.Generator().manual_seed(0))
    bits = x.view(torch.int32)
    down = (bits & -0x10000).view(torch.float32)
    up = ((bits & -0x10000) + 0x10000).view(torch.float32)
    y = _rounded(x, 1).float()
    assert ((y == down) | (y == up)).all()
    assert torch.equal(_rounded(x.bfloat16().float(), 1), x.bfloat16())


def test_infinity_and_nan_are_preserved() -> None:
    x = torch.tensor([float("inf"), -float("inf"), float("nan"), 0.0, -0.0])
    x = torch.cat([x, torch.tensor([0x7F800001, 0x7FFFFFFF, -1], dtype=torch.int32).view(torch.float32)])
    for seed in range(20):
        y = _rounded(x, seed).float()
        assert torch.equal(y[:2], x[:2])
        assert torch.equal(y[3:5], x[3:5])
        assert y[[2, 5, 6, 7]].isnan().all()


def test_the_kernel_equals_the_reference() -> None:
    pytest.importorskip("numba")
    assert _kernels() is not None
    x = torch.randn(100_003, generator=torch.Generator().manual_seed(0)) * 1e-3
    expected = torch.empty_like(x, dtype=torch.bfloat16)
    round_reference(x, expected, 2**32 - 7)
    assert torch.equal(_rounded(x, 2**32 - 7), expected)


@pytest.mark.parametrize("layout", ["channels_last", "transposed", "gaps", "mixed"])
def test_every_memory_layout_is_supported(layout: str) -> None:
    x = torch.randn(8, 6, 3, 3, generator=torch.Generator().manual_seed(0))
    y = torch.empty(8, 6, 3, 3, dtype=torch.bfloat16)
    if layout == "channels_last":
        x, y = x.to(memory_format=torch.channels_last), y.to(memory_format=torch.channels_last)
    elif layout == "transposed":
        x, y = x.transpose(0, 1), y.transpose(0, 1)
    elif layout == "gaps":
        x, y = x[:, ::2], y[:, ::2]
    else:
        x = x.to(memory_format=torch.channels_last)
    round_to_bf16(x, y, 3)
    assert ((y.float() - x).abs() <= x.abs() * 2.0**-7).all()
    assert (y.float() - x).abs().max() > 0
