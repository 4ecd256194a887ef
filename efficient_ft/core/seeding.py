"""Counter-based seeds. Random choices depend only on the seed and the step. Therefore, resumed runs and all ranks make
the same choices.
"""

from __future__ import annotations

import torch


def seed_of(*counters: int) -> int:
    """Return a 64-bit seed that is computed from counters (seed, rank, batch, ...).

    The hash function splitmix64 (Steele, Lea, Flood, OOPSLA 2014) is applied to each counter in turn. Therefore, the
    seeds of neighboring counters are independent.
    """
    state = 0
    for counter in counters:
        state = (state ^ counter) + 0x9E3779B97F4A7C15 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & 0xFFFFFFFFFFFFFFFF
        state = (state ^ state >> 27) * 0x94D049BB133111EB & 0xFFFFFFFFFFFFFFFF
        state ^= state >> 31
    return state


def seed_step(seed: int, device: torch.device) -> None:
    """Seed the generators of the CPU and of `device`.

    This function is faster than `torch.manual_seed`, which takes half a millisecond because it queues a seed and a
    stack trace for each type of accelerator.
    """
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        torch.cuda.manual_seed(seed)
    elif device.type == "mps":
        torch.mps.manual_seed(seed)


def generator_of(*counters: int) -> torch.Generator:
    """Create a CPU generator with the seed `seed_of(*counters)`."""
    return torch.Generator().manual_seed(seed_of(*counters))
