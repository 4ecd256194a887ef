"""Tests of the sparse form: a naive reference, and equal bits from the CPU kernels and plain torch."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efficient_ft.ops.storage import sparse
from efficient_ft.ops.storage.kernels import cpu
from tests.ops.storage.reference import (
    DTYPES,
    KINDS,
    assert_same_bits,
    assert_same_form,
    budget,
    data,
    form_of,
    kept_mask,
    mask_of,
    needs_numba,
    packs,
    unpacks,
)


@settings(max_examples=100)
@given(
    rows=st.integers(1, 4),
    inner=st.lists(st.integers(1, 7), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    sparsity=st.floats(0, 1, exclude_max=True),
    seed=st.integers(0, 99),
)
def test_sparse_form_of_any_shape_equals_the_naive_one(rows, inner, kind, dtype, sparsity, seed):
    x = data(kind, (rows, *inner), dtype, seed)
    flat, n = x.flatten(1), math.prod(inner)
    kept = sparse.values_kept(n, sparsity)
    keep = kept_mask(flat, sparsity)
    expected = form_of(flat, keep, kept)
    for pack in packs():
        assert_same_form(pack(x, kept, True), expected)
    dense = torch.where(torch.from_numpy(keep), flat, 0)
    for unpack in unpacks():
        assert_same_bits(unpack(*expected, n), dense)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_form_of_long_rows_equals_the_naive_one(dtype, kind):
    # For rows longer than a subsample, the kernel estimates a bracket of the threshold and must detect a wrong bracket.
    for n, sparsity in ((4097, 0.5), (12291, 0.8), (12288, 0.05), (9001, 0.99)):
        x = data(kind, (2, n), dtype, seed=n)
        kept = sparse.values_kept(n, sparsity)
        keep = kept_mask(x, sparsity)
        expected = form_of(x, keep, kept)
        for pack in packs():
            assert_same_form(pack(x, kept, True), expected)
        for unpack in unpacks():
            assert_same_bits(unpack(*expected, n), torch.where(torch.from_numpy(keep), x, 0))


@settings(max_examples=200)
@given(n=st.integers(1, 10**6), sparsity=st.floats(0, 1, exclude_max=True))
def test_values_kept_is_the_papers_formula(n, sparsity):
    kept = sparse.values_kept(n, sparsity)
    assert kept == budget(n, sparsity)
    assert 1 <= kept <= n
    assert kept <= (1 - sparsity) * n + 2


def test_values_kept_by_hand():
    found = {(n, s): sparse.values_kept(n, s) for n, s in ((0, 0.5), (1, 0.9), (10, 0.0), (10, 0.5), (10, 0.89))}
    # k = 0 becomes 1, so nothing is dropped. With k = 5, the fifth smallest value is also kept.
    assert found == {(0, 0.5): 0, (1, 0.9): 1, (10, 0.0): 10, (10, 0.5): 6, (10, 0.89): 3}


def test_a_sample_of_zeros_never_exceeds_its_budget():
    # After ReLU6, more than a fraction s of the values can be zero. The test "≥ threshold" alone would keep all values.
    x = torch.zeros(3, 100)
    x[1, 40] = 1
    for pack in packs():
        values, bitmap = pack(x, sparse.values_kept(100, 0.8), True)
        keep = mask_of(bitmap, 100)
        assert values.shape == (3, 21)
        assert keep.sum(1).tolist() == [21, 21, 21]
        assert keep[1, 40]


# ------------------------------------------------------------------------------------------------ sampled thresholds
@given(n=st.integers(sparse.SUBSAMPLE + 1, 700_000))
def test_a_subsample_lies_in_all_parts_and_all_channels_of_a_row(n):
    count = sparse.SUBSAMPLE
    places = torch.arange(count) * sparse.subsample_stride(n) % n
    assert len(places.unique()) == count
    for parts, most in ((8, 1.15), (64, 1.6)):
        in_part = torch.bincount(places * parts // n, minlength=parts)
        assert in_part.max() <= most * count / parts + 2
    for channels in (64, 192, 384, 768):
        if n % channels == 0:
            in_channel = torch.bincount(places % channels, minlength=channels)
            assert in_channel.max() <= 1.15 * count / channels + 2


@needs_numba
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimated_form_is_the_same_in_both_ways_and_within_its_budget(dtype, kind):
    for n, sparsity in ((4097, 0.5), (12291, 0.8), (12288, 0.1), (9001, 0.99), (5000, 0.0), (50, 0.5)):
        x = data(kind, (3, n), dtype, seed=n)
        kept = sparse.values_kept(n, sparsity)
        expected = sparse.sparse_pack_reference(x, kept, False)
        assert cpu.supports(x)
        assert_same_form(sparse.sparse_pack(x, kept, False), expected)
        keep = mask_of(expected[1], n)
        assert keep.sum(1).max() <= kept
        # The bitmap and the order of the values match.
        assert_same_form(expected, form_of(x, keep, kept))
        # The threshold is exact if a row is short or nothing is dropped.
        exact = sparse.sparse_pack_reference(x, kept, True)
        if not sparse.uses_sampling(kept, n):
            assert_same_form(expected, exact)


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.95])
def test_estimated_density_is_near_the_budget(sparsity):
    n = 20011
    x = data("normal", (32, n), torch.float32)
    kept = sparse.values_kept(n, sparsity)
    assert sparse.uses_sampling(kept, n)
    for pack in packs():
        _, bitmap = pack(x, kept, False)
        missing = (kept - mask_of(bitmap, n).sum(1)) / n
        assert missing.min() >= 0
        assert missing.mean() < 0.012
        assert missing.max() < 0.03
        assert (missing > 0).mean() > 0.5, "most samples should stay below their budget and lose no tail"


@pytest.mark.parametrize("sparsity", [0.5, 0.9])
def test_an_estimated_threshold_drops_only_what_is_small_and_the_tail(sparsity):
    n = 10000
    x = data("normal", (16, n), torch.float64, seed=3)
    kept = sparse.values_kept(n, sparsity)
    for pack in packs():
        keeps = mask_of(pack(x, kept, False)[1], n)
        for row, keep in zip(x.abs().numpy(), keeps, strict=True):
            end = n if keep.sum() < kept else np.flatnonzero(keep)[-1] + 1
            assert end > 0.9 * n
            assert row[:end][~keep[:end]].max() < row[:end][keep[:end]].min()


def test_an_estimated_threshold_that_lets_too_much_pass_drops_the_tail():
    x = torch.ones(1, 8192)
    for pack in packs():
        values, bitmap = pack(x, 100, False)
        assert values.eq(1).all()
        assert mask_of(bitmap, 8192)[0].tolist() == [True] * 100 + [False] * 8092


@pytest.mark.parametrize("zeros", [0.5, 0.75, 0.8, 0.82, 0.9, 0.99, 1.0])
def test_an_estimated_threshold_keeps_no_zeros_instead_of_values(zeros):
    # After ReLU, a sample can contain more zeros than values to drop. The estimated threshold must not be 0.
    n = 20000
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(8, n, generator=generator).abs() * (torch.rand(8, n, generator=generator) >= zeros)
    kept = sparse.values_kept(n, 0.8)
    assert sparse.uses_sampling(kept, n)
    for pack in packs():
        bitmap = pack(x, kept, False)[1]
        found = torch.from_numpy(mask_of(bitmap, n))
        assert not (found & (x == 0)).any()
        lost = (x * found.logical_not()).norm() / x.norm().clamp_min(1e-30)
        exact = torch.from_numpy(mask_of(pack(x, kept, True)[1], n))
        assert lost < (x * exact.logical_not()).norm() / x.norm().clamp_min(1e-30) + 0.03
        if zeros > 0.85:
            assert lost == 0


# ------------------------------------------------------------------------------------------------ strides
def strided(name: str, channels: int) -> Tensor:
    """Return a non-contiguous view with 4 samples."""
    tokens, heads = 128, 3
    x = data("rounded", (4, tokens, 3, heads, channels), torch.float32)
    views = {
        "q of a fused qkv": lambda: x[:, :, 1],
        "q of a fused qkv, heads first": lambda: x[:, :, 1].transpose(1, 2),
        "third of a fused qkv's channels": lambda: x.flatten(2)[:, :, heads * channels : 2 * heads * channels],
        "transposed": lambda: x.flatten(2).transpose(1, 2),
        "channels last": lambda: x.permute(0, 3, 1, 2, 4),
        "every second sample": lambda: x.flatten(0, 1).unflatten(0, (4, -1))[:, ::2],
        "one sample for all": lambda: x[:1, :, 0].expand(4, -1, -1, -1),
        "one token for all": lambda: x[:, :1, 0].expand(-1, tokens, -1, -1),
        "one channel for all": lambda: x[:, :, 0, :, :1].expand(-1, -1, -1, channels),
        "inner pieces for all": lambda: x[:, :, 0, 0][:, None].expand(-1, 5, -1, -1),
        "samples last": lambda: x[..., 0].permute(3, 0, 1, 2)[:, :, :, 1],
        "one sample": lambda: x[2:3, 1:, 1],
        "within a larger storage": lambda: x[1:, 3:-2, 2],
    }
    return views[name]()


STRIDED = [
    "q of a fused qkv",
    "q of a fused qkv, heads first",
    "third of a fused qkv's channels",
    "transposed",
    "channels last",
    "every second sample",
    "one sample for all",
    "one token for all",
    "one channel for all",
    "inner pieces for all",
    "samples last",
    "one sample",
    "within a larger storage",
]


@pytest.mark.parametrize("channels", [4, 8, 16])  # a piece of 12 values (4 channels) ends inside a byte of the bitmap
@pytest.mark.parametrize("name", STRIDED)
def test_strided_input_gives_the_same_as_a_contiguous_one(name, channels):
    x = strided(name, channels)
    dense = x.contiguous()
    n = dense[0].numel()
    kept = sparse.values_kept(n, 0.7)
    for exact in (True, False):
        expected = sparse.sparse_pack_reference(dense, kept, exact)
        for pack in packs():
            assert_same_form(pack(x, kept, exact), expected)


def test_q_inside_a_fused_qkv_is_not_copied():
    x = torch.randn(2, 5, 3, 4, 8)[:, :, 1]
    pieces = sparse.as_pieces(x)
    assert pieces.data_ptr() == x.data_ptr()
    assert torch.equal(pieces.flatten(1), x.flatten(1))


# ------------------------------------------------------------------------------------------------ bitmaps
@settings(max_examples=50)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_bits_come_back(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = mask.transpose(0, -1)
    bits = sparse.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == math.ceil(mask.numel() / 8) == sparse.bitmap_bytes(mask.numel())
    assert torch.equal(sparse.unpack_bits(bits, mask.shape), mask)
