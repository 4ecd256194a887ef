"""The block-wise form: codebooks, rounding to the nearest code, and the CPU kernel's tables."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from efficient_ft.ops.blockwise import BLOCK, codebook, dequantize, is_blockwise, quantize
from efficient_ft.ops.blockwise.kernels import search_table
from tests.ops.blockwise.reference import CODES, rounded

FORMS = [(8, True), (8, False), (4, True), (4, False)]


@pytest.mark.parametrize(("bits", "signed"), FORMS)
def test_codebooks_are_those_of_the_papers(bits: int, signed: bool) -> None:
    values = codebook(bits, signed)
    assert len(values) == 2**bits
    np.testing.assert_allclose(values, CODES[bits, signed], rtol=1e-12)
    assert (0.0 in values) == ((bits, signed) != (4, False)), "a linear second moment has no 0"


@pytest.mark.parametrize(("bits", "signed"), FORMS)
@settings(max_examples=40, deadline=None)
@given(seed=st.integers(0, 2**16), spread=st.floats(0.1, 6), blocks=st.integers(1, 5), scale=st.floats(1e-20, 1e20))
def test_every_value_becomes_the_nearest_code(
    bits: int, signed: bool, seed: int, spread: float, blocks: int, scale: float
) -> None:
    chance = np.random.default_rng(seed)
    x = chance.standard_normal(blocks * BLOCK[bits]) * np.exp(spread * chance.standard_normal(blocks * BLOCK[bits]))
    x = (x if signed else np.abs(x)).clip(-1e15, 1e15) * scale
    x = x.astype(np.float32)
    codes, scales = quantize(torch.from_numpy(x), bits, signed)
    assert codes.numel() * 8 == x.size * bits
    assert scales.numel() == blocks
    found = dequantize(codes, scales, bits, signed).numpy().astype(np.float64)
    # No other code is nearer; which of two equally near ones was taken may differ.
    expected = rounded(x.astype(np.float64), bits, signed, BLOCK[bits])
    error, best = np.abs(found - x), np.abs(expected - x)
    np.testing.assert_allclose(error, best, rtol=1e-4, atol=2e-7 * float(np.abs(x).max()))


@pytest.mark.parametrize(("bits", "signed"), FORMS)
def test_one_value_all_equal_and_zeros(bits: int, signed: bool) -> None:
    size = BLOCK[bits]
    for value in (0.0, 1e-30, 3.5, 1e30, 1e-45):
        x = torch.full((2 * size,), value)
        back = dequantize(*quantize(x, bits, signed), bits, signed)
        bound = 1e-12 if value < 1e-12 else 1e-6 * value  # scales end at 1e-12
        assert (back - x).abs().max() <= bound
    x = torch.zeros(size)
    x[7] = 2.0
    back = dequantize(*quantize(x, bits, signed), bits, signed)
    assert back[7] == 2.0
    assert back.abs().sum() == 2.0 + (0 if 0.0 in codebook(bits, signed) else (size - 1) * 2 / 16)


@pytest.mark.parametrize(("bits", "signed"), FORMS)
def test_the_kernel_s_tables_find_every_code(bits: int, signed: bool) -> None:
    start, table = search_table(bits, signed)
    midpoints = table[2**bits :]
    x = np.concatenate([np.linspace(-1, 1, 100_001), np.geomspace(1e-44, 1, 50_000), -np.geomspace(1e-44, 1, 50_000)])
    near = np.nextafter(midpoints[:-1, None], np.float32([-np.inf, np.inf])).ravel()
    x = np.concatenate([x, near, midpoints[:-1], [0.0, -0.0, np.nan]]).astype(np.float32)
    guess = start[x.view(np.uint32) >> 16]
    expected = np.searchsorted(midpoints[:-1], x, side="right")
    np.testing.assert_array_equal(guess + (x >= midpoints[guess]), expected)


def test_a_block_with_nan_is_nan() -> None:
    x = torch.ones(512)
    x[3] = float("nan")
    back = dequantize(*quantize(x, 8, True), 8, True)
    assert back[:256].isnan().all()
    assert (back[256:] == 1).all()


def test_few_values_and_parts_of_blocks_are_left() -> None:
    assert is_blockwise(4096, 8)
    assert not is_blockwise(4096 - 256, 8)
    assert not is_blockwise(4096 + 128, 8)
    assert is_blockwise(4096 + 128, 4)
