"""Tests that the GPU kernels and plain torch give the same bits, on a GPU or in Triton's interpreter.

The interpreter is slow, so the default set is a smoke test. The marker ``slow`` selects all kinds of data and shapes.
"""

from __future__ import annotations

import math
from itertools import product
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efficient_ft.ops.storage import Overflow, eight_bits, groups, sparse
from efficient_ft.ops.storage.kernels import cpu, gpu
from tests.ops.storage.reference import KINDS, assert_same_form, data, looked_at

pytestmark = pytest.mark.skipif(gpu._kernels() is None, reason="the GPU kernels need Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def _only_these_kernels():
    """On a CPU, make the packing functions use the GPU kernels in Triton's interpreter."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(cpu, "supports", lambda x: False)
            patch.setattr(gpu, "supports", lambda x: x.element_size() in gpu._INTEGERS and x.numel() > 0)
        yield


def assert_same_packing(x: Tensor, sparsity: float, exact: bool) -> None:
    n = x[0].numel()
    kept = sparse.values_kept(n, sparsity)
    assert gpu.supports(x)
    form = sparse.sparse_pack(x, kept, exact)
    assert_same_form(form, sparse.sparse_pack_reference(x, kept, exact))
    back = sparse.sparse_unpack(*form, n)
    assert torch.equal(back, sparse.sparse_unpack_reference(*form, n))
    half = form[0].to(torch.bfloat16)
    back = sparse.sparse_unpack(half, form[1], n, torch.float32)
    assert torch.equal(back, sparse.sparse_unpack_reference(half.float(), form[1], n))


ANY_SPARSE: dict[str, Any] = {
    "rows": st.integers(1, 4),
    "inner": st.lists(st.integers(1, 9), min_size=1, max_size=3),
    "kind": st.sampled_from(KINDS),
    "dtype": st.sampled_from(DTYPES),
    "sparsity": st.floats(0, 1, exclude_max=True),
    "exact": st.booleans(),
    "seed": st.integers(0, 99),
}


@pytest.mark.slow
@settings(max_examples=12)
@given(**ANY_SPARSE)
def test_sparse_form_of_any_shape(rows, inner, kind, dtype, sparsity, exact, seed):
    assert_same_packing(data(kind, (rows, *inner), dtype, seed).to(DEVICE), sparsity, exact)


@pytest.mark.slow
@settings(max_examples=12)
@given(**ANY_SPARSE)
def test_sparse_form_of_many_shapes(rows, inner, kind, dtype, sparsity, exact, seed):
    assert_same_packing(data(kind, (rows, *inner), dtype, seed).to(DEVICE), sparsity, exact)


LONG = ((4096, 0.5), (4097, 0.5), (12291, 0.8), (12288, 0.1), (9001, 0.99), (5000, 0.0))


@pytest.mark.first(2, "slow")
@pytest.mark.parametrize(
    ("kind", "dtype", "exact", "n", "sparsity"),
    [
        ("normal", torch.float32, True, 4097, 0.5),
        ("misleading", torch.float32, True, 12291, 0.8),
        ("rounded", torch.bfloat16, True, 12288, 0.1),
        ("half zero", torch.float16, True, 5000, 0.0),
        ("sorted", torch.float32, False, 12291, 0.8),
        ("zero", torch.bfloat16, False, 9001, 0.99),
        ("normal", torch.float16, False, 4096, 0.5),
    ],
)
def test_sparse_form_of_rows_longer_than_a_subsample_and_a_tile(kind, dtype, exact, n, sparsity):
    assert_same_packing(data(kind, (2, n), dtype, seed=n).to(DEVICE), sparsity, exact)


@pytest.mark.parametrize(
    ("dtype", "kind", "exact"),  # one sixth of the combinations has the marker slow
    [
        pytest.param(*case, marks=pytest.mark.exhaustive if sum(at) % 6 else pytest.mark.slow)
        for at, case in zip(product(range(3), range(6), range(2)), product(DTYPES, KINDS, [True, False]), strict=True)
    ],
)
def test_sparse_form_of_all_kinds_of_long_rows(dtype, kind, exact):
    for n, sparsity in LONG:
        assert_same_packing(data(kind, (2, n), dtype, seed=n).to(DEVICE), sparsity, exact)


@pytest.mark.parametrize(
    "sparsity", [0.7, pytest.param(0.3, marks=pytest.mark.slow), pytest.param(0.999, marks=pytest.mark.slow)]
)
@pytest.mark.parametrize("scale", [100.0, 0.01])
def test_sparse_form_when_the_subsample_misses_the_threshold(scale, sparsity):
    # All values of the subsample are above or below the threshold, so the estimated range misses the threshold.
    x = 1 + torch.rand(2, 8192, generator=torch.Generator().manual_seed(0))
    x[:, looked_at(8192)] *= scale
    assert_same_packing(x.to(DEVICE), sparsity, True)


def test_sparse_form_of_infinite_values():
    infinite = torch.full((2, 5000), math.inf)
    infinite[1, 7:90] = -1.0
    assert_same_packing(infinite.to(DEVICE), 0.5, True)


def test_sparse_form_of_a_part_of_a_fused_tensor_is_made_without_a_copy():
    qkv = torch.randn(2, 3, 4, 50, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q = qkv.transpose(1, 2)[:, :, 0]
    assert sparse.as_pieces(q).untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    for exact in (True, False):
        assert_same_packing(q, 0.75, exact)


ANY_EIGHT_BITS: dict[str, Any] = {
    "shape": st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 70)),
    "dtype": st.sampled_from(DTYPES),
    "seed": st.integers(0, 2**31 - 1),
}


@settings(max_examples=12)
@given(**ANY_EIGHT_BITS)
def test_eight_bits(shape, dtype, seed):
    assert_same_eight_bits(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype), seed)


@pytest.mark.slow
@settings(max_examples=10)
@given(**ANY_EIGHT_BITS)
def test_eight_bits_of_many_shapes(shape, dtype, seed):
    assert_same_eight_bits(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype), seed)


@pytest.mark.parametrize(
    "shape",
    [
        (1000, 2, 3),
        (2, 5, 3000),
        pytest.param((3000, 2, 3), marks=pytest.mark.slow),
        pytest.param((1, 1, 300_001), marks=pytest.mark.slow),
        pytest.param((700, 3, 130), marks=pytest.mark.slow),
    ],
)
def test_eight_bits_of_shapes_that_are_divided_in_different_ways(shape):
    assert_same_eight_bits(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE), 2**31 - 1)


def assert_same_eight_bits(x: Tensor, seed: int) -> None:
    low, high = eight_bits.extremes(x)
    for found, expected in zip((low, high), eight_bits.extremes_reference(x), strict=True):
        assert torch.equal(found, expected)
    low, high = 0.9 * low, 0.9 * high  # some values are outside the range
    of_seed = torch.tensor(seed, device=DEVICE)
    q = eight_bits.quantize(x, low, high, of_seed)
    assert torch.equal(q, eight_bits.quantize_reference(x, low, high, of_seed))
    assert torch.equal(eight_bits.dequantize(q, low, high), eight_bits.dequantize_reference(q, low, high))


@pytest.mark.parametrize(
    ("largest", "overflows"), [(65504.0, False), (65520.0, True), (-1e9, True), (math.inf, False), (math.nan, False)]
)
def test_half_precision_finds_values_that_are_too_large(largest, overflows):
    x = torch.randn(3, 701, generator=torch.Generator().manual_seed(0))
    x[2, 698] = largest
    overflow = Overflow()
    half = overflow.to_half(x.to(DEVICE))
    assert half.dtype == torch.float16
    assert torch.equal(half.cpu().nan_to_num(1), x.half().nan_to_num(1))
    assert bool(overflow.flag) == overflows
    mixed = Overflow()
    mixed.to_half(torch.tensor([largest, math.inf, math.nan, 1.0], device=DEVICE))
    assert bool(mixed.flag) == overflows, "values that are not finite hide no overflow"
    Overflow(overflow.flag).to_half(torch.ones(2, device=DEVICE))
    assert bool(overflow.flag) == overflows, "the flag stays set"


def test_double_precision_and_empty_tensors_take_the_plain_form():
    for x in (torch.zeros(2, 3, dtype=torch.float64, device=DEVICE), torch.zeros(0, 3, device=DEVICE)):
        assert not gpu.supports(x)
    form = sparse.sparse_pack(torch.randn(2, 30, dtype=torch.float64, device=DEVICE), 7, True)
    assert form[0].dtype == torch.float64


def assert_same_groups(x: Tensor, bits: int, group: int, seed: Tensor | None) -> None:
    length = groups.group_length(x.numel(), group)
    assert gpu.supports(x)
    found = groups.group_pack(x, bits, group, seed)
    for a, b in zip(found, groups.group_pack_reference(x, bits, length, seed), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0, equal_nan=True)
    # To convert float32 to bfloat16, Triton's interpreter truncates and a GPU rounds.
    dtype = torch.float32 if DEVICE.type == "cpu" and x.dtype == torch.bfloat16 else x.dtype
    back = groups.group_unpack(*found, x.numel(), bits, dtype)
    expected = groups.group_unpack_reference(*found, x.numel(), bits).to(dtype)
    torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize("bits", groups.BITS)
def test_groups_equal_the_reference(bits):
    x = torch.randn(200, device=DEVICE)
    for seed in (None, torch.tensor(3)):
        assert_same_groups(x, bits, 64, seed)
    assert_same_groups(x[:9].half(), bits, 64, None)
    x[[70, 150]] = torch.tensor([torch.nan, -1e5], device=DEVICE)
    assert_same_groups(x, bits, 64, None)
    qkv = torch.randn(2, 3, 3, 2, 16, device=DEVICE)
    assert_same_groups(qkv.permute(2, 0, 3, 1, 4)[1].permute(0, 2, 1, 3), bits, 32, torch.tensor(3))


@pytest.mark.slow
@settings(max_examples=12)
@given(
    n=st.integers(1, 3000),
    scale=st.sampled_from([1.0, 1e-7, 1e-30, 1e5]),  # no subnormal float32 numbers, which a process may flush to zero
    dtype=st.sampled_from(DTYPES),
    bits=st.sampled_from(groups.BITS),
    group=st.integers(1, 40).map(lambda k: 8 * k),
    seed=st.one_of(st.none(), st.integers(0, 2**31 - 1).map(torch.tensor)),
)
def test_any_groups_equal_the_reference(n, scale, dtype, bits, group, seed):
    x = torch.randn(n, generator=torch.Generator().manual_seed(n)).mul(scale).to(dtype).to(DEVICE)
    assert_same_groups(x, bits, group, seed)
