"""Tensor projections, grouped by tiles that share a small matrix, and projectors, which select them for a grid.

Maps are logical (B, N, C) tensors of any strides. Channels-first maps are transposed views. The matrices are constants.
A projection caches the matrices by device and dtype, and they are never part of a ``state_dict``.

A projector is a small hashable object. Projections are built once per (projector, grid, prefix) and shared by all
layers. Copies and pickles of a model therefore do not contain projections.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

import numpy as np
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

from efficient_ft.ops.projection.transforms import Grid, Pairs, Tile, dct_tiles, dense, disjoint, low_pass_l1, wht_tiles

#: Maximum number of positions for which one dense matrix is faster than gathering tiles.
DENSE_LIMIT = 256


@dataclass(frozen=True, eq=False)
class Group:
    """Tiles that share their matrices.

    Attributes:
        positions: Positions of each tile, (T, l). If None, a single tile covers the full map in order.
        analysis, synthesis: Matrices, (r, l).
    """

    positions: np.ndarray | None
    analysis: np.ndarray
    synthesis: np.ndarray

    @property
    def tiles(self) -> int:
        """Number of tiles, T."""
        return 1 if self.positions is None else self.positions.shape[0]


@dataclass(frozen=True, eq=False)
class Constants:
    """The tensors of a projection on one device and in one dtype, in the order of its groups.

    Attributes:
        matrices: Matrices in the order analysis, synthesis, analysis, synthesis, … If the two matrices of a group are
            equal, the tensor is listed twice.
        gather: Positions in the order of the groups, (N,). If None, one group covers the full map.
        scatter: Inverse of `gather`, (N,).
        ones: Coefficients of the sum over tokens, (R,), or None.
    """

    matrices: tuple[Tensor, ...]
    gather: Tensor | None
    scatter: Tensor | None
    ones: Tensor | None


@dataclass(frozen=True, eq=False)
class Projection:
    """A pair of matrices over the tokens of a layer, split into independent tiles.

    Prefix tokens (class token, distillation token, registers) are not on the grid. Their gradients are exact, because
    each prefix token is a separate tile with the matrix 1.

    Attributes:
        tokens: Number of tokens, N = prefix + H·W.
        rank: Number of coefficients per channel, R, including prefix tokens.
        groups: Tiles and their matrices.
        ones: Vector c (R,) with cᵀ·analysis = 1ᵀ. It expresses the exact sum over tokens, a bias gradient, as a
            combination of the coefficients. None if no such vector exists.
    """

    tokens: int
    rank: int
    groups: tuple[Group, ...]
    ones: np.ndarray | None
    _cache: dict[tuple[Any, ...], Constants] = field(default_factory=dict, repr=False)

    @property
    def flops(self) -> int:
        """Executed FLOPs of one projection, or one reverse projection, of one channel (2 per multiply-add)."""
        return 2 * sum(g.tiles * g.analysis.size for g in self.groups)

    @classmethod
    def from_tiles(cls, tiles: list[Tile], grid: tuple[int, int], prefix: int = 0) -> Projection:
        """Create a projection from tiles over the positions of a grid (H, W) that follows `prefix` prefix tokens.

        A small map becomes one dense matrix. A large map becomes groups of equal tiles.
        """
        positions = grid[0] * grid[1]
        one = np.eye(1)
        before = [Tile(np.array([k]), one, one) for k in range(prefix)]
        tiles = before + [Tile(t.positions + prefix, t.analysis, t.synthesis) for t in tiles]
        if positions <= DENSE_LIMIT:
            whole = dense(tiles, prefix + positions)
            groups = [Group(None, whole.analysis, whole.synthesis)]
        else:
            groups = _group(disjoint(tiles, prefix + positions))
        ones = [_combination(g) for g in groups]
        return cls(
            prefix + positions,
            sum(g.tiles * len(g.analysis) for g in groups),
            tuple(groups),
            None if any(c is None for c in ones) else np.concatenate([c for c in ones if c is not None]),
        )

    def constants(self, device: torch.device, dtype: torch.dtype) -> Constants:
        """Return the tensors on `device` and in `dtype`. The tensors are built once."""
        key = (device, dtype)
        if key not in self._cache:
            # A fake tensor created while costs are traced must not be cached for real steps.
            with unset_fake_temporarily(), torch.inference_mode(False):
                self._cache[key] = self._build(device, dtype)
        return self._cache[key]

    def _build(self, device: torch.device, dtype: torch.dtype) -> Constants:
        def tensor(a: np.ndarray) -> Tensor:
            return torch.from_numpy(np.ascontiguousarray(a)).to(device=device, dtype=dtype)

        matrices: list[Tensor] = []
        for g in self.groups:
            analysis = tensor(g.analysis)
            matrices += [analysis, analysis if g.synthesis is g.analysis else tensor(g.synthesis)]
        gather = scatter = None
        if self.groups[0].positions is not None:
            order = np.concatenate([g.positions.reshape(-1) for g in self.groups if g.positions is not None])
            gather = torch.from_numpy(order).to(device)
            scatter = torch.from_numpy(np.argsort(order)).to(device)
        return Constants(tuple(matrices), gather, scatter, None if self.ones is None else tensor(self.ones))

    def matrices(self, device: torch.device, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return dense analysis and synthesis matrices (R, N) over all tokens. Equal matrices are the same tensor."""
        key = (device, dtype, "dense")
        if key not in self._cache:
            tiles = [
                Tile(np.arange(self.tokens) if g.positions is None else g.positions[k], g.analysis, g.synthesis)
                for g in self.groups
                for k in range(g.tiles)
            ]
            whole = dense(tiles, self.tokens)
            one = Projection(self.tokens, self.rank, (Group(None, whole.analysis, whole.synthesis),), None)
            self._cache[key] = one.constants(device, dtype)
        analysis, synthesis = self._cache[key].matrices
        return analysis, synthesis

    def project(self, x_BNC: Tensor, constants: Constants) -> Tensor:
        """Compute the coefficients (B, R, C), contiguous, of tokens (B, N, C)."""
        if constants.gather is None:
            return torch.matmul(constants.matrices[0], x_BNC)
        return self._multiply(constants.matrices[::2], x_BNC.index_select(1, constants.gather))

    def back(self, x_BRC: Tensor, constants: Constants, channels_first: bool = False) -> Tensor:
        """Compute tokens (B, N, C), or contiguous (B, C, N) with `channels_first`, from coefficients (B, R, C)."""
        if constants.scatter is None:
            if channels_first:
                return torch.matmul(x_BRC.transpose(1, 2), constants.matrices[1])
            return torch.matmul(constants.matrices[1].T, x_BRC)
        matrices = [matrix.T for matrix in constants.matrices[1::2]]
        x_BNC = self._multiply(matrices, x_BRC).index_select(1, constants.scatter)
        return x_BNC.transpose(1, 2).contiguous() if channels_first else x_BNC

    def _multiply(self, matrices: Sequence[Tensor], x: Tensor) -> Tensor:
        """Multiply each tile of x, in the order of the groups, by the matrix of its group."""
        parts, start = [], 0
        for g, matrix in zip(self.groups, matrices, strict=True):
            rows, size = matrix.shape
            tiles = x[:, start : start + g.tiles * size].unflatten(1, (g.tiles, size))
            parts.append(torch.matmul(matrix, tiles).reshape(len(x), g.tiles * rows, -1))
            start += g.tiles * size
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True, eq=False)
class SubsetProjection:
    """A projection of the tokens that remain after a drop, built from columns of the full matrices for each image.

    It is exact if the full projection is exact. Fused tokens are not on the grid. Like a prefix token, each fused token
    is a separate tile with the matrix 1.

    Attributes:
        tokens: Number of remaining tokens, N.
        rank: R of the full projection, plus one per fused token.
        analysis_BNR, synthesis_BNR: Transposed matrices. Equal matrices are the same tensor.
    """

    tokens: int
    rank: int
    analysis_BNR: Tensor
    synthesis_BNR: Tensor

    @classmethod
    def from_columns(cls, whole: Projection, columns_BN: Tensor, fused: int, dtype: torch.dtype) -> SubsetProjection:
        """Select columns of a projection.

        Args:
            whole: Projection of all tokens.
            columns_BN: Column of each remaining token. Columns after the last column of `whole` belong to fused tokens.
            fused: Number of fused tokens so far.
            dtype: Dtype of the matrices.
        """
        taken: list[Tensor] = []
        analysis, synthesis = whole.matrices(columns_BN.device, dtype)
        for matrix in (analysis,) if analysis is synthesis else (analysis, synthesis):
            taken.append(torch.block_diag(matrix, torch.eye(fused, device=matrix.device, dtype=dtype)).T[columns_BN])
        return cls(columns_BN.shape[1], whole.rank + fused, taken[0], taken[-1])

    @property
    def flops(self) -> int:
        """Executed FLOPs of one projection, or one reverse projection, of one channel (2 per multiply-add)."""
        return 2 * self.rank * self.tokens

    def constants(self, device: torch.device, dtype: torch.dtype) -> Constants:
        """Return the tensors, which already have the requested device and dtype."""
        return Constants((self.analysis_BNR, self.synthesis_BNR), None, None, None)

    def project(self, x_BNC: Tensor, constants: Constants) -> Tensor:
        """Compute the coefficients (B, R, C) of tokens (B, N, C)."""
        return torch.matmul(constants.matrices[0].mT, x_BNC)

    def back(self, x_BRC: Tensor, constants: Constants, channels_first: bool = False) -> Tensor:
        """Compute tokens (B, N, C) from coefficients (B, R, C)."""
        assert not channels_first
        return torch.matmul(constants.matrices[1], x_BRC)


def _group(tiles: list[Tile]) -> list[Group]:
    equal: dict[tuple, list[Tile]] = {}
    for t in tiles:
        # The matrices are rounded, since the matrices of equal tiles may differ in the last bit.
        key = t.analysis.shape, t.analysis.round(9).tobytes(), t.synthesis.round(9).tobytes()
        equal.setdefault(key, []).append(t)
    return [Group(np.stack([t.positions for t in ts]), ts[0].analysis, ts[0].synthesis) for ts in equal.values()]


def _combination(group: Group) -> np.ndarray | None:
    """Return c (tiles·r,) with cᵀ·analysis = 1ᵀ on every tile, or None if the row span excludes the constant map."""
    c, *_ = np.linalg.lstsq(group.analysis.T, np.ones(group.analysis.shape[1]), rcond=None)
    exact = np.abs(group.analysis.T @ c - 1).max() < 1e-10
    return np.tile(c, group.tiles) if exact else None


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
