"""Tests of the energies of the 64 bases against explicit projections."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st

from efficient_ft.ops.projection import block_energy
from tests.ops import reference


@given(st.integers(1, 17), st.integers(1, 17), st.integers(1, 3))
def test_energies_equal_explicit_coefficients_and_add_up(height, width, channels):
    x = torch.randn(2, height, width, channels, generator=torch.Generator().manual_seed(height))
    every = [(i, j) for i in range(8) for j in range(8)]
    expected = np.zeros(64)
    for image in x.double().numpy():
        c = reference.coefficients(image, every, "zero") / 8
        expected += (c.reshape(-1, 64, channels) ** 2).sum((0, 2))
    energy = block_energy(x)
    np.testing.assert_allclose(energy.numpy().reshape(64), expected, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(energy.sum().item(), x.double().square().sum().item(), rtol=1e-5)
