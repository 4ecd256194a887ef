"""Block-wise Adam in float64, one value after the other, written from the papers and without the package's code.

Dettmers et al., ICLR 2022, section 2.1 and appendix; Li, Chen, Zhu, NeurIPS 2023, sections 3.2 and 4; Loshchilov,
Hutter, ICLR 2019, algorithm 2.
"""

from __future__ import annotations

from itertools import pairwise

import numpy as np


def dynamic_code(fraction_bits_of: list[int], signed: bool) -> np.ndarray:
    """Decades from the largest down, each cut into 2^bits parts of which the middle is the value; and 0 and 1."""
    positive = []
    for decade, bits in enumerate(fraction_bits_of):
        edges = np.linspace(0.1, 1, 2**bits + 1) * 10.0**-decade
        positive += [(a + b) / 2 for a, b in pairwise(edges)]
    negative = [-x for x in positive] if signed else []
    return np.sort(np.array([*negative, 0.0, *positive, 1.0]))


CODES = {
    (8, True): dynamic_code([6, 5, 4, 3, 2, 1, 0], True),
    (8, False): dynamic_code([7, 6, 5, 4, 3, 2, 1], False),
    (4, True): dynamic_code([2, 1, 0], True),
    (4, False): np.arange(1, 17) / 16,
}


def rounded(x: np.ndarray, bits: int, signed: bool, size: int) -> np.ndarray:
    """The values that quantized x has, by the nearest of all codes."""
    out = np.empty_like(x)
    for start in range(0, len(x), size):
        block = x[start : start + size]
        scale = max(np.abs(block).max(), 1e-12)
        code = CODES[bits, signed]
        nearest = np.abs(block[:, None] / scale - code).argmin(1)
        out[start : start + size] = code[nearest] * scale
    return out


class Reference:
    """AdamW (Adam if not `decoupled`) whose moments are rounded after each step."""

    def __init__(self, p: np.ndarray, bits: int, size: int, decoupled: bool) -> None:
        self.p, self.bits, self.size, self.decoupled = p.astype(np.float64), bits, size, decoupled
        self.m, self.v, self.t = np.zeros_like(self.p), np.zeros_like(self.p), 0

    def step(self, g: np.ndarray, lr: float, beta1: float, beta2: float, eps: float, decay: float) -> None:
        """One step with gradient g."""
        self.t += 1
        g = g.astype(np.float64)
        if self.decoupled:
            self.p = self.p - lr * decay * self.p
        else:
            g = g + decay * self.p
        m = beta1 * self.m + (1 - beta1) * g
        v = beta2 * self.v + (1 - beta2) * g**2
        m_hat, v_hat = m / (1 - beta1**self.t), v / (1 - beta2**self.t)
        self.p = self.p - lr * m_hat / (np.sqrt(v_hat) + eps)
        self.m, self.v = rounded(m, self.bits, True, self.size), rounded(v, self.bits, False, self.size)
