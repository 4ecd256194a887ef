"""Seeds from counters: what is drawn in a step depends on the step alone, so that resumed runs and all ranks agree."""

from __future__ import annotations

import torch


def seed_of(*counters: int) -> int:
    """A 64-bit seed from counters (seed, rank, batch …): splitmix64, so that neighbours share nothing."""
    state = 0
    for counter in counters:
        state = (state ^ counter) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the generators a step draws from: the CPU's and that of `device`.

    Not `torch.manual_seed`, which queues a seed for every kind of accelerator, with a stack trace, at each call: half a
    millisecond.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def generator_of(*counters: int) -> torch.Generator:
    """A generator of the CPU that starts from the seed of the counters."""
    return torch.Generator().manual_seed(seed_of(*counters))
