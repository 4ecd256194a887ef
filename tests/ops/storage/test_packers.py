"""Tests of packers: saved tensors, restored values, and the required state."""

from __future__ import annotations

import math

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from efficient_ft.core.errors import UserError
from efficient_ft.ops.storage import (
    Dense,
    EightBits,
    Half,
    Overflow,
    PackContext,
    Packer,
    Ranges,
    Sparse,
    eight_bits,
    sparse,
)
from tests.ops.storage.reference import DTYPES, assert_same_bits, budget, data, kept_mask


def context(samples: int, heads: tuple[int, int] | None = None, name: str = "here") -> PackContext:
    return PackContext(name, samples, Ranges(), Overflow(), heads)


def size(tensors: tuple[Tensor, ...]) -> int:
    return sum(t.numel() * t.element_size() for t in tensors)


def there_and_back(packer: Packer, x: Tensor, where: PackContext) -> tuple[tuple[Tensor, ...], Tensor]:
    packed = packer.pack(x, where)
    back = packed.unpack(*packed.tensors)
    assert back.shape == x.shape
    assert back.dtype == x.dtype
    return packed.tensors, back


@pytest.mark.parametrize("dtype", DTYPES)
def test_dense_keeps_the_tensor_itself(dtype):
    x = torch.randn(3, 5).to(dtype)
    tensors, back = there_and_back(Dense(), x, context(3))
    assert tensors == (x,)
    assert back is x


@pytest.mark.parametrize("half", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("dtype", DTYPES)
def test_half_takes_two_bytes_and_leaves_what_has_them(dtype, half):
    x = torch.randn(3, 5).to(dtype)
    tensors, back = there_and_back(Half(half), x, context(3))
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
    # The shape (12, 3, 5) has 4 samples of 3 windows. The budget of a sample covers all of its windows.
    x = data("normal", shape, dtype)
    n = math.prod(shape) // samples
    tensors, back = there_and_back(Sparse(0.6, values_dtype), x, context(samples))
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
    exact, estimated = (there_and_back(Sparse(0.5, exact=e), x, context(2))[1] for e in (True, False))
    assert exact.count_nonzero() == 2 * 4501
    assert 2 * 4501 * 0.95 < estimated.count_nonzero() < 2 * 4501


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("values_dtype", [None, torch.float16])
def test_sparse_in_eight_bits_takes_a_byte_per_value_and_one_range(dtype, values_dtype):
    x = data("normal", (3, 4, 25), dtype)
    where = context(3, heads=(1, 4))
    tensors, back = there_and_back(Sparse(0.5, values_dtype, eight_bits=True), x, where)
    kept = budget(100, 0.5)
    assert size(tensors) == 3 * kept + 3 * 13 + 2 * 4
    keep = torch.from_numpy(kept_mask(x.flatten(1), 0.5)).view(x.shape)
    # A kept value near zero may become exactly zero. A dropped value is always zero.
    assert (back[~keep] == 0).all()
    low, high = where.ranges.by_name["here"]
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
    # Each head has a different scale, so a common range would round small values to zero.
    for i, block in enumerate(blocks):
        block *= 10.0**-i
    x = x.to(dtype)
    where = context(3, heads)
    tensors, back = there_and_back(EightBits(), x, where)
    assert size(tensors) == 72 + count * 8
    low, high = where.ranges.by_name["here"]
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
    where = context(2)
    a, b = (EightBits().pack(x, where).tensors[0] for _ in range(2))
    assert not torch.equal(a, b)
    torch.rand(3)  # packing does not use torch's generator
    assert torch.equal(EightBits().pack(x, context(2)).tensors[0], a), "torch's seed should fix the rounding"
    torch.manual_seed(1)
    assert not torch.equal(EightBits().pack(x, context(2)).tensors[0], a)


def test_a_range_is_a_running_mean():
    ranges = Ranges()
    low, high = ranges.update("a", torch.tensor([-1.0, 3.0]).view(1, 2, 1).expand(4, 2, 3))
    assert (low.tolist(), high.tolist()) == ([-1, 3], [-1, 3])
    second = torch.tensor([[[-5.0, 9.0], [0.0, 4.0]]])
    low, high = ranges.update("a", second)
    torch.testing.assert_close(low, torch.tensor([0.9 * -1 + 0.1 * -5, 0.9 * 3 + 0.1 * 0]))
    torch.testing.assert_close(high, torch.tensor([0.9 * -1 + 0.1 * 9, 0.9 * 3 + 0.1 * 4]))
    # The range is kept for the next step, and each context has a separate range.
    assert torch.equal(ranges.by_name["a"][0], low)
    assert ranges.update("b", second)[0].tolist() == [-5, 0]
    assert torch.equal(ranges.by_name["a"][1], high)


@pytest.mark.parametrize("packer", [Half(torch.float16), Sparse(0.5, torch.float16)])
@pytest.mark.parametrize("large", [7e4, -7e4])
def test_a_value_too_large_for_fp16_is_an_error_that_names_bf16(packer, large):
    where = context(2)
    packer.pack(torch.randn(2, 8), where)
    where.overflow.check()
    packer.pack(torch.tensor([[1.0, 2, 3, large]] * 2), where)
    packer.pack(torch.randn(2, 8), where)  # the overflow flag stays set
    with pytest.raises(UserError, match="bf16"):
        where.overflow.check()
    where.overflow.check()  # the error is raised once


@pytest.mark.parametrize("other", [torch.inf, -torch.inf, torch.nan])
def test_what_is_not_finite_hides_no_overflow(other):
    where = context(1)
    Half(torch.float16).pack(torch.tensor([[1e5, other, 1.0]]), where)
    with pytest.raises(UserError, match="bf16"):
        where.overflow.check()


@pytest.mark.parametrize(
    ("packer", "x"),
    [
        (Half(torch.float16), [1.0, torch.inf]),  # the value was infinite before packing
        (Half(torch.float16), [1.0, -torch.inf]),
        (Half(torch.float16), [1.0, torch.nan]),
        (Half(torch.float16), [1.0, 65504.0]),  # the largest fp16 number
        (Half(torch.bfloat16), [1.0, 1e6]),
        (Sparse(0.5, torch.bfloat16), [1.0, 1e6]),
        (Sparse(0.5), [1.0, 1e6]),
        (Dense(), [1.0, 1e6]),
    ],
)
def test_no_overflow_where_nothing_becomes_infinite(packer, x):
    where = context(1)
    packer.pack(torch.tensor([x]), where)
    where.overflow.check()


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
        where = context(samples, heads)
        tensors, back = there_and_back(packer, torch.ones(shape, dtype=dtype), where)
        there_and_back(packer, torch.ones(shape, dtype=dtype), where)  # the range exists already
        return [*tensors, back, *(t for pair in where.ranges.by_name.values() for t in pair)]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("n", [21, 5001])
def test_functions_of_fake_tensors_have_the_shapes_of_real_ones(dtype, n):
    def run() -> list[Tensor]:
        x = torch.ones(2, 3, n, dtype=dtype)
        form = sparse.sparse_pack(x, 17, False)
        low, high = eight_bits.extremes(x)
        q = eight_bits.quantize(x, low, high, torch.tensor(1))
        return [*form, sparse.sparse_unpack(*form, 3 * n), low, high, q, eight_bits.dequantize(q, low, high)]

    real = run()
    with FakeTensorMode():
        fake = run()
    assert [(t.shape, t.dtype) for t in fake] == [(t.shape, t.dtype) for t in real]
