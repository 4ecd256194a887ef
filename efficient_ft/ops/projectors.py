"""Projectors: the rule that gives a projection for a grid. One contract, of which the paper's choice is one instance.

A projector is a small hashable object; projections are built once per (projector, grid, prefix) and shared by all
layers, so that a model may be copied or pickled without them.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Literal, Protocol

from efficient_ft.ops.projection import DENSE_LIMIT, OfKept, Projection
from efficient_ft.ops.transforms import Grid, Pairs, Tile, dct_tiles, low_pass_l1, wht_tiles

Padding = Literal["ortho", "zero", "reflect"]


class Projector(Protocol):
    """(grid, channels) → projection."""

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """The projection for maps of `grid` after `prefix` tokens, in a layer of (C_in, C_out) channels."""
        ...


def backward_flops(projection: Projection | OfKept, channels: tuple[int, int]) -> tuple[int, int]:
    """Executed FLOPs per image of (exact, low-rank) g_w and g_x of a linear layer, all projections included."""
    c_in, c_out = channels
    exact = 4 * c_in * c_out * projection.tokens
    return exact, 4 * c_in * c_out * projection.rank + projection.flops * (2 * c_in + c_out)


@dataclass(frozen=True)
class WalshProjector:
    """Block-wise Walsh–Hadamard bases (LBP-WHT, Eq. 6–9).

    Attributes:
        pairs: the (i, j) sequencies kept in every 8×8 block.
        padding: ``ortho``, ``zero`` or ``reflect``; see `transforms.wht_tiles`.
    """

    pairs: Pairs
    padding: Padding = "ortho"

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        return _walsh_projection(self, grid, prefix)


@dataclass(frozen=True)
class CosineProjector:
    """Low-pass DCT-II rows, as many as the orthonormalised WHT of that LP_L1 order keeps on the grid.

    One transform over the whole grid up to 256 positions. Beyond, tiles of 16² or 14² where that stays below the
    executed FLOPs of the (zero-padded) WHT, projections included; else tiles of about 8².
    """

    order: int

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        if grid[0] * grid[1] <= DENSE_LIMIT:
            return _cosine_projection(self, grid, prefix, None)
        budget = backward_flops(_walsh_projection(WalshProjector(low_pass_l1(self.order), "zero"), grid, 0), channels)[
            1
        ]
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
    """n as near-equal pieces of at most `side`."""
    pieces = -(-n // side)
    return [n // pieces + (k < n % pieces) for k in range(pieces)]
