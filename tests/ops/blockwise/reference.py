"""Adam in float64 and the values that block-wise codes can represent, without the package's code.

References: Kingma, Ba, ICLR 2015, algorithm 1; Loshchilov, Hutter, ICLR 2019, algorithm 2.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np

BLOCK = 128


def adam(
    p: Any,
    m: Any,
    v: Any,
    g: Any,
    t: int,
    lr: float,
    beta1: float,
    beta2: float,
    eps: float,
    decay: float,
    decoupled: bool,
    divisor: Any = 1.0,
) -> tuple[Any, Any, Any]:  # fmt: skip
    """Return the parameter and the moments after step t in float64. `divisor` multiplies the root of v."""
    p, m, v, g = (np.asarray(x, np.float64) for x in (p, m, v, g))
    if decoupled:
        p = p - lr * decay * p
    else:
        g = g + decay * p
    m = beta1 * m + (1 - beta1) * g
    v = beta2 * v + (1 - beta2) * g**2
    m_hat, v_hat = m / (1 - beta1**t), v / (1 - beta2**t)
    return p - lr * m_hat / (divisor * np.sqrt(v_hat) + eps), m, v


def bound(t: int, beta1: float, beta2: float) -> float:
    """Return the upper bound of Adam's step t, divided by the learning rate (Cauchy–Schwarz)."""
    terms = sum((beta1**2 / beta2) ** k for k in range(t))
    ratio = (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(terms)
    return ratio / (1 - beta1**t) * math.sqrt(1 - beta2**t)


def neighbors(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the largest value that is at most x, and the smallest value that is at least x. `values` is ascending."""
    below = np.searchsorted(values, x, side="right") - 1
    above = np.searchsorted(values, x, side="left")
    return values[np.clip(below, 0, len(values) - 1)], values[np.clip(above, 0, len(values) - 1)]


def ratio_values(largest: float, bits: int) -> np.ndarray:
    """Return the ratios that a block with this largest magnitude can represent: signed squares."""
    codes = np.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1))
    return np.sign(codes) * largest * (codes / codes[-1]) ** 2


def without_shift(roots: np.ndarray, range_: np.ndarray, bits: int) -> np.ndarray:
    """Return the roots at the codes of one block. Decoded roots are shifted by a fraction of the code distance."""
    distance = int(range_[1]) * {8: 256, 4: 4096}[bits]
    integers = roots.astype(np.float32).view(np.int32).astype(np.int64) - int(int(range_[2]) * distance / 2**14)
    return np.where(roots > 0, integers.astype(np.int32).view(np.float32).astype(np.float64), 0)


def root_values(roots: np.ndarray, bits: int) -> np.ndarray:
    """Return the positive roots that a block can represent: equally spaced float32 bit patterns within its range."""
    positive = roots[roots > 0].astype(np.float32).view(np.int32).astype(np.int64)
    if not positive.size:
        return np.zeros(1)
    low, unit, steps = positive.min() // 65536 * 65536, {8: 256, 4: 4096}[bits], 2**bits - 2
    distance = max(1, -(-(positive.max() - low) // (unit * steps))) * unit
    return (low + np.arange(steps + 1) * distance).astype(np.int32).view(np.float32).astype(np.float64)
