"""Adam in float64, and the values that block-wise codes can have, written without the package's code.

Kingma, Ba, ICLR 2015, algorithm 1; Loshchilov, Hutter, ICLR 2019, algorithm 2.
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
    """Return the parameter and the moments after step t, all float64; the root of v is multiplied by `divisor`."""
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
    """Return the largest step that Adam can take in step t, divided by the learning rate (Cauchy–Schwarz)."""
    terms = sum((beta1**2 / beta2) ** k for k in range(t))
    ratio = (1 - beta1) / math.sqrt(1 - beta2) * math.sqrt(terms)
    return ratio / (1 - beta1**t) * math.sqrt(1 - beta2**t)


def neighbors(x: np.ndarray, values: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the nearest of the ascending values at most x, and at least x."""
    below = np.searchsorted(values, x, side="right") - 1
    above = np.searchsorted(values, x, side="left")
    return values[np.clip(below, 0, len(values) - 1)], values[np.clip(above, 0, len(values) - 1)]


def ratio_values(largest: float, bits: int) -> np.ndarray:
    """Return the ratios that a block with this largest magnitude can hold: signed squares."""
    codes = np.arange(-(2 ** (bits - 1)) + 1, 2 ** (bits - 1))
    return np.sign(codes) * largest * (codes / codes[-1]) ** 2


def without_shift(roots: np.ndarray, range_: np.ndarray, bits: int) -> np.ndarray:
    """Return the roots at the codes of one block, from decoded ones: these are shifted by a share of the distance."""
    distance = int(range_[1]) * {8: 256, 4: 4096}[bits]
    integers = roots.astype(np.float32).view(np.int32).astype(np.int64) - int(int(range_[2]) * distance / 2**14)
    return np.where(roots > 0, integers.astype(np.int32).view(np.float32).astype(np.float64), 0)


def root_values(roots: np.ndarray, bits: int) -> np.ndarray:
    """Return the positive roots that a block can hold: equally spaced in the float32 numbers of its range."""
    positive = roots[roots > 0].astype(np.float32).view(np.int32).astype(np.int64)
    if not positive.size:
        return np.zeros(1)
    low, unit, steps = positive.min() // 65536 * 65536, {8: 256, 4: 4096}[bits], 2**bits - 2
    distance = max(1, -(-(positive.max() - low) // (unit * steps))) * unit
    return (low + np.arange(steps + 1) * distance).astype(np.int32).view(np.float32).astype(np.float64)
