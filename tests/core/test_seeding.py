"""Tests of seeds derived from counters."""

from __future__ import annotations

import torch

from efficient_ft.core.seeding import seed_of


def test_seeds_differ_and_stay():
    seeds = {seed_of(seed, rank, batch) for seed in range(3) for rank in range(3) for batch in range(100)}
    assert len(seeds) == 900
    assert seed_of(1, 2, 3) == seed_of(1, 2, 3)
    torch.manual_seed(seed_of(2**32 - 1, 7, 10**9))  # torch accepts seeds of 64 bits
