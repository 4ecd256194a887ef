"""Tests of attention in bfloat16 for the backward pass, against attention in double precision."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from efficient_ft.ops import attention as module
from efficient_ft.ops.attention import attention_gradients, attention_output, supports_attention


def case(heads: int, n: int, m: int, width: int, more: int = 0, spread: float = 1.0, seed: int = 0) -> list[Tensor]:
    """Return q, k, v and the gradient of the output in bfloat16, none of which is contiguous."""
    generator = torch.Generator().manual_seed(seed)
    sizes = [(n, width), (m, width), (m, width + more), (n, width + more)]
    q, k, v, g = (torch.randn(2, size, heads, w, generator=generator).transpose(1, 2) for size, w in sizes)
    return [(q * spread).bfloat16(), k.bfloat16(), (v + 2).bfloat16(), g.bfloat16()]


def by(attention: Callable[..., Tensor], tensors: list[Tensor], dtype: torch.dtype) -> list[Tensor]:
    *inputs, g = (t.detach().to(dtype) for t in tensors)
    inputs = [t.requires_grad_() for t in inputs]
    y = attention(*inputs)
    return [y.detach(), *torch.autograd.grad(y, inputs, g)]


def exact(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v


def ours(tensors: list[Tensor]) -> list[Tensor]:
    scale = tensors[0].shape[-1] ** -0.5
    assert supports_attention(*tensors[:3])
    return [attention_output(*tensors[:3], scale), *attention_gradients(*tensors, scale)]


def errors(found: list[Tensor], expected: list[Tensor]) -> list[float]:
    return [((a.double() - b).norm() / b.norm()).item() for a, b in zip(found, expected, strict=True)]


@pytest.mark.parametrize("spread", [1.0, 8.0])
def test_errors_are_at_most_those_of_fused_attention(spread):
    tensors = case(3, 50, 50, 32, spread=spread)
    expected = by(exact, tensors, torch.float64)
    plain = by(F.scaled_dot_product_attention, tensors, torch.bfloat16)
    for off, off_plain in zip(errors(ours(tensors), expected), errors(plain, expected), strict=True):
        assert off < 1.25 * off_plain
        assert off < 0.01


@given(
    heads=st.integers(1, 5),
    n=st.integers(1, 40),
    m=st.integers(1, 40),
    width=st.integers(1, 20),
    more=st.integers(0, 3),
    limit=st.sampled_from([1600, 4000, 1 << 20]),
    seed=st.integers(0, 9),
)
def test_kernels_and_plain_operations_agree(heads, n, m, width, more, limit, seed):
    tensors = case(heads, n, m, width, more, seed=seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(module, "_AT_A_TIME", limit)  # the last part may have fewer heads
        found = ours(tensors)
        patch.setattr(module, "_kernels", lambda: None)
        plain = ours(tensors)
    expected = by(exact, tensors, torch.float64)
    for a, b, c in zip(found, plain, expected, strict=True):
        assert a.shape == c.shape
        torch.testing.assert_close(a.double(), c, rtol=0.03, atol=0.03)
        torch.testing.assert_close(a, b, rtol=0.02, atol=0.02)


@pytest.mark.parametrize("numba", [True, False])
def test_nan_is_not_lost(numba, monkeypatch):
    if not numba:
        monkeypatch.setattr(module, "_kernels", lambda: None)
    tensors = case(1, 20, 20, 8)
    tensors[0][0, 0, 3, 1] = torch.nan
    y, of_q, _, _ = ours(tensors)
    assert y[0, 0, 3].isnan().all()
    assert y.isnan().sum() == y.shape[-1]
    assert of_q[0, 0, 3].isnan().all()


def test_other_tensors_are_not_supported():
    q, k, v, _ = case(2, 5, 5, 8)
    assert not supports_attention(q.float(), k, v)
    assert not supports_attention(q, k[:, :1], v)
    assert not supports_attention(q[0], k[0], v[0])
    assert not supports_attention(q[:0], k[:0], v[:0])
    long = torch.empty(1, 1, 1025, 1, dtype=torch.bfloat16)
    assert not supports_attention(long, long, long)
