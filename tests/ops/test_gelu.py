"""Tests of GELU, alone and fused with frozen BatchNorm, against torch in double precision."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from efficient_ft.ops import gelu as module
from efficient_ft.ops.gelu import batch_norm_gelu, gelu

EPS = 1e-5


def _case(shape: tuple[int, ...], seed: int) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Return x and the upstream gradient in channels-last memory, and a list of mean, variance, weight and bias."""
    generator = torch.Generator().manual_seed(seed)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator)

    x, g = (draw(*shape).mul(2).contiguous(memory_format=torch.channels_last) for _ in range(2))
    channels = shape[1]
    return x, g, [draw(channels), draw(channels).abs() + 0.3, draw(channels), draw(channels)]


def _by_torch(x: Tensor, g: Tensor, of: list[Tensor]) -> list[Tensor]:
    x, g, (mean, variance, weight, bias) = x.double().requires_grad_(), g.double(), [t.double() for t in of]
    weight, bias = weight.requires_grad_(), bias.requires_grad_()
    y = F.gelu(F.batch_norm(x, mean, variance, weight, bias, False, 0.0, EPS))
    return [y.detach(), *torch.autograd.grad(y, (x, weight, bias), g)]


def _close(found: Tensor, expected: Tensor, tolerance: float = 5e-6) -> None:
    torch.testing.assert_close(
        found.double(), expected, rtol=tolerance, atol=tolerance * max(float(expected.abs().max()), 1)
    )


@pytest.mark.slow
@given(
    shape=st.tuples(st.integers(1, 5), st.integers(1, 70), st.integers(1, 6), st.integers(1, 6)),
    seed=st.integers(0, 99),
)
def test_batch_norm_and_gelu_are_torchs_in_double_precision(shape: tuple[int, ...], seed: int) -> None:
    x, g, of = _case(shape, seed)
    expected = _by_torch(x, g, of)
    x.requires_grad_()
    mean, variance, weight, bias = of
    weight.requires_grad_()
    bias.requires_grad_()
    y = batch_norm_gelu(x, mean, variance, weight, bias, EPS)
    assert y.stride() == x.stride()
    for found, value in zip([y.detach(), *torch.autograd.grad(y, (x, weight, bias), g)], expected, strict=True):
        _close(found, value)


@pytest.mark.slow
@given(size=st.integers(1, 40000), seed=st.integers(0, 99))
def test_gelu_is_torchs_in_double_precision(size: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(size, generator=generator).mul(4).requires_grad_()
    g = torch.randn(size, generator=generator)
    y = gelu(x)
    exact = x.detach().double().requires_grad_()
    expected = F.gelu(exact)
    _close(y.detach(), expected.detach(), 1e-6)
    _close(*(torch.autograd.grad(*pair)[0] for pair in ((y, x, g), (expected, exact, g.double()))), 1e-6)


def test_every_value_of_a_wide_range() -> None:
    x = torch.cat([torch.linspace(-12, 12, 2_000_001), torch.tensor([-1e30, -40.0, 0.0, 40.0, 1e30])]).requires_grad_()
    exact = x.detach().double().requires_grad_()
    y, expected = gelu(x), F.gelu(exact)
    found, slope = torch.autograd.grad(y.sum(), x)[0], torch.autograd.grad(expected.sum(), exact)[0]
    with torch.no_grad():
        assert float(((y - expected).abs() / exact.abs().clamp(min=1)).max()) < 3e-7
        assert float((found - slope).abs().max()) < 5e-7


def test_what_is_not_finite_stays_so() -> None:
    bad = torch.tensor([float("nan"), float("inf"), -float("inf"), 1.0])
    expected = F.gelu(bad.double())  # in fp32, torch returns NaN at +inf on AVX-512
    assert torch.equal(torch.isnan(gelu(bad)), torch.isnan(expected))
    x = bad.clone().requires_grad_()
    (g_x,) = torch.autograd.grad(gelu(x).sum(), x)
    assert not torch.isfinite(g_x[:3]).all()
    assert torch.isfinite(g_x[3])
    y = batch_norm_gelu(bad.view(1, 4, 1, 1), torch.zeros(4), torch.ones(4), None, None, EPS).flatten()
    assert torch.isnan(y[0])
    assert y[1] == torch.inf


@pytest.mark.parametrize("needs", [(True, False, False), (True, False, True), (True, True, False), (False, True, True)])
def test_only_the_gradients_that_are_needed(needs: tuple[bool, bool, bool]) -> None:
    x, g, of = _case((3, 8, 4, 4), 0)
    expected = _by_torch(x, g, of)[1:]
    mean, variance, *rest = of
    leaves = [x, *rest]
    for leaf, need in zip(leaves, needs, strict=True):
        leaf.requires_grad_(need)
    batch_norm_gelu(x, mean, variance, *rest, EPS).backward(g)
    for leaf, need, value in zip(leaves, needs, expected, strict=True):
        assert (leaf.grad is not None) == need
        if leaf.grad is not None:
            _close(leaf.grad, value)


def test_without_scale_and_shift() -> None:
    x, g, (mean, variance, *_) = _case((2, 5, 3, 3), 1)
    expected = _by_torch(x, g, [mean, variance, torch.ones(5), torch.zeros(5)])
    x.requires_grad_()
    y = batch_norm_gelu(x, mean, variance, None, None, EPS)
    _close(y.detach(), expected[0])
    _close(torch.autograd.grad(y, x, g)[0], expected[1])


def test_the_gradient_may_have_another_layout() -> None:
    x, g, of = _case((3, 8, 4, 4), 2)
    expected = _by_torch(x, g, of)
    x.requires_grad_()
    y = batch_norm_gelu(x, *of, EPS)
    _close(torch.autograd.grad(y, x, g.contiguous())[0], expected[1])


def test_one_tensor_is_kept() -> None:
    x, _, of = _case((3, 64, 4, 4), 3)
    kept: list[Tensor] = []
    with torch.autograd.graph.saved_tensors_hooks(lambda t: kept.append(t) or t, lambda t: t):
        batch_norm_gelu(x.requires_grad_(), *of, EPS)
    assert [t.numel() for t in kept if t.dim() > 1] == [x.numel()]
    assert sum(t.numel() for t in kept if t.dim() == 1) == 4 * 64


def test_results_do_not_depend_on_the_number_of_threads() -> None:
    x, g, of = _case((9, 48, 7, 7), 4)
    found, threads = [], torch.get_num_threads()
    try:
        for number in (1, 2):
            torch.set_num_threads(number)
            leaves = [x.clone(memory_format=torch.preserve_format), of[2].clone(), of[3].clone()]
            y = batch_norm_gelu(
                leaves[0].requires_grad_(), of[0], of[1], *(t.requires_grad_() for t in leaves[1:]), EPS
            )
            found.append([y.detach(), *torch.autograd.grad(y, leaves, g)])
    finally:
        torch.set_num_threads(threads)
    for one, two in zip(*found, strict=True):
        assert torch.equal(one, two)


def test_an_image_does_not_depend_on_its_batch() -> None:
    x, _, of = _case((9, 37, 5, 5), 5)
    whole = batch_norm_gelu(x, *of, EPS)
    assert all(torch.equal(batch_norm_gelu(x[i : i + 1], *of, EPS)[0], whole[i]) for i in range(9))
    flat = x.reshape(-1)
    assert torch.equal(torch.cat([gelu(part) for part in flat.split(19)]), gelu(flat))


def test_on_fake_tensors_as_many_bytes_are_kept() -> None:
    x, _, of = _case((3, 64, 4, 4), 6)
    with FakeTensorMode() as mode:
        fake, *rest = (mode.from_tensor(t) for t in (x, *of))
        assert not module._supports(fake)
        y = batch_norm_gelu(fake.requires_grad_(), *rest, EPS)
        y.sum().backward()
        assert fake.grad is not None
        assert (y.shape, y.stride(), fake.grad.shape) == (x.shape, x.stride(), x.shape)


def test_without_numba_torchs_operations_compute_it(monkeypatch: pytest.MonkeyPatch) -> None:
    x, g, of = _case((3, 8, 4, 4), 7)
    expected = _by_torch(x, g, of)
    monkeypatch.setattr(module, "_kernels", lambda: None)
    leaves = [x.requires_grad_(), of[2].requires_grad_(), of[3].requires_grad_()]
    y = batch_norm_gelu(x, *of, EPS)
    for found, value in zip([y.detach(), *torch.autograd.grad(y, leaves, g)], expected, strict=True):
        _close(found, value)
