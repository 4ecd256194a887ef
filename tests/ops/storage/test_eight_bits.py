"""Tests of the 8-bit form: rounding, and equal bits from the CPU kernels and plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.ops.storage import eight_bits
from efficient_ft.ops.storage.kernels import cpu
from tests.ops.storage.reference import DTYPES, SHAPES, assert_same_bits, data, groups, needs_numba


@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bit_kernels_equal_the_reference(shape, dtype):
    x, low, high = groups(shape, dtype)
    for seed in (0, 12345, 2**31 - 1):
        q = cpu.quantize(x, low, high, torch.tensor(seed))
        assert_same_bits(q, eight_bits.quantize_reference(x, low, high, torch.tensor(seed)))
    assert_same_bits(cpu.dequantize(q, low, high), eight_bits.dequantize_reference(q, low, high))
    assert_same_bits(cpu.dequantize(q, low, high, dtype), eight_bits.dequantize_reference(q, low, high).to(dtype))
    for a, b in zip(cpu.extremes(x), eight_bits.extremes_reference(x), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@needs_numba
@settings(max_examples=50)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 5), st.one_of(st.integers(1, 40), st.integers(1020, 1030))),
    dtype=st.sampled_from([torch.float32, torch.bfloat16]),
    seed=st.integers(0, 2**31 - 1),
    share=st.sampled_from([0.1, 0.3, 0.7]),
)
def test_eight_bit_kernels_of_any_shape_equal_the_reference(shape, dtype, seed, share):
    x, low, high = groups(shape, dtype)
    # The input is non-contiguous, like a permuted activation.
    x = x.transpose(0, 2).contiguous().transpose(0, 2)
    q = cpu.quantize(x, low, high, torch.tensor(seed))
    assert torch.equal(q, eight_bits.quantize_reference(x, low, high, torch.tensor(seed)))
    found, expected = cpu.dequantize(q, low, high, dtype), eight_bits.dequantize_reference(q, low, high).to(dtype)
    assert_same_bits(found, expected)
    old = tuple(torch.randn(2, shape[1], generator=torch.Generator().manual_seed(seed)))
    moved = cpu.extremes(x, old, share)
    for a, b, before, after in zip(cpu.extremes(x), eight_bits.extremes_reference(x), old, moved, strict=True):
        assert torch.equal(a, b)
        assert torch.equal(after, before.lerp(b, share)), "the kernel rounds like torch"


def test_extremes_are_those_of_each_group():
    x = data("normal", (7, 3, 11), torch.float64)
    low, high = eight_bits.extremes(x)
    for g in range(3):
        values = [v for outer in x.tolist() for v in outer[g]]
        assert low[g] == np.float32(min(values))
        assert high[g] == np.float32(max(values))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dequantized_value_is_within_one_step_of_the_clamped_input(shape):
    x, low, high = groups(shape)
    seed = torch.tensor(7)
    ways = [eight_bits.quantize, eight_bits.quantize_reference]
    step = ((high - low) / 255)[:, None].double()
    clamped = torch.minimum(torch.maximum(x, low[:, None]), high[:, None]).double()
    for quantize in ways:
        back = eight_bits.dequantize(quantize(x, low, high, seed), low, high)
        assert back.dtype == torch.float32
        assert ((back.double() - clamped).abs() <= step * (1 + 1e-4)).all()


def test_rounding_at_random_is_unbiased():
    x = torch.linspace(-1, 2, 1500).view(1, 1, -1)
    low, high = torch.tensor([-1.0]), torch.tensor([2.0])
    seeds = torch.randint(2**31, (400,), generator=torch.Generator().manual_seed(0))
    for quantize in (eight_bits.quantize, eight_bits.quantize_reference):
        total = torch.zeros(x.shape, dtype=torch.float64)
        for seed in seeds:
            total += eight_bits.dequantize(quantize(x, low, high, seed), low, high)
        # A value is rounded to one of two neighbors, so its standard deviation is at most half a step.
        deviation = (3 / 255) / 2 / math.sqrt(len(seeds))
        error = total / len(seeds) - x
        assert error.abs().max() < 5 * deviation
        assert error.mean().abs() < 5 * deviation / math.sqrt(x.numel())


def test_neighbors_and_seeds_are_rounded_independently():
    noise = torch.stack([eight_bits.uniform(4096, torch.tensor(s), torch.device("cpu")) for s in (0, 10**6, 2 * 10**9)])
    assert 0 <= noise.min() < 0.01
    assert 0.99 < noise.max() < 1
    # The standard deviation of the correlation of 4096 numbers is 1/64.
    lagged = [(a, b) for i, a in enumerate(noise) for b in noise[i + 1 :]] + [(a[1:], a[:-1]) for a in noise]
    for a, b in lagged:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / 64


@pytest.mark.parametrize("inner", [5, 2000])
def test_a_constant_group_gives_its_value_back(inner):
    x = torch.tensor([0.3, 0.0, -2.0]).view(1, 3, 1).expand(2, 3, inner)
    low, high = eight_bits.extremes(x)
    assert torch.equal(low, high)
    for quantize in (eight_bits.quantize, eight_bits.quantize_reference):
        for values in (x, x + 1, x - 1):  # x + 1 and x - 1 are outside the range, which has width 0
            q = quantize(values, low, high, torch.tensor(3))
            for dequantize in (eight_bits.dequantize, eight_bits.dequantize_reference):
                assert torch.equal(dequantize(q, low, high), x)


def test_ranges_of_another_number_of_groups_are_rejected():
    x = torch.randn(2, 5, 40)
    with pytest.raises(RuntimeError, match="expanded size"):
        eight_bits.extremes(x, (torch.zeros(3), torch.ones(3)), 0.1)
