"""The matrices of the projections: small constants, built once per grid in float64 with NumPy.

A projection is a pair of matrices over the L = H·W positions of a token grid. `analysis` (R × L) maps positions to R
coefficients, and the transpose of `synthesis` (R × L) maps coefficients back. The two matrices are equal and have
orthonormal rows, except for the published padding, which analyzes a reflected map and crops the synthesized map.

Source: LBP-WHT (Yang et al., NeurIPS 2023), Equations 3 to 9. Padding and projection are linear, so that one matrix
represents both.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

Grid = tuple[int, int]
Pairs = tuple[tuple[int, int], ...]

BLOCK = 8  # order of the paper's WHT; maps are divided into blocks of 8×8 positions


def walsh(n: int = BLOCK) -> np.ndarray:
    """Return the sequency-ordered Walsh–Hadamard matrix of ±1 for a power of two n. Row k changes sign k times."""
    h = np.ones((1, 1))
    while h.shape[0] < n:
        h = np.block([[h, h], [h, -h]])
    assert h.shape[0] == n, n
    return h[np.argsort((np.diff(h, axis=1) != 0).sum(1))]


def low_pass_l1(order: int) -> Pairs:
    """Return LP_L1-r for r from 1 to 15: the sequencies (i, j) with i + j ≤ r − 1, lowest first (Equation 8)."""
    return lowest_first(p for p in np.ndindex(BLOCK, BLOCK) if sum(p) <= order - 1)


def low_pass_linf(order: int) -> Pairs:
    """Return LP_L∞-r for r from 1 to 8: the sequencies (i, j) with max(i, j) ≤ r − 1, lowest first (Equation 9)."""
    return lowest_first(p for p in np.ndindex(BLOCK, BLOCK) if max(p) <= order - 1)


def lowest_first(pairs: Iterable[tuple[int, int]]) -> Pairs:
    """Sort pairs of sequencies into their canonical order, starting with the constant (0, 0)."""
    return tuple(sorted(pairs, key=lambda p: (sum(p), p)))


def pad_before_after(size: int) -> tuple[int, int]:
    """Return the numbers of rows that pad an axis to a multiple of 8, before and after it (1 and 0 for 7 positions)."""
    pad = -size % BLOCK
    return (pad + 1) // 2, pad // 2


def padded_axis(size: int, reflect: bool) -> np.ndarray:
    """Return the padding of an axis as a matrix (padded size × size), with mirrored rows if `reflect`, or else zeros.

    Raises:
        ValueError: If the axis has fewer rows than the reflection requires.
    """
    before, after = pad_before_after(size)
    if reflect and before >= size:
        raise ValueError(
            f"padding=reflect requires {before} mirrored rows, but an axis of {size} positions has {size - 1}; use"
            " padding=ortho or padding=zero"
        )
    matrix = np.eye(before + size + after, size, -before)
    if reflect:
        for k in range(before):
            matrix[k, before - k] = 1
        for k in range(after):
            matrix[before + size + k, size - 2 - k] = 1
    return matrix


@dataclass(frozen=True, eq=False)
class Tile:
    """The part of a projection over some positions of the map.

    Attributes:
        positions: Ascending positions, (l,).
        analysis: Matrix, (r, l).
        synthesis: Matrix, (r, l). If both matrices are equal, it is the same object as `analysis`.
    """

    positions: np.ndarray
    analysis: np.ndarray
    synthesis: np.ndarray


def wht_tiles(grid: Grid, pairs: Pairs, padding: str) -> list[Tile]:
    """Build the block-wise WHT of a map, with one tile for each 8×8 block, row by row.

    The grid is padded to multiples of 8 and divided into blocks, which share their bases. With the ±1 matrix H, the
    rows are H/8, so that ĝᵀx̂ and H_Iᵀ(ĝw)/64 of the paper need no further factor.

    Args:
        grid: Size of the map, (H, W).
        pairs: Selected sequencies (i, j).
        padding: ``zero``, ``reflect`` or ``ortho``. ``reflect`` is the published padding: the synthesized map is
            cropped, so that rows are not orthonormal, and a tile may overlap its neighbor. ``ortho`` uses an
            orthonormal basis of the span of each block's cropped rows, which is an orthogonal projector on every grid,
            without vanishing directions.

    Raises:
        ValueError: If an axis of the grid has fewer rows than the reflection requires.
    """
    h, width = walsh(), grid[1]
    crop_y, crop_x = (padded_axis(n, reflect=False) for n in grid)
    pad_y, pad_x = (padded_axis(n, reflect=padding == "reflect") for n in grid)
    tiles = []
    for y in range(0, len(crop_y), BLOCK):
        for x in range(0, len(crop_x), BLOCK):
            by, bx = slice(y, y + BLOCK), slice(x, x + BLOCK)
            rows, columns = (np.flatnonzero(a.any(0)) for a in (pad_y[by] + crop_y[by], pad_x[bx] + crop_x[bx]))

            def block(axis_y: np.ndarray, axis_x: np.ndarray, rows=rows, columns=columns) -> np.ndarray:
                ty, tx = h @ axis_y[:, rows] / BLOCK, h @ axis_x[:, columns]
                return np.stack([np.outer(ty[i], tx[j]).reshape(-1) for i, j in pairs])

            positions = (rows[:, None] * width + columns).reshape(-1)
            synthesis = block(crop_y[by], crop_x[bx])
            if padding == "ortho":
                synthesis = orthonormal_rows(synthesis)
            analysis = block(pad_y[by], pad_x[bx]) if padding == "reflect" else synthesis
            tiles.append(Tile(positions, analysis, synthesis))
    return tiles


def dct_tiles(grid: Grid, sizes: tuple[list[int], list[int]], count: int) -> list[Tile]:
    """Build a low-pass DCT of a map that is divided into rectangles.

    The rows are distributed over the rectangles by area, with at least one row each.

    Args:
        grid: Size of the map, (H, W).
        sizes: Heights and widths of the rectangles, which sum to H and W.
        count: Number of rows over all tiles, from the number of tiles to H·W.
    """
    cuts = [np.split(np.arange(n), np.cumsum(s)[:-1]) for n, s in zip(grid, sizes, strict=True)]
    areas = [len(rows) * len(columns) for rows in cuts[0] for columns in cuts[1]]
    assert len(areas) <= count <= sum(areas), (grid, sizes, count)
    free, room = count - len(areas), max(1, sum(areas) - len(areas))  # every tile has at least one row, its mean
    shares = [1 + free * (a - 1) / room for a in areas]
    counts = [int(s) for s in shares]
    by_remainder = sorted(range(len(areas)), key=lambda k: (counts[k] - shares[k], k))
    for k in by_remainder[: count - sum(counts)]:
        counts[k] += 1
    tiles = []
    for k, (rows, columns) in enumerate((r, c) for r in cuts[0] for c in cuts[1]):
        matrix = dct_rows((len(rows), len(columns)), counts[k])
        tiles.append(Tile((rows[:, None] * grid[1] + columns).reshape(-1), matrix, matrix))
    return tiles


def dense(tiles: list[Tile], positions: int) -> Tile:
    """Combine tiles into one tile over all `positions`, with rows in the order of the tiles."""

    def spread(matrices: list[np.ndarray]) -> np.ndarray:
        full = np.zeros((sum(map(len, matrices)), positions))
        start = 0
        for tile, matrix in zip(tiles, matrices, strict=True):
            full[start : start + len(matrix), tile.positions] = matrix
            start += len(matrix)
        return full

    analysis = spread([t.analysis for t in tiles])
    equal = all(t.synthesis is t.analysis for t in tiles)
    return Tile(np.arange(positions), analysis, analysis if equal else spread([t.synthesis for t in tiles]))


def disjoint(tiles: list[Tile], positions: int) -> list[Tile]:
    """Merge tiles that share positions, so that every position belongs to one tile."""
    owner = np.full(positions, -1)
    groups: dict[int, list[int]] = {}
    for k, tile in enumerate(tiles):
        groups[k] = [k]
        for other in {int(o) for o in owner[tile.positions] if o >= 0}:
            groups[k] = groups.pop(other) + groups[k]
        for member in groups[k]:
            owner[tiles[member].positions] = k
    merged = []
    for members in groups.values():
        if len(members) == 1:
            merged.append(tiles[members[0]])
            continue
        union = np.unique(np.concatenate([tiles[m].positions for m in members]))
        local = [
            Tile(np.searchsorted(union, tiles[m].positions), tiles[m].analysis, tiles[m].synthesis) for m in members
        ]
        one = dense(local, len(union))
        merged.append(Tile(union, one.analysis, one.synthesis))
    return merged


def orthonormal_rows(matrix: np.ndarray, tolerance: float = 1e-9) -> np.ndarray:
    """Return an orthonormal basis of the row span in the order of the rows, without rows that depend on earlier rows.

    The Gram–Schmidt process runs twice. It returns orthonormal rows unchanged, and the first row stays constant. A
    singular value decomposition would mix the rows.
    """
    basis = np.zeros((0, matrix.shape[1]))
    for row in matrix:
        rest = row - basis.T @ (basis @ row)
        rest -= basis.T @ (basis @ rest)
        norm = float(np.linalg.norm(rest))
        if norm > tolerance * max(1.0, float(np.linalg.norm(row))):
            basis = np.vstack([basis, rest / norm])
    return basis


def dct_rows(grid: Grid, count: int) -> np.ndarray:
    """Return the `count` lowest orthonormal DCT-II rows of a map (count × L), by (i/H)² + (j/W)² and then by (i, j)."""
    height, width = grid
    cy, cx = _dct(height), _dct(width)
    order = sorted(
        ((i, j) for i in range(height) for j in range(width)),
        # The keys are integers, since ties of floating-point keys would depend on rounding.
        key=lambda p: ((p[0] * width) ** 2 + (p[1] * height) ** 2, p),
    )
    return np.stack([np.outer(cy[i], cx[j]).reshape(-1) for i, j in order[:count]])


def _dct(n: int) -> np.ndarray:
    k, x = np.arange(n)[:, None], np.arange(n)[None]
    matrix = np.cos(math.pi * (2 * x + 1) * k / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def block_energy(x_BHWC: Tensor) -> Tensor:
    """Compute the energy of a map in each Walsh–Hadamard basis, (8, 8) float32 by sequency (i, j).

    The energy is the sum of the squared coefficients over images, blocks and channels. The map is zero-padded, so that
    the energies of all 64 bases sum to the energy of the map (Parseval).
    """
    (top, bottom), (left, right) = pad_before_after(x_BHWC.shape[1]), pad_before_after(x_BHWC.shape[2])
    x = F.pad(x_BHWC.float(), (0, 0, left, right, top, bottom))
    h = torch.from_numpy(walsh()).to(x) / BLOCK**0.5
    x = x.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))  # B, h, 8, w, 8, C
    coefficients = torch.einsum("iy,byxc->bixc", h, x.movedim(3, 1).flatten(0, 2).flatten(2).unflatten(2, (BLOCK, -1)))
    coefficients = torch.einsum("jx,bixc->bijc", h, coefficients)
    return coefficients.square().sum((0, 3))
