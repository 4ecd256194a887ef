"""The maths of the projections: small constant matrices, built once per grid in float64, NumPy only.

A projection is a pair of matrices over the L = H·W positions of a token grid: `analysis` (R × L) takes a map to R
coefficients, `synthesis` (R × L) takes coefficients back by its transpose. They are equal, with orthonormal rows, for
everything but the published padding, which analyses a reflected map and crops what it synthesises.

Source: LBP-WHT (Yang et al., NeurIPS 2023), Eq. 3–9. Padding and projection are linear, so both are one matrix.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np

Grid = tuple[int, int]
Pairs = tuple[tuple[int, int], ...]

BLOCK = 8  # the order of the paper's WHT: maps are cut into blocks of 8×8 positions


def walsh(n: int = BLOCK) -> np.ndarray:
    """Sequency-ordered Walsh–Hadamard matrix, n × n, entries ±1: row k changes sign k times. n is a power of two."""
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    assert h.shape[0] == n, n
    return h[np.argsort((np.diff(h, axis=1) != 0).sum(1))]


def low_pass_l1(order: int) -> Pairs:
    """LP_L1-r: the pairs (i, j) of sequencies with i + j ≤ r − 1, lowest first (Eq. 8, 0-indexed); 1 ≤ r ≤ 15."""
    return _lowest_first(lambda i, j: i + j <= order - 1)


def low_pass_linf(order: int) -> Pairs:
    """LP_L∞-r: the pairs (i, j) with max(i, j) ≤ r − 1, lowest first (Eq. 9, 0-indexed); 1 ≤ r ≤ 8."""
    return _lowest_first(lambda i, j: max(i, j) <= order - 1)


def _lowest_first(keep: Callable[[int, int], bool]) -> Pairs:
    pairs = [(i, j) for i in range(BLOCK) for j in range(BLOCK) if keep(i, j)]
    return tuple(sorted(pairs, key=lambda p: (sum(p), p)))


def pad_before_after(size: int) -> tuple[int, int]:
    """Rows added before and after an axis of `size` positions to reach a multiple of 8 (7 → one row on top)."""
    pad = -size % BLOCK
    return (pad + 1) // 2, pad // 2


def padded_axis(size: int, reflect: bool) -> np.ndarray:
    """The padding of one axis as a matrix, padded size × size: zero rows, or copies of the mirrored rows.

    Raises:
        ValueError: the reflection would reach beyond the axis.
    """
    before, after = pad_before_after(size)
    if reflect and before >= size:
        raise ValueError(f"reflect padding needs {before} mirrored rows, but an axis of {size} has {size - 1}")
    matrix = np.eye(before + size + after, size, -before)
    if reflect:
        for k in range(before):
            matrix[k, before - k] = 1
        for k in range(after):
            matrix[before + size + k, size - 2 - k] = 1
    return matrix


def wht_blocks(grid: Grid, pairs: Pairs, padding: str) -> tuple[np.ndarray, np.ndarray]:
    """The block-wise WHT of a map as (analysis, synthesis), each R' × L, blocks row by row, `pairs` in each.

    The grid is padded to multiples of 8 and cut into 8×8 blocks; the same bases serve every block. With H the ±1
    matrix the rows are H/8, so that ĝᵀx̂ and H_Iᵀ(ĝw)/64 of the paper need no other factor.

    Args:
        grid: (H, W) of the map.
        pairs: the chosen (i, j) sequencies.
        padding: ``zero``; ``reflect`` (as published: synthesis crops, so rows are not orthonormal); ``ortho``: an
            orthonormal basis, block by block, of the span of the cropped rows (a true orthogonal projector for every
            grid; directions that vanish are dropped).
    """
    (height, width), h = grid, walsh()
    crop_y, crop_x = padded_axis(height, False), padded_axis(width, False)
    pad_y, pad_x = (padded_axis(n, padding == "reflect") for n in grid)

    def rows(axis_y: np.ndarray, axis_x: np.ndarray) -> list[np.ndarray]:
        blocks = []
        for y in range(0, axis_y.shape[0], BLOCK):
            for x in range(0, axis_x.shape[0], BLOCK):
                ty, tx = h @ axis_y[y : y + BLOCK], h @ axis_x[x : x + BLOCK]
                block = np.stack([np.outer(ty[i], tx[j]).reshape(height * width) for i, j in pairs])
                blocks.append(block / BLOCK)
        return blocks

    cropped = rows(crop_y, crop_x)
    if padding == "ortho":
        basis = np.concatenate([orthonormal_rows(b) for b in cropped])
        return basis, basis
    synthesis = np.concatenate(cropped)
    return (np.concatenate(rows(pad_y, pad_x)) if padding == "reflect" else synthesis), synthesis


def orthonormal_rows(matrix: np.ndarray, tolerance: float = 1e-9) -> np.ndarray:
    """An orthonormal basis of the row span, in the order of the rows; rows that depend on earlier ones are dropped.

    Gram–Schmidt, twice: rows that are orthonormal already come out unchanged (the first, constant one stays constant),
    which a singular value decomposition would mix.
    """
    basis = np.zeros((0, matrix.shape[1]))
    for row in matrix:
        rest = row - basis.T @ (basis @ row)
        rest -= basis.T @ (basis @ rest)
        norm = np.linalg.norm(rest)
        if norm > tolerance * max(1.0, np.linalg.norm(row)):
            basis = np.vstack([basis, rest / norm])
    return basis


def dct_rows(grid: Grid, count: int) -> np.ndarray:
    """The `count` lowest orthonormal DCT-II rows of a map, count × L, in order of (i/H)² + (j/W)², ties by (i, j)."""
    height, width = grid
    cy, cx = _dct(height), _dct(width)
    order = sorted(
        ((i, j) for i in range(height) for j in range(width)),
        # the key is compared as exact integers: floating-point ties would depend on rounding
        key=lambda p: ((p[0] * width) ** 2 + (p[1] * height) ** 2, p),
    )
    return np.stack([np.outer(cy[i], cx[j]).reshape(-1) for i, j in order[:count]])


def _dct(n: int) -> np.ndarray:
    k, x = np.arange(n)[:, None], np.arange(n)[None]
    matrix = np.cos(math.pi * (2 * x + 1) * k / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix
