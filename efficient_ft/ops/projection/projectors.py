"""Projectors: rules that select the projection for a grid.

A projector is a small hashable object. Projections are built once per (projector, grid, prefix) and shared by all
layers. Copies and pickles of a model therefore do not contain projections.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from efficient_ft.ops.projection.projection import DENSE_LIMIT, Projection, SubsetProjection
from efficient_ft.ops.projection.transforms import Grid, Pairs, Tile, dct_tiles, low_pass_l1, wht_tiles

Padding = Literal["ortho", "zero", "reflect"]


class Projector(Protocol):
    """Protocol of the rules that select the projection for a grid and a layer's channels."""

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection for maps of `grid` after `prefix` tokens, in a layer with (C_in, C_out) channels.

        Raises:
            ValueError: If maps of this grid cannot be projected.
        """
        ...


def backward_flops(projection: Projection | SubsetProjection, channels: tuple[int, int]) -> tuple[int, int]:
    """Return the executed FLOPs per image of g_w and g_x of a linear layer: exact, and low-rank with projections."""
    c_in, c_out = channels
    exact = 4 * c_in * c_out * projection.tokens
    return exact, 4 * c_in * c_out * projection.rank + projection.flops * (2 * c_in + c_out)


@dataclass(frozen=True)
class WalshProjector:
    """Block-wise Walsh–Hadamard bases (LBP-WHT, Equations 6 to 9).

    Attributes:
        pairs: Sequencies (i, j) that are used in every 8×8 block.
        padding: Padding of the grid, ``ortho``, ``zero`` or ``reflect``. See `transforms.wht_tiles`.
    """

    pairs: Pairs
    padding: Padding = "ortho"

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection for maps of `grid`, which does not depend on `channels`.

        Raises:
            ValueError: If an axis is too short for reflection.
        """
        return _walsh_projection(self, grid, prefix)


@dataclass(frozen=True)
class CosineProjector:
    """Low-pass DCT-II rows. The orthonormalized WHT of an LP_L1 order on the same grid determines the number of rows.

    Grids of up to 256 positions use a single transform. Larger grids use tiles of 16² or 14² if their executed FLOPs,
    including projections, do not exceed the FLOPs of the zero-padded WHT. Otherwise, they use tiles of about 8².

    Attributes:
        order: Order of the LP_L1 selection, from 1 to 15.
    """

    order: int

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection for maps of `grid`. See `Projector.projection`."""
        if grid[0] * grid[1] <= DENSE_LIMIT:
            return _cosine_projection(self, grid, prefix, None)
        wht = WalshProjector(low_pass_l1(self.order), "zero")
        budget = backward_flops(_walsh_projection(wht, grid, 0), channels)[1]
        for side in (16, 14):
            if all(n % side == 0 for n in grid):
                large = _cosine_projection(self, grid, prefix, side)
                if backward_flops(large, channels)[1] <= budget:
                    return large
        return _cosine_projection(self, grid, prefix, 8)


@lru_cache(maxsize=256)
def _walsh_projection(projector: WalshProjector, grid: Grid, prefix: int) -> Projection:
    return Projection.from_tiles(wht_tiles(grid, projector.pairs, projector.padding), grid, prefix)


@lru_cache(maxsize=256)
def _cosine_projection(projector: CosineProjector, grid: Grid, prefix: int, side: int | None) -> Projection:
    sizes = ([grid[0]], [grid[1]]) if side is None else (_cut(grid[0], side), _cut(grid[1], side))
    count = sum(len(t.analysis) for t in wht_tiles(grid, low_pass_l1(projector.order), "ortho"))
    tiles: list[Tile] = dct_tiles(grid, sizes, count)
    return Projection.from_tiles(tiles, grid, prefix)


def _cut(n: int, side: int) -> list[int]:
    """Divide n into near-equal pieces of at most `side`."""
    pieces = -(-n // side)
    return [n // pieces + (k < n % pieces) for k in range(pieces)]
