"""Tests of the group form: a NumPy implementation, the error bound, and the CPU kernels against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from efficient_ft.ops.storage import GroupBits, Overflow, PackContext, Ranges, groups
from efficient_ft.ops.storage.kernels import cpu
from tests.ops.storage.reference import DTYPES, assert_same_bits, assert_same_form, needs_numba

GROUPS = [8, 24, 32, 64, 128, 1000, 65536]
SCALES = [1.0, 1e-7, 1e-40, 1e3]


def values(n: int, scale: float = 1.0, seed: int = 0, shift: float = 0.0) -> Tensor:
    """Return normal values times `scale`. Every fifth group of 64 values is constant."""
    x = torch.randn(n, generator=torch.Generator().manual_seed(seed)) * scale + shift
    for start in range(0, n, 320):
        x[start : start + 64] = x[start].item()
    return x


def by_hand(x: np.ndarray, bits: int, length: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return the codes, minima and steps of all groups, computed in NumPy with rounding to nearest."""
    codes, lows, steps = [], [], []
    for start in range(0, len(x), length):
        part = x[start : start + length].astype(np.float32)
        low = np.float16(part.min())
        step = np.float16(max((part.max() - np.float32(low)) / np.float32(2**bits - 1), 0))
        scaled = (part - np.float32(low)) / np.float32(step) if step > 0 else np.zeros_like(part)
        codes.append(np.clip(np.floor(scaled + 0.5), 0, 2**bits - 1))
        lows.append(low)
        steps.append(step)
    return np.concatenate(codes), np.array(lows), np.array(steps)


@pytest.mark.slow
@pytest.mark.vary_one
@pytest.mark.parametrize("bits", groups.BITS)
@pytest.mark.parametrize("n", [1, 7, 64, 200, 1000])
def test_what_comes_back_is_minimum_plus_steps(n, bits):
    x = values(n, seed=bits)
    length = groups.group_length(n, 64)
    codes, low, step = by_hand(x.numpy(), bits, length)
    packed = groups.group_pack(x, bits, 64)
    assert packed[1][0].numpy().tolist() == low.tolist()
    np.testing.assert_allclose(packed[1][1].numpy(), step, rtol=1e-3)
    expected = np.repeat(low.astype(np.float64), length)[:n] + codes * np.repeat(step.astype(np.float64), length)[:n]
    found = groups.group_unpack(*packed, n, bits, torch.float32)
    # A value halfway between two steps may round up or down, depending on the order of operations.
    near = np.repeat(step.astype(np.float64), length)[:n] * 1.01 + 1e-6
    difference = np.abs(found.double().numpy() - expected)
    assert (difference <= near).all()
    assert (difference < 1e-6).mean() > 0.99


@pytest.mark.parametrize("scale", SCALES)
@pytest.mark.parametrize("bits", groups.BITS)
@pytest.mark.parametrize("at_random", [False, True])
def test_error_is_within_a_step(at_random, bits, scale):
    x = values(4000, scale)
    seed = torch.tensor(7) if at_random else None
    back = groups.group_unpack(*groups.group_pack(x, bits, 64, seed), 4000, bits, torch.float32).double()
    x_GL = torch.nn.functional.pad(x, (0, -4000 % 64), value=x[-1].item()).view(-1, 64).double()
    step = (x_GL.amax(1) - x_GL.amin(1)) / (2**bits - 1)
    # The minimum and the step have 11 significant bits in fp16, or a resolution of 2⁻²⁴ for the smallest numbers.
    rounding = x_GL.amin(1).abs() * 2.0**-11 + step * 2**bits * 2.0**-11 + 2**bits * 2.0**-24
    allowed = (step * (1.0 if at_random else 0.5) + rounding).repeat_interleave(64)[:4000]
    assert ((back - x.double()).abs() <= allowed).all()


@pytest.mark.parametrize("bits", groups.BITS)
def test_stochastic_rounding_has_the_mean_of_the_input(bits):
    x = values(640, seed=3)
    seeds = 3000
    total = torch.zeros(640, dtype=torch.float64)
    for seed in range(seeds):
        total += groups.group_unpack(*groups.group_pack(x, bits, 64, torch.tensor(seed * 7919)), 640, bits, x.dtype)
    step = groups.group_pack(x, bits, 64)[1][1].double().repeat_interleave(64)
    # The standard deviation of the mean of `seeds` draws is at most step / 2 / √seeds. fp16 rounds the ends of a range.
    bound = 5 * step / 2 / seeds**0.5 + x.abs() * 2.0**-11 + step * 2**bits * 2.0**-11
    assert ((total / seeds - x).abs() <= bound).all()
    nearest = groups.group_unpack(*groups.group_pack(x, bits, 64), 640, bits, x.dtype)
    assert ((nearest - x).abs() > 5 * step / 2 / seeds**0.5).any()


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("bits", groups.BITS)
def test_a_group_with_a_value_that_is_not_finite_is_nan(bits, bad):
    x = values(300)
    x[70] = bad
    back = groups.group_unpack(*groups.group_pack(x, bits, 64), 300, bits, torch.float32)
    assert back[64:128].isnan().all()
    assert back[:64].isfinite().all()
    assert back[128:].isfinite().all()


@pytest.mark.parametrize("large", [1e5, -1e5, 3e38])
def test_a_group_too_large_for_fp16_is_reported(large):
    where = PackContext("x", 1, Ranges(), Overflow())
    x = values(300)
    GroupBits(4).pack(x, where)
    where.overflow.check()
    x[70:80] = large
    x[64:70] = large * 0.9
    GroupBits(4).pack(x[64:128], where)
    if large == 1e5:  # the minimum and the step fit into fp16
        where.overflow.check()
    else:
        with pytest.raises(ValueError, match="65504"):
            where.overflow.check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("bits", "group", "size"), [(8, 64, 8.5), (4, 64, 4.5), (3, 64, 3.5), (2, 32, 3.0)])
def test_size_is_that_of_the_formula(bits, group, size, dtype):
    x = torch.randn(4, 16, 32).to(dtype)
    packed = GroupBits(bits, group).pack(x, PackContext("x", 4, Ranges(), Overflow()))
    assert sum(t.numel() * t.element_size() for t in packed.tensors) == x.numel() * size / 8
    back = packed.unpack(*packed.tensors)
    assert back.dtype == dtype
    assert back.shape == x.shape
    with FakeTensorMode():
        fake = GroupBits(bits, group).pack(
            torch.randn(4, 16, 32, dtype=dtype), PackContext("x", 4, Ranges(), Overflow())
        )
        assert [t.shape for t in fake.tensors] == [t.shape for t in packed.tensors]
        assert [t.dtype for t in fake.tensors] == [t.dtype for t in packed.tensors]
        assert fake.unpack(*fake.tensors).shape == x.shape


@pytest.mark.parametrize("offset", [0.0, 10.0, -100.0, 100.0, 1000.0])
@pytest.mark.parametrize("bits", [8, 4])
def test_stochastic_rounding_of_values_far_from_zero_has_no_bias(bits, offset):
    """The mean of 300 draws has an error of less than 0.2 quantization steps."""
    x, total = offset + torch.rand(64 * 16, generator=torch.Generator().manual_seed(0)), 0
    for seed in range(300):
        packed = groups.group_pack(x, bits, 64, torch.tensor(seed * 7919))
        total += groups.group_unpack(*packed, x.numel(), bits, torch.float32).double()
    assert ((total / 300 - x).abs().max() * (2**bits - 1)).item() < 0.2
    for scale in (1e-5, 1e-7):  # the step is below the smallest fp16 number
        small, mean = x[:64] * scale if not offset else x[:64], 0
        for seed in range(300):
            packed = groups.group_pack(small, bits, 64, torch.tensor(seed * 7919))
            mean += groups.group_unpack(*packed, 64, bits, torch.float32).double() / 300
        assert (mean - small).abs().max() < max(0.2 * scale / (2**bits - 1), 2e-8) or offset


def assert_kernels_equal_reference(x: Tensor, bits: int, group: int, seed: Tensor | None) -> None:
    length = groups.group_length(x.numel(), group)
    found = groups.group_pack(x, bits, group, seed)
    assert_same_form(found, groups.group_pack_reference(x, bits, length, seed))
    back = groups.group_unpack(*found, x.numel(), bits, x.dtype)
    assert_same_bits(back, groups.group_unpack_reference(*found, x.numel(), bits).to(x.dtype))


@pytest.mark.slow
@pytest.mark.vary_one
@needs_numba
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("group", GROUPS)
@pytest.mark.parametrize("bits", groups.BITS)
def test_cpu_kernels_equal_the_reference(bits, group, dtype):
    for n in (1, 7, 64, 65, 5000):
        for scale in SCALES:
            for seed in (None, torch.tensor(12345)):
                x = values(n, scale).to(dtype)
                assert cpu.supports(x)
                assert_kernels_equal_reference(x, bits, group, seed)


@needs_numba
@pytest.mark.parametrize("bits", groups.BITS)
def test_cpu_kernels_equal_the_reference_on_special_values(bits):
    for special in (torch.nan, -torch.nan, torch.inf, -torch.inf, 3e38, -3e38, 65519.0, 65520.0, -65520.0, -0.0, 1e-45):
        x = values(1000)
        x[[3, 500, 999]] = special
        assert_kernels_equal_reference(x, bits, 64, None)
        assert_kernels_equal_reference(torch.full((70,), special), bits, 64, None)
        half = x.bfloat16()
        found = groups.group_pack(half, bits, 64)
        assert_same_form(found, groups.group_pack_reference(half, bits, 64, None))
        expected = groups.group_unpack_reference(*found, 1000, bits).bfloat16()
        back = groups.group_unpack(*found, 1000, bits, torch.bfloat16)
        torch.testing.assert_close(back, expected, rtol=0, atol=0, equal_nan=True)


@pytest.mark.slow
@needs_numba
@settings(max_examples=15)
@given(
    shape=st.lists(st.integers(1, 9), min_size=1, max_size=4),
    order=st.randoms(use_true_random=False),
    bits=st.sampled_from(groups.BITS),
    group=st.integers(1, 20).map(lambda k: 8 * k),
    step=st.integers(1, 3),
    seed=st.one_of(st.none(), st.integers(0, 2**31 - 1).map(torch.tensor)),
)
def test_cpu_kernels_of_any_strides_equal_the_reference(shape, order, bits, group, step, seed):
    dims = list(range(len(shape)))
    order.shuffle(dims)
    x = torch.randn(*shape[:-1], shape[-1] * step)[..., :: order.choice([1, step])][..., : shape[-1]].permute(dims)
    assert_kernels_equal_reference(x, bits, group, seed)


def test_q_inside_a_fused_qkv_is_packed_without_a_copy():
    qkv = torch.randn(2, 5, 3, 4, 16)
    k = qkv.permute(2, 0, 3, 1, 4)[1]  # (B, H, N, D)
    memory = k.permute(0, 2, 1, 3)
    view = groups.as_pieces(memory[None], 64)[0]
    assert view.data_ptr() == k.data_ptr()
    assert view.shape == (10, 64)
    assert torch.equal(view.flatten(), memory.flatten())
    assert groups.as_pieces(memory[None], 48)[0].data_ptr() != k.data_ptr()


@pytest.mark.parametrize("bits", groups.BITS)
def test_the_same_seed_gives_the_same_codes(bits):
    x = values(1000)
    first = groups.group_pack(x, bits, 64, torch.tensor(5))
    assert_same_form(first, groups.group_pack(x, bits, 64, torch.tensor(5)))
    assert not torch.equal(first[0], groups.group_pack(x, bits, 64, torch.tensor(6))[0])
