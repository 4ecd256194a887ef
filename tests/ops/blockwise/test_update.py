"""Tests of an Adam step with block-wise moments: plain torch against float64, and the kernels against plain torch."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from efficient_ft.ops.blockwise import (
    BLOCK,
    AdamStep,
    Moments,
    _on_cpu,
    _on_gpu,
    adam_step,
    adam_step_reference,
    dequantize,
    empty_moments,
    supports,
)
from tests.ops.blockwise.reference import adam, bound

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}


def form_of(name: str) -> Callable[..., None]:
    """Return one implementation of the step. Without a GPU, the Triton kernel runs in its interpreter."""
    if name == "plain":
        return adam_step_reference
    if name == "triton":
        pytest.importorskip("triton")
        if torch.cuda.is_available():
            pytest.skip("interpreted only without a GPU; test_on_a_gpu runs it on one")
        return _on_gpu
    assert supports(torch.zeros(1))
    return _on_cpu


def gradients(n: int, steps: int, spread: float = 2.0) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    sizes = torch.randn(n, generator=chance).mul(spread).exp()
    return [torch.randn(n, generator=chance) * sizes * 1e-3 for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("form", ["numba", "plain", "triton"])
@example(8, 7, 0.0, 3, 0.5, 0.0, 0.0, 0.0, False)  # v is the square of g, so steps and parameters reach 150
@settings(max_examples=25, deadline=None)
@given(
    bits=st.sampled_from([8, 4]), blocks=st.integers(1, 9), spread=st.floats(0, 5), step=st.integers(1, 3),
    beta1=st.sampled_from([0.0, 0.5, 0.9, 0.99]), beta2=st.sampled_from([0.0, 0.9, 0.999, 0.99999]),
    eps=st.sampled_from([0.0, 1e-8, 1e-3]), decay=st.sampled_from([0.0, 0.1]), decoupled=st.booleans(),
)  # fmt: skip
def test_a_step_equals_float64(
    form: str, bits: int, blocks: int, spread: float, step: int, beta1: float, beta2: float, eps: float, decay: float,
    decoupled: bool,
) -> None:  # fmt: skip
    n, moments = blocks * BLOCK, empty_moments(blocks * BLOCK, bits)
    p = torch.randn(n, generator=torch.Generator().manual_seed(0))
    step_of = form_of(form)
    for t, grad in enumerate(gradients(n, step, spread), 1):
        before = p.double().numpy().copy(), *(x.double().numpy() for x in dequantize(moments, bits))
        step_of(p, grad, moments, bits, AdamStep(1e-2, beta1, beta2, eps, decay, decoupled, t))
        divisor = 1.0 if bits == 8 else 1 + 0.05 * (1 - 0.97**t)
        exact, _, v = adam(*before, grad.numpy(), t, 1e-2, beta1, beta2, eps, decay, decoupled, divisor)
        rounding = 2.0**-23 * np.maximum(np.abs(before[0]), np.abs(exact))  # rounding of the float32 parameter
        error = np.abs(p.double().numpy() - exact)
        assert (error <= 2e-4 * np.abs(exact - before[0]) + rounding + 1e-6).all()
        roots = np.sqrt(dequantize(moments, bits)[1].double().numpy())
        assert ((roots > 0) == (np.sqrt(v) > 1e-22)).all()


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize(("form", "blocks"), [("numba", 1), ("numba", 257), ("triton", 1), ("triton", 67)])
def test_the_kernels_find_the_codes_of_plain_torch(form: str, bits: int, blocks: int) -> None:
    n, step_of = blocks * BLOCK, form_of(form)
    p = [torch.ones(n), torch.ones(n)]
    held = [empty_moments(n, bits), empty_moments(n, bits)]
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-42, 0.0, 1e30])
    for number, grad in enumerate(gradients(n, 5), 1):
        if number == 2:
            grad[: BLOCK // 2] = 0
        if number == 4 and blocks > 60:
            grad[torch.arange(6) * 10 * BLOCK] = special
        step = AdamStep(**SETTINGS, decoupled=True, step=number)
        step_of(p[0], grad, held[0], bits, step)
        adam_step_reference(p[1], grad, held[1], bits, step)
        # The last bit of a square root changes a few codes.
        assert (held[0].ratio != held[1].ratio).float().mean() < 1e-3
        assert (held[0].root != held[1].root).float().mean() < 1e-3
        assert torch.equal(held[0].root_range[:, :2], held[1].root_range[:, :2])
        same = (held[0].root == held[1].root).view(blocks, -1).all(1)
        assert same.float().mean() > 0.9
        shifts = [one.root_range[same, 2].int() for one in held]
        assert (shifts[0] - shifts[1]).abs().max() <= 1
        torch.testing.assert_close(held[0].ratio_scale, held[1].ratio_scale, rtol=1e-6, atol=0)
        torch.testing.assert_close(*p, rtol=1e-6, atol=5e-7, equal_nan=True)
        for mine, theirs in zip(held[0], held[1], strict=True):
            mine.copy_(theirs)
        p[0].copy_(p[1])
    assert p[0].isnan().sum() == (3 if blocks > 60 else 0), "NaN and both infinities, and nothing else in their blocks"


@pytest.mark.parametrize("bits", [8, 4])
@settings(max_examples=25, deadline=None)
@given(
    seed=st.integers(0, 2**16), beta1=st.sampled_from([0.5, 0.9, 0.99]), beta2=st.sampled_from([0.9, 0.99, 0.999]),
    kind=st.sampled_from(["spikes", "growing", "one sign", "pauses"]),
)  # fmt: skip
def test_no_step_exceeds_adams_bound(bits: int, seed: int, beta1: float, beta2: float, kind: str) -> None:
    chance, n = torch.Generator().manual_seed(seed), 4 * BLOCK
    sizes, moments = torch.randn(n, generator=chance).mul(4).exp(), empty_moments(4 * BLOCK, bits)
    for t in range(1, 60):
        grad = torch.randn(n, generator=chance) * sizes
        if kind == "spikes":
            grad *= 10 ** (3 * (torch.rand(n, generator=chance) > 0.95).float())
        elif kind == "growing":
            grad *= 1.5**t
        elif kind == "one sign":
            grad = sizes.clone()
        else:
            grad *= torch.rand(n, generator=chance) > 0.9
        p = torch.zeros(n)
        adam_step(p, grad, moments, bits, AdamStep(1.0, beta1, beta2, 0.0, 0.0, True, t))
        steps = torch.where(dequantize(moments, bits)[1] > 0, p, 0.0)  # 0 / 0 before the first gradient
        assert steps.abs().max() <= 1.001 * bound(t, beta1, beta2)


@pytest.mark.parametrize(("bits", "largest_bias"), [(8, 0.025), (4, 0.35)])
def test_rounding_does_not_add_up_over_thousands_of_steps(bits: int, largest_bias: float) -> None:
    """Steps stay as large as Adam's. Without the shift, 4-bit roots become 30 times too large."""
    chance, n, steps = torch.Generator().manual_seed(1), 8 * BLOCK, 3000
    sizes = torch.randn(n, generator=chance).mul(0.4).exp()
    moments, found, exact = empty_moments(n, bits), [], []
    m, v = np.zeros(n), np.zeros(n)
    for t in range(1, steps + 1):
        grad, p = torch.randn(n, generator=chance) * sizes, torch.zeros(n)
        adam_step(p, grad, moments, bits, AdamStep(1.0, 0.9, 0.999, 1e-8, 0.0, True, t))
        step, m, v = adam(np.zeros(n), m, v, grad.numpy(), t, 1.0, 0.9, 0.999, 1e-8, 0.0, True)
        found.append(np.linalg.norm(p.numpy()))
        exact.append(np.linalg.norm(step))
    root = np.sqrt(dequantize(moments, bits)[1].double().numpy())
    assert abs((root / np.sqrt(v) - 1).mean()) <= largest_bias
    assert 0.85 <= sum(found[-200:]) / sum(exact[-200:]) <= 1.25


def test_any_number_of_threads_gives_the_same() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            n = 300 * 256
            p, moments = torch.ones(n), empty_moments(n, 8)
            for number, grad in enumerate(gradients(n, 2), 1):
                adam_step(p, grad, moments, 8, AdamStep(**SETTINGS, decoupled=True, step=number))
            found.append((p, *moments))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [8, 4])
def test_on_a_gpu(bits: int) -> None:
    n = 67 * BLOCK
    states = [(torch.ones(n, device=d), Moments(*(t.to(d) for t in empty_moments(n, bits)))) for d in ("cpu", "cuda")]
    assert supports(states[1][0])
    for number, grad in enumerate(gradients(n, 4), 1):
        for p, moments in states:
            adam_step(p, grad.to(p.device), moments, bits, AdamStep(**SETTINGS, decoupled=True, step=number))
        torch.testing.assert_close(states[1][0].cpu(), states[0][0], rtol=1e-5, atol=5e-5)
        for mine, theirs in zip(states[1][1], states[0][1], strict=True):
            if mine.dtype == torch.uint8:
                assert (mine.cpu() != theirs).float().mean() < 1e-2
            mine.copy_(theirs)
