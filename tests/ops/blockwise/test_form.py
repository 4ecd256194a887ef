"""Tests of the block-wise form: codes next to each value, exact zeros, unbiased rounding and extreme values."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.ops.blockwise import BLOCK, LARGEST, Moments, dequantize, is_blockwise, quantize
from tests.ops.blockwise.reference import neighbors, ratio_values, root_values, without_shift


def values_of(moments: Moments, bits: int) -> tuple[np.ndarray, np.ndarray]:
    """Return the ratios and the roots that a state represents, in float64."""
    m, v = (x.double().numpy() for x in dequantize(moments, bits))
    roots = np.sqrt(v)
    return np.divide(m, roots, out=np.zeros_like(m), where=roots > 0), roots


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=60, deadline=None)
@given(
    seed=st.integers(0, 2**16), spread=st.floats(0, 14), blocks=st.integers(1, 4), scale=st.floats(1e-12, 1e12),
    zeros=st.floats(0, 1), step=st.integers(1, 10**6),
)  # fmt: skip
def test_every_value_becomes_one_of_its_two_neighbors(
    bits: int, seed: int, spread: float, blocks: int, scale: float, zeros: float, step: int
) -> None:
    chance, n = np.random.default_rng(seed), blocks * BLOCK
    root = (scale * np.exp(spread * chance.uniform(-1, 1, n)) * (chance.random(n) >= zeros)).astype(np.float32)
    m = (chance.standard_normal(n) * root).astype(np.float32)
    moments = quantize(torch.from_numpy(m), torch.from_numpy(root), bits, step)
    assert [t.numel() for t in moments] == [n * bits // 8, blocks, n * bits // 8, 3 * blocks]
    ratios, roots = values_of(moments, bits)
    for b in range(blocks):
        of = slice(b * BLOCK, (b + 1) * BLOCK)
        positive = root[of] > 0
        assert ((roots[of] > 0) == positive).all(), "a positive root never becomes 0, and 0 stays 0"
        low, high = neighbors(root[of][positive], root_values(root[of], bits))
        coded = without_shift(roots[of], moments.root_range[b].numpy(), bits)[positive]
        assert (coded >= low * (1 - 1e-5)).all()
        assert (coded <= high * (1 + 1e-5)).all()
        exact = np.divide(m[of], root[of], out=np.zeros(BLOCK), where=positive)
        low, high = neighbors(exact, ratio_values(max(np.abs(exact).max(), 1e-30), bits))
        slack = 1e-5 * np.abs(exact).max() + 1e-12
        assert (ratios[of][positive] >= low[positive] - slack).all()
        assert (ratios[of][positive] <= high[positive] + slack).all()
        assert (m[of] * (ratios[of] * roots[of]) >= 0).all(), "the sign is kept"


@pytest.mark.slow
@pytest.mark.first(1, "slow")
@pytest.mark.parametrize("bits", [8, 4])
def test_the_rounding_has_no_bias_over_steps(bits: int) -> None:
    """The mean ratio and the mean root of a block are exact. The mean root of a value is within a quarter step."""
    chance = torch.Generator().manual_seed(0)
    root = torch.rand(BLOCK, generator=chance).add(0.5)
    ratio = torch.randn(BLOCK, generator=chance)
    steps, sums = 4000, np.zeros((2, BLOCK))
    for step in range(1, steps + 1):
        sums += values_of(quantize(ratio * root, root, bits, step), bits)
    ratios, roots = sums / steps
    grid = ratio_values(float(ratio.abs().max()), bits)
    low, high = neighbors(ratio.numpy(), grid)
    assert (np.abs(ratios - ratio.numpy()) <= 4 * (high - low) / 2 / np.sqrt(steps) + 1e-6).all()
    low, high = neighbors(root.numpy(), root_values(root.numpy(), bits))
    exact, noise = root.numpy(), 4 * (high - low) / 2 / np.sqrt(steps) + 1e-6
    assert (np.abs(roots - exact) <= 0.25 * (high - low) + noise).all()
    assert abs((roots - exact).mean() / (high - low).mean()) <= 0.01


@pytest.mark.parametrize("bits", [8, 4])
def test_the_same_step_rounds_equally(bits: int) -> None:
    m, root = torch.randn(512), torch.rand(512)
    state = torch.get_rng_state()
    first, again, other = (quantize(m, root, bits, step) for step in (3, 3, 4))
    assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
    assert not torch.equal(first.root, other.root)
    assert not torch.equal(first.ratio, other.ratio)
    assert torch.equal(torch.get_rng_state(), state), "the global generator is left alone"


@pytest.mark.parametrize("bits", [8, 4])
def test_equal_values_zeros_and_extremes(bits: int) -> None:
    for value in (1e-18, 3.5, 1e19):
        root = torch.full((2 * BLOCK,), value)
        m, v = dequantize(quantize(root * 0.25, root, bits, 1), bits)
        torch.testing.assert_close(v.sqrt(), root, rtol=2e-3, atol=0)
        torch.testing.assert_close(m / v.sqrt(), torch.full_like(m, 0.25), rtol=1e-5, atol=0)
    zero = torch.zeros(BLOCK)
    assert all((x == 0).all() for x in dequantize(quantize(zero, zero, bits, 1), bits))


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("bad", [float("nan"), -float("nan"), float("inf")])
def test_a_value_that_is_not_finite_leaves_the_others_alone(bits: int, bad: float) -> None:
    root = torch.linspace(1, 2, 2 * BLOCK)
    m = 0.1 * root
    m[3] = root[3] = bad
    for values in dequantize(quantize(m, root, bits, 1), bits):
        assert values.isfinite().all()
    m, v = dequantize(quantize(m, root, bits, 1), bits)
    assert m[3] == 0
    assert v[3] >= 1e37, "the largest root: no step"
    assert ((v[BLOCK:].sqrt() - root[BLOCK:]).abs() < (0.01 if bits == 8 else 0.1)).all(), "another block"
    others = torch.arange(BLOCK) != 3
    assert (v[:BLOCK][others].sqrt() >= (0.97 if bits == 8 else 0.7)).all(), "the shift, a share of the codes' distance"
    assert torch.tensor(LARGEST, dtype=torch.int32).view(torch.float32).square().isfinite()


def test_few_values_and_parts_of_blocks_are_left() -> None:
    assert is_blockwise(4096)
    assert is_blockwise(4096 + 128)
    assert not is_blockwise(4096 - 128)
    assert not is_blockwise(4096 + 64)
