"""Packed tensors against a naive reference, and the CPU kernels against the plain torch forms, bit by bit."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from concurrent.futures import Future
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from efficient_ft.core.errors import UserError
from efficient_ft.ops import packing, packing_cpu
from efficient_ft.ops.packing import Dense, EightBits, Half, Overflow, Packer, Place, Ranges, Sparse

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = ["normal", "rounded", "half zero", "zero", "sorted", "misleading"]
kernels = pytest.mark.skipif(packing_cpu._kernels() is None, reason="the kernels need numba")


# ------------------------------------------------------------------------------------------------ the naive form
def budget(n: int, sparsity: float) -> int:
    k = min(max(math.floor(n * sparsity), 1), n)
    return n - k + 1


def kept_mask(x_SN: Tensor, sparsity: float) -> np.ndarray:
    """(S, n), sample by sample: above the k-th smallest magnitude, and of those equal to it the first ones."""
    keep = np.zeros(x_SN.shape, bool)
    for s, row in enumerate(x_SN.double().abs().numpy()):
        kept = budget(len(row), sparsity)
        threshold = np.sort(row)[len(row) - kept]
        keep[s] = row > threshold
        room = kept - keep[s].sum()
        keep[s, np.flatnonzero(row == threshold)[:room]] = True
    return keep


def form_of(x_SN: Tensor, keep: np.ndarray, kept: int) -> tuple[Tensor, Tensor]:
    """The values (S, kept) and the bitmap of what `keep` says."""
    values = x_SN.new_zeros(len(x_SN), kept)
    for s, mask in enumerate(keep):
        values[s, : mask.sum()] = x_SN[s][torch.from_numpy(mask)]
    return values, torch.from_numpy(np.packbits(keep, axis=1, bitorder="little"))


def mask_of(bitmap: Tensor, n: int) -> np.ndarray:
    return np.unpackbits(bitmap.numpy(), axis=1, bitorder="little")[:, :n].astype(bool)


def data(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Values that are easy, or that one of the ways to find a threshold could stumble over."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "rounded":
        x = (2 * x).round() / 2
    elif kind == "half zero":
        x = x.clamp_min(0)
    elif kind == "zero":
        x[:: 2 if len(x) > 1 else 1] = 0
    elif kind == "sorted":
        x = x.flatten(1).sort(1).values.view(shape)
    elif kind == "misleading":  # the subsample sees large values only
        rows = x.view(len(x), -1)
        rows[:, looked_at(rows.shape[1])] += 100
    return x.to(dtype)


def looked_at(n: int) -> Tensor:
    """Which values of a row are looked at first."""
    return torch.arange(min(packing.SUBSAMPLE, n // 2)) * packing.hop(n) % n


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    integer = INTEGERS.get(a.element_size(), torch.uint8)
    assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_same_form(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def packs() -> list:
    """Every way to pack that there is on this machine."""
    return [packing.sparse_pack_reference, packing.sparse_pack]


def unpacks() -> list:
    return [packing.sparse_unpack_reference, packing.sparse_unpack]


# ------------------------------------------------------------------------------------------------ sparse, exact
@settings(max_examples=100, deadline=None)
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
    kept = packing.values_kept(n, sparsity)
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
    # Rows longer than a subsample: the kernel brackets the threshold, and must notice where the bracket misses it.
    for n, sparsity in ((4097, 0.5), (12291, 0.8), (12288, 0.05), (9001, 0.99)):
        x = data(kind, (2, n), dtype, seed=n)
        kept = packing.values_kept(n, sparsity)
        keep = kept_mask(x, sparsity)
        expected = form_of(x, keep, kept)
        for pack in packs():
            assert_same_form(pack(x, kept, True), expected)
        for unpack in unpacks():
            assert_same_bits(unpack(*expected, n), torch.where(torch.from_numpy(keep), x, 0))


@settings(max_examples=200, deadline=None)
@given(n=st.integers(1, 10**6), sparsity=st.floats(0, 1, exclude_max=True))
def test_values_kept_is_the_papers_formula(n, sparsity):
    kept = packing.values_kept(n, sparsity)
    assert kept == budget(n, sparsity)
    assert 1 <= kept <= n
    assert kept <= (1 - sparsity) * n + 2


def test_values_kept_by_hand():
    found = {(n, s): packing.values_kept(n, s) for n, s in ((0, 0.5), (1, 0.9), (10, 0.0), (10, 0.5), (10, 0.89))}
    # k = 0 is brought to 1: nothing is dropped. k = 5: the fifth smallest is kept too.
    assert found == {(0, 0.5): 0, (1, 0.9): 1, (10, 0.0): 10, (10, 0.5): 6, (10, 0.89): 3}


def test_a_sample_of_zeros_never_exceeds_its_budget():
    # After ReLU6 more than a fraction s is zero: "≥ threshold" alone would keep everything.
    x = torch.zeros(3, 100)
    x[1, 40] = 1
    for pack in packs():
        values, bitmap = pack(x, packing.values_kept(100, 0.8), True)
        keep = mask_of(bitmap, 100)
        assert values.shape == (3, 21)
        assert keep.sum(1).tolist() == [21, 21, 21]
        assert keep[1, 40]


# ------------------------------------------------------------------------------------------------ sparse, estimated
@given(n=st.integers(packing.SUBSAMPLE + 1, 700_000))
def test_a_subsample_lies_in_all_parts_and_all_channels_of_a_row(n):
    count = packing.SUBSAMPLE
    places = torch.arange(count) * packing.hop(n) % n
    assert len(places.unique()) == count
    for parts, most in ((8, 1.15), (64, 1.6)):
        in_part = torch.bincount(places * parts // n, minlength=parts)
        assert in_part.max() <= most * count / parts + 2
    for channels in (64, 192, 384, 768):
        if n % channels == 0:
            in_channel = torch.bincount(places % channels, minlength=channels)
            assert in_channel.max() <= 1.15 * count / channels + 2


@kernels
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_estimated_form_is_the_same_in_both_ways_and_within_its_budget(dtype, kind):
    for n, sparsity in ((4097, 0.5), (12291, 0.8), (12288, 0.1), (9001, 0.99), (5000, 0.0), (50, 0.5)):
        x = data(kind, (3, n), dtype, seed=n)
        kept = packing.values_kept(n, sparsity)
        expected = packing.sparse_pack_reference(x, kept, False)
        assert packing_cpu.serves(x)
        assert_same_form(packing.sparse_pack(x, kept, False), expected)
        keep = mask_of(expected[1], n)
        assert keep.sum(1).max() <= kept
        # What it says is kept is kept, in its order.
        assert_same_form(expected, form_of(x, keep, kept))
        # No subsample decides where a row is short or nothing is dropped.
        exact = packing.sparse_pack_reference(x, kept, True)
        if not packing.is_estimated(kept, n):
            assert_same_form(expected, exact)


@pytest.mark.parametrize("sparsity", [0.5, 0.8, 0.95])
def test_estimated_density_is_near_the_budget(sparsity):
    n = 20011
    x = data("normal", (32, n), torch.float32)
    kept = packing.values_kept(n, sparsity)
    assert packing.is_estimated(kept, n)
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
    kept = packing.values_kept(n, sparsity)
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


# ------------------------------------------------------------------------------------------------ strides
def strided(name: str, channels: int) -> Tensor:
    """(4, …), each a view that is not contiguous."""
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


@pytest.mark.parametrize("channels", [4, 8, 16])  # pieces of 12 values lie across bytes of the bitmap
@pytest.mark.parametrize("name", STRIDED)
def test_strided_input_gives_the_same_as_a_contiguous_one(name, channels):
    x = strided(name, channels)
    dense = x.contiguous()
    n = dense[0].numel()
    kept = packing.values_kept(n, 0.7)
    for exact in (True, False):
        expected = packing.sparse_pack_reference(dense, kept, exact)
        for pack in packs():
            assert_same_form(pack(x, kept, exact), expected)


def test_q_inside_a_fused_qkv_is_not_copied():
    x = torch.randn(2, 5, 3, 4, 8)[:, :, 1]
    pieces = packing._pieces(x)
    assert pieces.data_ptr() == x.data_ptr()
    assert torch.equal(pieces.flatten(1), x.flatten(1))


# ------------------------------------------------------------------------------------------------ 8 bits
SHAPES = [(3, 4, 17), (5, 1, 1023), (200, 3, 50), (2, 3, 1024), (1, 1, 40001), (40, 2, 1500), (1, 1, 1)]


def groups(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """x and, for each group, a range that some of the values lie outside, narrower from group to group."""
    scale = 8.0 ** -torch.arange(shape[1])
    x = data("normal", shape, torch.float64) * scale[:, None]
    high = 1.5 * scale
    return x.to(dtype), -0.8 * high, high


@kernels
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_eight_bit_kernels_equal_the_reference(shape, dtype):
    x, low, high = groups(shape, dtype)
    for seed in (0, 12345, 2**31 - 1):
        q = packing_cpu.quantise(x, low, high, torch.tensor(seed))
        assert_same_bits(q, packing.quantise_reference(x, low, high, torch.tensor(seed)))
    assert_same_bits(packing_cpu.dequantise(q, low, high), packing.dequantise_reference(q, low, high))
    for a, b in zip(packing_cpu.extremes(x), packing.extremes_reference(x), strict=True):
        assert a.dtype == torch.float32
        assert torch.equal(a, b)


@kernels
@settings(max_examples=50, deadline=None)
@given(
    shape=st.tuples(st.integers(1, 40), st.integers(1, 5), st.one_of(st.integers(1, 40), st.integers(1020, 1030))),
    seed=st.integers(0, 2**31 - 1),
)
def test_eight_bit_kernels_of_any_shape_equal_the_reference(shape, seed):
    x, low, high = groups(shape)
    # Not contiguous: as a permuted activation comes.
    x = x.transpose(0, 2).contiguous().transpose(0, 2)
    q = packing_cpu.quantise(x, low, high, torch.tensor(seed))
    assert torch.equal(q, packing.quantise_reference(x, low, high, torch.tensor(seed)))
    assert torch.equal(packing_cpu.dequantise(q, low, high), packing.dequantise_reference(q, low, high))
    for a, b in zip(packing_cpu.extremes(x), packing.extremes_reference(x), strict=True):
        assert torch.equal(a, b)


def test_extremes_are_those_of_each_group():
    x = data("normal", (7, 3, 11), torch.float64)
    low, high = packing.extremes(x)
    for g in range(3):
        values = [v for outer in x.tolist() for v in outer[g]]
        assert low[g] == np.float32(min(values))
        assert high[g] == np.float32(max(values))


@pytest.mark.parametrize("shape", SHAPES)
def test_a_dequantised_value_is_within_one_step_of_the_clamped_input(shape):
    x, low, high = groups(shape)
    seed = torch.tensor(7)
    ways = [packing.quantise, packing.quantise_reference]
    step = ((high - low) / 255)[:, None].double()
    clamped = torch.minimum(torch.maximum(x, low[:, None]), high[:, None]).double()
    for quantise in ways:
        back = packing.dequantise(quantise(x, low, high, seed), low, high)
        assert back.dtype == torch.float32
        assert ((back.double() - clamped).abs() <= step * (1 + 1e-4)).all()


def test_rounding_at_random_is_unbiased():
    x = torch.linspace(-1, 2, 1500).view(1, 1, -1)
    low, high = torch.tensor([-1.0]), torch.tensor([2.0])
    seeds = torch.randint(2**31, (400,), generator=torch.Generator().manual_seed(0))
    for quantise in (packing.quantise, packing.quantise_reference):
        total = torch.zeros(x.shape, dtype=torch.float64)
        for seed in seeds:
            total += packing.dequantise(quantise(x, low, high, seed), low, high)
        # A value is one of two neighbours: its standard deviation is at most half a step.
        deviation = (3 / 255) / 2 / math.sqrt(len(seeds))
        error = total / len(seeds) - x
        assert error.abs().max() < 5 * deviation
        assert error.mean().abs() < 5 * deviation / math.sqrt(x.numel())


def test_neighbours_and_seeds_are_rounded_independently():
    noise = torch.stack([packing.uniform(4096, torch.tensor(s), torch.device("cpu")) for s in (0, 10**6, 2 * 10**9)])
    assert 0 <= noise.min() < 0.01
    assert 0.99 < noise.max() < 1
    # 4096 numbers: a correlation's standard deviation is 1/64.
    lagged = [(a, b) for i, a in enumerate(noise) for b in noise[i + 1 :]] + [(a[1:], a[:-1]) for a in noise]
    for a, b in lagged:
        assert abs(torch.corrcoef(torch.stack([a, b]))[0, 1]) < 5 / 64


@pytest.mark.parametrize("inner", [5, 2000])
def test_a_constant_group_gives_its_value_back(inner):
    x = torch.tensor([0.3, 0.0, -2.0]).view(1, 3, 1).expand(2, 3, inner)
    low, high = packing.extremes(x)
    assert torch.equal(low, high)
    for quantise in (packing.quantise, packing.quantise_reference):
        for values in (x, x + 1, x - 1):  # the last two lie outside of a range without width
            q = quantise(values, low, high, torch.tensor(3))
            for dequantise in (packing.dequantise, packing.dequantise_reference):
                assert torch.equal(dequantise(q, low, high), x)


# ------------------------------------------------------------------------------------------------ packers
def place(samples: int, heads: tuple[int, int] | None = None, name: str = "here") -> Place:
    return Place(name, samples, Ranges(), Overflow(), heads)


def size(tensors: tuple[Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def there_and_back(packer: Packer, x: Tensor, where: Place) -> tuple[tuple[Tensor, ...], Tensor]:
    packed = packer.pack(x, where)
    back = packed.unpack(*packed.tensors)
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    return packed.tensors, back


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_keeps_the_tensor_itself(dtype):
    x = torch.randn(3, 5).to(dtype)
    tensors, back = there_and_back(Dense(), x, place(3))
    assert tensors == (x,)
    assert back is x


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_takes_two_bytes_and_leaves_what_has_them(dtype, half):
    x = torch.randn(3, 5).to(dtype)
    tensors, back = there_and_back(Half(half), x, place(3))
    assert size(tensors) == 30
    if dtype.itemsize == 2:
        assert tensors[0].dtype == dtype
        assert tensors[0].data_ptr() == x.data_ptr()
    else:
        assert tensors[0].dtype == half
    assert_same_bits(back, x if dtype.itemsize == 2 else x.to(half).to(dtype))


@pytest.mark.parametrize("values_dtype", [None, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("shape", "samples"), [((3, 4, 5), 3), ((3, 21), 3), ((12, 3, 5), 4), ((6, 7), 1)])
def test_sparse_takes_what_is_documented(shape, samples, dtype, values_dtype):
    # (12, 3, 5) of 4 samples: windows; a sample's budget is over all of its windows.
    x = data("normal", shape, dtype)
    n = math.prod(shape) // samples
    tensors, back = there_and_back(Sparse(0.6, values_dtype), x, place(samples))
    each = 2 if values_dtype is not None else dtype.itemsize
    assert size(tensors) == samples * budget(n, 0.6) * each + samples * math.ceil(n / 8)
    expected_dtype = dtype if values_dtype is None or dtype.itemsize == 2 else values_dtype
    assert tensors[0].dtype == expected_dtype
    rows = x.reshape(samples, n)
    keep = torch.from_numpy(kept_mask(rows, 0.6))
    expected = torch.where(keep, rows.to(expected_dtype).to(dtype), 0).view(shape)
    assert_same_bits(back, expected)


def test_sparse_estimates_only_where_it_may():
    x = data("normal", (2, 9000), torch.float32)
    exact, estimated = (there_and_back(Sparse(0.5, exact=e), x, place(2))[1] for e in (True, False))
    assert exact.count_nonzero() == 2 * 4501
    assert 2 * 4501 * 0.95 < estimated.count_nonzero() < 2 * 4501


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values_dtype", [None, torch.float16])
def test_sparse_in_eight_bits_takes_a_byte_per_value_and_one_range(dtype, values_dtype):
    x = data("normal", (3, 4, 25), dtype)
    where = place(3, heads=(1, 4))
    tensors, back = there_and_back(Sparse(0.5, values_dtype, eight_bits=True), x, where)
    kept = budget(100, 0.5)
    assert size(tensors) == 3 * kept + 3 * 13 + 2 * 4
    keep = torch.from_numpy(kept_mask(x.flatten(1), 0.5)).view(x.shape)
    # A kept value near zero may become exactly zero, what is dropped is nothing else.
    assert (back[~keep] == 0).all()
    low, high = where.ranges.of["here"]
    assert (low, high) == (x[keep].min().float(), x[keep].max().float())
    step = (high - low).item() / 255
    precision = {2: 2**-8, 4: 2**-20, 8: 2**-20}[dtype.itemsize] * x.abs().max().item()
    assert (back - x)[keep].abs().max().item() <= step + precision


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("heads", [None, (1, 4), (2, 2), (2, 6)])
def test_eight_bits_take_a_byte_per_value_and_a_range_per_head(dtype, heads):
    x = data("normal", (3, 4, 6), torch.float64)
    dim, count = heads or (0, 1)
    blocks = x.tensor_split(count, dim) if heads else (x,)
    # Each head on a scale of its own: a range for all would lose the small ones.
    for i, block in enumerate(blocks):
        block *= 10.0**-i
    x = x.to(dtype)
    where = place(3, heads)
    tensors, back = there_and_back(EightBits(), x, where)
    assert size(tensors) == 72 + count * 8
    low, high = where.ranges.of["here"]
    assert low.shape == (count,)
    views = x.tensor_split(count, dim) if heads else (x,)
    backs = back.tensor_split(count, dim) if heads else (back,)
    for g, (one, of_back) in enumerate(zip(views, backs, strict=True)):
        assert (low[g], high[g]) == (one.min().float(), one.max().float())
        step = (high[g] - low[g]).item() / 255
        precision = {2: 2**-8, 4: 2**-20, 8: 2**-20}[dtype.itemsize] * one.abs().max().item()
        assert (of_back - one).abs().max().item() <= step + precision


def test_two_eight_bit_packings_of_one_tensor_round_differently():
    x = torch.rand(2, 500)
    torch.manual_seed(0)
    a, b = (EightBits().pack(x, place(2)).tensors[0] for _ in range(2))
    assert not torch.equal(a, b)
    torch.manual_seed(0)
    assert torch.equal(EightBits().pack(x, place(2)).tensors[0], a), "torch's seed should fix the rounding"


def test_a_range_is_a_running_mean():
    ranges = Ranges()
    low, high = ranges.update("a", torch.tensor([-1.0, 3.0]).view(1, 2, 1).expand(4, 2, 3))
    assert (low.tolist(), high.tolist()) == ([-1, 3], [-1, 3])
    second = torch.tensor([[[-5.0, 9.0], [0.0, 4.0]]])
    low, high = ranges.update("a", second)
    torch.testing.assert_close(low, torch.tensor([0.9 * -1 + 0.1 * -5, 0.9 * 3 + 0.1 * 0]))
    torch.testing.assert_close(high, torch.tensor([0.9 * -1 + 0.1 * 9, 0.9 * 3 + 0.1 * 4]))
    # Kept for the next step; another place has a range of its own.
    assert torch.equal(ranges.of["a"][0], low)
    assert ranges.update("b", second)[0].tolist() == [-5, 0]
    assert torch.equal(ranges.of["a"][1], high)


@pytest.mark.parametrize("packer", [Half(torch.float16), Sparse(0.5, torch.float16)])
@pytest.mark.parametrize("large", [7e4, -7e4])
def test_a_value_too_large_for_fp16_is_an_error_that_names_bf16(packer, large):
    where = place(2)
    packer.pack(torch.randn(2, 8), where)
    where.overflow.check()
    packer.pack(torch.tensor([[1.0, 2, 3, large]] * 2), where)
    packer.pack(torch.randn(2, 8), where)  # does not make it forget
    with pytest.raises(UserError, match="bf16"):
        where.overflow.check()
    where.overflow.check()  # said once


@pytest.mark.parametrize("beside", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_hides_no_overflow(beside):
    where = place(1)
    Half(torch.float16).pack(torch.tensor([[1e5, beside, 1.0]]), where)
    with pytest.raises(UserError, match="bf16"):
        where.overflow.check()


@pytest.mark.parametrize(
    ("packer", "x"),
    [
        (Half(torch.float16), [1.0, torch.inf]),  # was infinite before
        (Half(torch.float16), [1.0, -torch.inf]),
        (Half(torch.float16), [1.0, torch.nan]),
        (Half(torch.float16), [1.0, 65504.0]),  # the largest there is
        (Half(torch.bfloat16), [1.0, 1e6]),
        (Sparse(0.5, torch.bfloat16), [1.0, 1e6]),
        (Sparse(0.5), [1.0, 1e6]),
        (Dense(), [1.0, 1e6]),
    ],
)
def test_no_overflow_where_nothing_becomes_infinite(packer, x):
    where = place(1)
    packer.pack(torch.tensor([x]), where)
    where.overflow.check()


@settings(max_examples=50, deadline=None)
@given(shape=st.lists(st.integers(1, 9), min_size=1, max_size=3), seed=st.integers(0, 99))
def test_bits_come_back(shape, seed):
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) < 0.5
    mask = mask.transpose(0, -1)
    bits = packing.pack_bits(mask)
    assert bits.dtype == torch.uint8
    assert bits.numel() == math.ceil(mask.numel() / 8) == packing.bitmap_bytes(mask.numel())
    assert torch.equal(packing.unpack_bits(bits, mask.shape), mask)


# ------------------------------------------------------------------------------------------------ other machines
@pytest.fixture
def threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@kernels
@pytest.mark.usefixtures("threads")
@pytest.mark.parametrize("team", ["torch's", "its own"])
def test_any_threads_give_the_same_results(monkeypatch, team):
    # Without torch's OpenMP the kernels run in threads of their own.
    if team == "its own":
        monkeypatch.setattr(packing_cpu, "_team", lambda: None)
    x = data("rounded", (37, 5003), torch.float32)
    kept = packing.values_kept(5003, 0.7)
    for exact in (True, False):
        expected = packing.sparse_pack_reference(x, kept, exact)
        form = packing.sparse_pack(x, kept, exact)
        assert_same_form(form, expected)
        back = packing.sparse_unpack_reference(*form, 5003)
        assert_same_bits(packing.sparse_unpack(*form, 5003), back)
    for shape in ((700, 3, 50), (40, 2, 1500)):
        v, low, high = groups(shape)
        q = packing_cpu.quantise(v, low, high, torch.tensor(5))
        assert torch.equal(q, packing.quantise_reference(v, low, high, torch.tensor(5)))
        assert torch.equal(packing_cpu.dequantise(q, low, high), packing.dequantise_reference(q, low, high))
        for a, b in zip(packing_cpu.extremes(v), packing.extremes_reference(v), strict=True):
            assert torch.equal(a, b)


@kernels
@pytest.mark.usefixtures("threads")
def test_the_threads_are_those_asked_for(monkeypatch):
    calls = []
    parallel = packing_cpu._team()
    if parallel is None:
        pytest.skip("torch's OpenMP is not to be found here")
    monkeypatch.setattr(packing_cpu, "_team", lambda: lambda *job: calls.append(job[2]) or parallel(*job))
    packing.sparse_pack(torch.randn(8, 20), 10, True)
    packing.sparse_pack(torch.randn(2, 20), 10, True)
    packing.sparse_pack(torch.randn(1, 20), 10, True)  # one row: one thread, no team
    assert calls == [3, 2]


@kernels
@pytest.mark.usefixtures("threads")
def test_threads_of_its_own_are_as_many_as_asked_for(monkeypatch):
    calls, pool = [], packing_cpu._threads(os.getpid())

    class Counted:
        def submit(self, *job: Any) -> Future:
            calls.append(job)
            return pool.submit(*job)

    monkeypatch.setattr(packing_cpu, "_team", lambda: None)
    monkeypatch.setattr(packing_cpu, "_threads", lambda process: Counted())
    packing.sparse_pack(torch.randn(8, 20), 10, True)
    assert len(calls) == 2, "the caller's own is the third"


def test_without_numba_the_plain_forms_serve(monkeypatch):
    monkeypatch.setattr(packing_cpu, "_kernels", lambda: None)
    x = data("rounded", (3, 5, 17), torch.float32)
    assert not packing_cpu.serves(x)
    kept = packing.values_kept(85, 0.6)
    keep = kept_mask(x.flatten(1), 0.6)
    form = packing.sparse_pack(x, kept, True)
    assert_same_form(form, form_of(x.flatten(1), keep, kept))
    assert_same_bits(packing.sparse_unpack(*form, 85), torch.where(torch.from_numpy(keep), x.flatten(1), 0))
    v, low, high = groups((3, 4, 17))
    q = packing.quantise(v, low, high, torch.tensor(1))
    assert torch.equal(q, packing.quantise_reference(v, low, high, torch.tensor(1)))
    assert torch.equal(packing.dequantise(q, low, high), packing.dequantise_reference(q, low, high))
    assert torch.equal(packing.extremes(v)[0], v.amin((0, 2)))


# ------------------------------------------------------------------------------------------------ fake tensors
def packers() -> list[Packer]:
    half = [Half(torch.float16), Half(torch.bfloat16)]
    sparse = [Sparse(0.6), Sparse(0.6, torch.float16), Sparse(0.6, eight_bits=True), Sparse(0.6, exact=False)]
    return [Dense(), *half, *sparse, EightBits()]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("packer", packers(), ids=repr)
@pytest.mark.parametrize(("shape", "samples", "heads"), [((6, 5, 4), 2, (2, 4)), ((2, 5001), 2, None)])
def test_fake_tensors_have_the_shapes_of_real_ones(packer, dtype, shape, samples, heads):
    def run() -> list[Tensor]:
        where = place(samples, heads)
        tensors, back = there_and_back(packer, torch.ones(shape, dtype=dtype), where)
        there_and_back(packer, torch.ones(shape, dtype=dtype), where)  # a range that is there already
        return [*tensors, back, *(t for pair in where.ranges.of.values() for t in pair)]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [21, 5001])
def test_functions_of_fake_tensors_have_the_shapes_of_real_ones(dtype, n):
    def run() -> list[Tensor]:
        x = torch.ones(2, 3, n, dtype=dtype)
        form = packing.sparse_pack(x, 17, False)
        low, high = packing.extremes(x)
        q = packing.quantise(x, low, high, torch.tensor(1))
        return [*form, packing.sparse_unpack(*form, 3 * n), low, high, q, packing.dequantise(q, low, high)]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]
