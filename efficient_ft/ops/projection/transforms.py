"""Matrices of the projections, which NumPy computes once for each grid in float64.

A projection is a pair of matrices over the L = H·W positions of a token grid. `analysis` (R × L) maps positions to R
coefficients. The transpose of `synthesis` (R × L) maps the coefficients back to positions. The two matrices are equal,
except with ``reflect`` padding: `analysis` is then applied to a reflected map, and the output of `synthesis` is
cropped. With the padding ``ortho`` and for the DCT, the rows are orthonormal.

Source: LBP-WHT (Yang et al., NeurIPS 2023), Equations 3 to 9. Padding and projection are linear, so that a single
matrix represents both.
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

BLOCK = 8  # order of the WHT in the paper, which divides maps into blocks of 8×8 positions


def walsh() -> np.ndarray:
    """Return the Walsh–Hadamard matrix (8 × 8) of ±1 whose row k changes sign k times."""
    h = np.ones((1, 1))
    while h.shape[0] < BLOCK:
        h = np.block([[h, h], [h, -h]])
    return h[np.argsort((np.diff(h, axis=1) != 0).sum(1))]


def low_pass_l1(order: int) -> Pairs:
    """Return the sequencies (i, j) with i + j ≤ r − 1 (LP_L1-r, Equation 8), lowest first. `order` is r, 1 to 15."""
    return lowest_first(p for p in np.ndindex(BLOCK, BLOCK) if sum(p) <= order - 1)


def low_pass_linf(order: int) -> Pairs:
    """Return the sequencies (i, j) with max(i, j) ≤ r − 1 (LP_L∞-r, Equation 9), lowest first. `order` is r, 1 to 8."""
    return lowest_first(p for p in np.ndindex(BLOCK, BLOCK) if max(p) <= order - 1)


def lowest_first(pairs: Iterable[tuple[int, int]]) -> Pairs:
    """Sort pairs of sequencies into their canonical order, starting with the constant (0, 0)."""
    return tuple(sorted(pairs, key=lambda p: (sum(p), p)))


def pad_before_after(size: int) -> tuple[int, int]:
    """Return how many rows are added before and after an axis to pad the axis to a multiple of 8.

    For example, an axis of 7 positions is padded with 1 row before the axis and 0 rows after the axis.
    """
    pad = -size % BLOCK
    return (pad + 1) // 2, pad // 2


def padded_axis(size: int, reflect: bool) -> np.ndarray:
    """Return a matrix (padded size × size) that pads an axis.

    The added rows are mirrored rows if `reflect` is True, and zeros otherwise.

    Raises:
        ValueError: If the axis has fewer rows than the reflection requires.
    """
    before, after = pad_before_after(size)
    if reflect and before >= size:
        raise ValueError(
            f"padding=reflect requires {before} mirrored rows, but an axis of {size} positions provides only"
            f" {size - 1}. Use padding=ortho or padding=zero"
        )
    return np.pad(np.eye(size), ((before, after), (0, 0)), "reflect" if reflect else "constant")


@dataclass(frozen=True, eq=False)
class Tile:
    """Part of a projection that covers some positions of the map.

    Attributes:
        positions: Ascending positions, (l,).
        analysis: Matrix, (r, l).
        synthesis: Matrix, (r, l). If the two matrices are equal, `synthesis` is the same object as `analysis`.
    """

    positions: np.ndarray
    analysis: np.ndarray
    synthesis: np.ndarray


def wht_tiles(grid: Grid, pairs: Pairs, padding: str) -> list[Tile]:
    """Build the block-wise WHT of a map. Each 8×8 block is one tile, and tiles are ordered row by row.

    The grid is padded to multiples of 8 and divided into blocks that share their bases. The bases are rows of H/8,
    where H is the Walsh–Hadamard matrix with entries ±1. The products ĝᵀx̂ and H_Iᵀ(ĝw)/64 of the paper therefore
    require no further scaling.

    Args:
        grid: Size of the map, (H, W).
        pairs: Selected sequencies (i, j).
        padding: ``zero``, ``reflect`` or ``ortho``. ``reflect`` is the padding that is reported for the authors'
            implementation. ``reflect`` crops the synthesized map, so that the rows are not orthonormal and neighboring
            tiles may overlap. For each block, ``ortho`` uses an orthonormal basis of the space that the cropped rows
            span. The resulting projector is orthogonal on every grid, and no direction vanishes.

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

    The rows are distributed over the rectangles in proportion to their areas. Each rectangle has at least one row.

    Args:
        grid: Size of the map, (H, W).
        sizes: Heights and widths of the rectangles. The heights sum to H, and the widths sum to W.
        count: Total number of rows of all tiles. The number must be at least the number of tiles and at most H·W.
    """
    cuts = [np.split(np.arange(n), np.cumsum(s)[:-1]) for n, s in zip(grid, sizes, strict=True)]
    areas = [len(rows) * len(columns) for rows in cuts[0] for columns in cuts[1]]
    assert len(areas) <= count <= sum(areas), (grid, sizes, count)
    # Every tile has at least one row, which computes the mean of the tile.
    free, room = count - len(areas), max(1, sum(areas) - len(areas))
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
    """Combine tiles into one tile over a map of `positions` positions. The rows are in the order of the tiles."""

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
    """Merge tiles that share positions, so that every position belongs to exactly one tile."""
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


def orthonormal_rows(matrix: np.ndarray) -> np.ndarray:
    """Return an orthonormal basis of the row span, in the order of the rows.

    Rows that depend on earlier rows are omitted. The Gram–Schmidt process runs twice for numerical accuracy.
    Orthonormal rows are returned unchanged, and a constant first row stays constant. A singular value decomposition
    would mix the rows.
    """
    basis = np.zeros((0, matrix.shape[1]))
    for row in matrix:
        rest = row - basis.T @ (basis @ row)
        rest -= basis.T @ (basis @ rest)
        norm = float(np.linalg.norm(rest))
        if norm > 1e-9 * max(1.0, float(np.linalg.norm(row))):
            basis = np.vstack([basis, rest / norm])
    return basis


def dct_rows(grid: Grid, count: int) -> np.ndarray:
    """Return the `count` lowest-frequency orthonormal DCT-II rows of a map, (count × L).

    The rows are sorted by (i/H)² + (j/W)² and then by (i, j).
    """
    height, width = grid
    cy, cx = _dct(height), _dct(width)
    order = sorted(
        ((i, j) for i in range(height) for j in range(width)),
        # The keys are integers, because rounding would decide ties of floating-point keys.
        key=lambda p: ((p[0] * width) ** 2 + (p[1] * height) ** 2, p),
    )
    return np.stack([np.outer(cy[i], cx[j]).reshape(-1) for i, j in order[:count]])


def _dct(n: int) -> np.ndarray:
    k, x = np.arange(n)[:, None], np.arange(n)[None]
    matrix = np.cos(math.pi * (2 * x + 1) * k / (2 * n)) * math.sqrt(2 / n)
    matrix[0] /= math.sqrt(2)
    return matrix


def block_energy(x_BHWC: Tensor) -> Tensor:
    """Compute the energy of a map in each Walsh–Hadamard basis, (8, 8) float32, indexed by sequency (i, j).

    The energy of a basis is the sum of its squared coefficients over images, blocks and channels. The map is
    zero-padded, so that the energies of all 64 bases sum to the energy of the map (Parseval).
    """
    (top, bottom), (left, right) = pad_before_after(x_BHWC.shape[1]), pad_before_after(x_BHWC.shape[2])
    x = F.pad(x_BHWC.float(), (0, 0, left, right, top, bottom))
    h = torch.from_numpy(walsh()).to(x) / BLOCK**0.5
    x = x.unflatten(1, (-1, BLOCK)).unflatten(3, (-1, BLOCK))  # shape (B, h, 8, w, 8, C)
    coefficients = torch.einsum("iy,byxc->bixc", h, x.movedim(3, 1).flatten(0, 2).flatten(2).unflatten(2, (BLOCK, -1)))
    coefficients = torch.einsum("jx,bixc->bijc", h, coefficients)
    return coefficients.square().sum((0, 3))
