"""The GPU kernels against the plain torch forms, bit by bit: on a GPU if there is one, else in Triton's interpreter."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from efficient_ft.ops.packing import Overflow, eight_bits, sparse
from efficient_ft.ops.packing.kernels import cpu, gpu
from tests.ops.packing.reference import KINDS, assert_same_form, data, looked_at

pytestmark = pytest.mark.skipif(gpu._kernels() is None, reason="the GPU kernels need Triton")

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


@pytest.fixture(autouse=True, scope="module")
def _only_these_kernels():
    """The functions of `packing` use the GPU's kernels, interpreted on the CPU."""
    with pytest.MonkeyPatch.context() as patch:
        if DEVICE.type == "cpu":
            patch.setattr(cpu, "supports", lambda x: False)
            patch.setattr(gpu, "supports", lambda x: x.element_size() in gpu._INTEGERS and x.numel() > 0)
        yield


def assert_packs_alike(x: Tensor, sparsity: float, exact: bool) -> None:
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


@settings(max_examples=60, deadline=None)
@given(
    rows=st.integers(1, 4),
    inner=st.lists(st.integers(1, 9), min_size=1, max_size=3),
    kind=st.sampled_from(KINDS),
    dtype=st.sampled_from(DTYPES),
    sparsity=st.floats(0, 1, exclude_max=True),
    exact=st.booleans(),
    seed=st.integers(0, 99),
)
def test_sparse_form_of_any_shape(rows, inner, kind, dtype, sparsity, exact, seed):
    assert_packs_alike(data(kind, (rows, *inner), dtype, seed).to(DEVICE), sparsity, exact)


@pytest.mark.parametrize("exact", [True, False])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_sparse_form_of_rows_longer_than_a_subsample_and_a_tile(dtype, kind, exact):
    for n, sparsity in ((4096, 0.5), (4097, 0.5), (12291, 0.8), (12288, 0.1), (9001, 0.99), (5000, 0.0)):
        assert_packs_alike(data(kind, (2, n), dtype, seed=n).to(DEVICE), sparsity, exact)


def test_sparse_form_when_the_subsample_shows_nothing_of_the_threshold():
    # All that is looked at is larger, or smaller, than the value wanted, which the first range then misses.
    for seen, unseen in ((100.0, 1.0), (1.0, 100.0)):
        x = unseen * (1 + torch.rand(2, 8192, generator=torch.Generator().manual_seed(0)))
        x[:, looked_at(8192)] *= seen / unseen
        for sparsity in (0.3, 0.7, 0.999):
            assert_packs_alike(x.to(DEVICE), sparsity, True)
    infinite = torch.full((2, 5000), math.inf)
    infinite[1, 7:90] = -1.0
    assert_packs_alike(infinite.to(DEVICE), 0.5, True)


def test_sparse_form_of_a_part_of_a_fused_tensor_is_made_without_a_copy():
    qkv = torch.randn(2, 3, 4, 50, 16, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    q = qkv.transpose(1, 2)[:, :, 0]
    assert sparse.as_pieces(q).untyped_storage().data_ptr() == qkv.untyped_storage().data_ptr()
    for exact in (True, False):
        assert_packs_alike(q, 0.75, exact)


@settings(max_examples=40, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 5), st.integers(1, 70)),
    dtype=st.sampled_from(DTYPES),
    seed=st.integers(0, 2**31 - 1),
)
def test_eight_bits(shape, dtype, seed):
    assert_eight_bits_alike(torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE, dtype), seed)


@pytest.mark.parametrize("shape", [(1, 1, 300_001), (3000, 2, 3), (700, 3, 130), (2, 5, 3000)])
def test_eight_bits_of_shapes_that_are_cut_in_different_ways(shape):
    assert_eight_bits_alike(torch.randn(shape, generator=torch.Generator().manual_seed(0)).to(DEVICE), 2**31 - 1)


def assert_eight_bits_alike(x: Tensor, seed: int) -> None:
    low, high = eight_bits.extremes(x)
    for found, expected in zip((low, high), eight_bits.extremes_reference(x), strict=True):
        assert torch.equal(found, expected)
    low, high = 0.9 * low, 0.9 * high  # some values lie outside
    of_seed = torch.tensor(seed, device=DEVICE)
    q = eight_bits.quantize(x, low, high, of_seed)
    assert torch.equal(q, eight_bits.quantize_reference(x, low, high, of_seed))
    assert torch.equal(eight_bits.dequantize(q, low, high), eight_bits.dequantize_reference(q, low, high))


@pytest.mark.parametrize(
    ("largest", "seen"), [(65504.0, False), (65520.0, True), (-1e9, True), (math.inf, False), (math.nan, False)]
)
def test_half_precision_tells_what_is_too_large_for_it(largest, seen):
    x = torch.randn(3, 701, generator=torch.Generator().manual_seed(0))
    x[2, 698] = largest
    overflow = Overflow()
    half = overflow.to_half(x.to(DEVICE))
    assert half.dtype == torch.float16
    assert torch.equal(half.cpu().nan_to_num(1), x.half().nan_to_num(1))
    assert bool(overflow.flag) == seen
    beside = Overflow()
    beside.to_half(torch.tensor([largest, math.inf, math.nan, 1.0], device=DEVICE))
    assert bool(beside.flag) == seen, "what is not finite hides nothing"
    Overflow(overflow.flag).to_half(torch.ones(2, device=DEVICE))
    assert bool(overflow.flag) == seen, "what was seen stays seen"


def test_double_precision_and_nothing_are_left_to_the_plain_form():
    for x in (torch.zeros(2, 3, dtype=torch.float64, device=DEVICE), torch.zeros(0, 3, device=DEVICE)):
        assert not gpu.supports(x)
    form = sparse.sparse_pack(torch.randn(2, 30, dtype=torch.float64, device=DEVICE), 7, True)
    assert form[0].dtype == torch.float64
