"""A step of Adam over block-wise moments: against float64, and the kernel against plain torch."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from efficient_ft.ops.blockwise import BLOCK, AdamStep, Moment, adam_step, dequantize, kernels
from efficient_ft.ops.blockwise.update import adam_step_reference
from tests.ops.blockwise.reference import Reference, rounded

SETTINGS = {"lr": 1e-2, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.1}
STEPS = {"kernel": adam_step, "plain torch": adam_step_reference}


def moments(n: int, bits: int) -> tuple[Moment, Moment]:
    one, other = (
        Moment(torch.zeros(n * bits // 8, dtype=torch.uint8), torch.zeros(n // BLOCK[bits])) for _ in range(2)
    )
    return one, other


def gradients(n: int, steps: int) -> list[torch.Tensor]:
    chance = torch.Generator().manual_seed(1)
    sizes = torch.randn(n, generator=chance).mul(2).exp()
    return [torch.randn(n, generator=chance) * sizes * 1e-3 for _ in range(steps)]


@pytest.mark.slow
@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("form", STEPS)
def test_equals_float64(form: str, bits: int, decoupled: bool) -> None:
    assert kernels.supports(torch.zeros(1))
    n = 40 * BLOCK[bits]
    p = torch.randn(n, generator=torch.Generator().manual_seed(0))
    expected = Reference(p.numpy(), bits, BLOCK[bits], decoupled)
    held = moments(n, bits)
    for number, grad in enumerate(gradients(n, 4), 1):
        before = expected.p.copy()
        STEPS[form](p, grad, *held, bits, AdamStep(**SETTINGS, decoupled=decoupled, step=number))
        expected.step(grad.numpy(), SETTINGS["lr"], 0.9, 0.99, 1e-8, 0.1)
        # A value at a midpoint may be rounded the other way in float32; no other differs.
        moved, found = expected.p - before, p.double().numpy() - before
        apart = np.abs(found - moved) > 1e-4 * np.abs(moved) + 1e-6
        assert apart.mean() < 2e-3
        expected.p = p.double().numpy()


@pytest.mark.parametrize("bits", [8, 4])
def test_the_state_is_the_rounded_moment(bits: int) -> None:
    n = 20 * BLOCK[bits]
    (grad,), held = gradients(n, 1), moments(n, bits)
    adam_step(torch.zeros(n), grad, *held, bits, AdamStep(**SETTINGS, decoupled=True, step=1))
    g = grad.double().numpy()
    for moment, exact, signed in ((held[0], 0.1 * g, True), (held[1], 0.01 * g**2, False)):
        found = dequantize(*moment, bits, signed).double().numpy()
        expected = rounded(exact, bits, signed, BLOCK[bits])
        assert (~np.isclose(found, expected, rtol=1e-5, atol=0)).mean() < 2e-3


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("blocks", [1, 3, 64, 257])
def test_the_kernel_finds_the_codes_of_plain_torch(bits: int, blocks: int) -> None:
    n = blocks * BLOCK[bits]
    p = [torch.ones(n), torch.ones(n)]
    held = [moments(n, bits), moments(n, bits)]
    special = torch.tensor([float("nan"), float("inf"), -float("inf"), 1e-42, 0.0, 1e30])
    for number, grad in enumerate(gradients(n, 5), 1):
        if number == 2:
            grad[: BLOCK[bits] // 2] = 0
        if number == 4 and blocks > 60:
            grad[torch.arange(6) * 10 * BLOCK[bits]] = special
        step = AdamStep(**SETTINGS, decoupled=True, step=number)
        adam_step(p[0], grad, *held[0], bits, step)
        adam_step_reference(p[1], grad, *held[1], bits, step)
        for found, expected in zip(held[0], held[1], strict=True):
            assert torch.equal(found.codes, expected.codes)
            torch.testing.assert_close(found.scale, expected.scale, rtol=0, atol=0, equal_nan=True)
        torch.testing.assert_close(*p, rtol=1e-6, atol=5e-7, equal_nan=True)
    assert p[0].isnan().any() == (blocks > 60)


def test_any_number_of_threads_gives_the_same() -> None:
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            n = 300 * 256
            p, held = torch.ones(n), moments(n, 8)
            for number, grad in enumerate(gradients(n, 2), 1):
                adam_step(p, grad, *held, 8, AdamStep(**SETTINGS, decoupled=True, step=number))
            found.append((p, *held[0], *held[1]))
    finally:
        torch.set_num_threads(threads)
    assert all(torch.equal(a, b) for others in found[1:] for a, b in zip(found[0], others, strict=True))
