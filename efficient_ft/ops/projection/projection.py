"""Projections of tensors, and projectors, which select the projection for a grid.

A projection consists of tiles. Tiles that share a small matrix form a group. Maps are (B, N, C) tensors with any
strides: a channels-first map is passed as a transposed view. The matrices are constants: a projection caches them for
each device and dtype, and they are never part of a ``state_dict``.

A projector is a small hashable object. Each projection is built once for each combination of projector, grid and
prefix, and is shared by all layers. Copies and pickles of a model therefore do not contain projections.
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

#: Maximum number of positions for which a product with one dense matrix is faster than gathering tiles.
DENSE_LIMIT = 256
_BATCH_SIZES = 16  # maximum number of batch sizes for which views of the matrices are cached


@dataclass(frozen=True, eq=False)
class Group:
    """Group of tiles that share the same matrices.

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
    """Tensors of a projection for one device and one dtype, in the order of the groups.

    Attributes:
        matrices: Matrices of the groups in the order analysis, synthesis, analysis, synthesis, … If the two matrices of
            a group are equal, the same tensor is listed twice.
        gather: Positions in the order of the groups, (N,). If None, one group covers the full map.
        scatter: Inverse permutation of `gather`, (N,), or None.
        ones: Coefficients of the sum over tokens, (R,), or None. See `Projection`.
    """

    matrices: tuple[Tensor, ...]
    gather: Tensor | None
    scatter: Tensor | None
    ones: Tensor | None
    _expanded: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict, repr=False)

    def expanded(self, batch: int) -> tuple[Tensor, Tensor]:
        """Return the analysis matrix (B, R, N) and the transposed synthesis matrix (B, N, R) of one tile.

        The views are cached, because making them takes as long as a small product.
        """
        views = self._expanded.get(batch)
        if views is None:
            if len(self._expanded) >= _BATCH_SIZES:
                self._expanded.clear()
            analysis, synthesis = self.matrices
            with unset_fake_temporarily(), torch.inference_mode(False):
                views = analysis.expand(batch, -1, -1), synthesis.t().expand(batch, -1, -1)
            self._expanded[batch] = views
        return views


@dataclass(frozen=True, eq=False)
class Projection:
    """Pair of matrices over the tokens of a layer, which is split into independent tiles.

    Prefix tokens (class token, distillation token, registers) are not on the grid. The gradients of prefix tokens are
    exact, because each prefix token is a separate tile with the matrix 1.

    Attributes:
        tokens: Number of tokens, N = prefix + H·W.
        rank: Number of coefficients per channel, R, including prefix tokens.
        groups: Tiles and their matrices.
        ones: Vector c (R,) with cᵀ·analysis = 1ᵀ, or None if no such vector exists. With c, the exact sum over tokens
            (a bias gradient) is computed from the coefficients.
    """

    tokens: int
    rank: int
    groups: tuple[Group, ...]
    ones: np.ndarray | None
    _cache: dict[Any, Any] = field(default_factory=dict, repr=False)

    @property
    def flops(self) -> int:
        """Number of FLOPs to project one channel, or to reverse the projection. A multiply-add counts as 2 FLOPs."""
        return 2 * sum(g.tiles * g.analysis.size for g in self.groups)

    @classmethod
    def from_tiles(cls, tiles: list[Tile], grid: tuple[int, int], prefix: int = 0) -> Projection:
        """Create a projection from tiles over the positions of a grid (H, W) that follows `prefix` prefix tokens.

        For a small map, all tiles are combined into one dense matrix. For a large map, equal tiles form groups.
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
        """Return the tensors for `device` and `dtype`. The tensors are built once and cached."""
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
        """Return the analysis and synthesis matrices (R, N) over all tokens, which are one tensor if they are equal."""
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

    def blocks(self) -> dict[str, Tensor]:
        """Return the tiles in the form that the kernels read (see `numba_kernels`), on the CPU.

        The matrices of a tile are padded with zeros and cut into blocks of 4 × 4 values.
        """
        if "blocks" not in self._cache:
            with unset_fake_temporarily(), torch.inference_mode(False):
                self._cache["blocks"] = self._build_blocks()
        return self._cache["blocks"]

    def _build_blocks(self) -> dict[str, Tensor]:
        table: list[list[int]] = []
        positions: list[np.ndarray] = []
        numbers: list[np.ndarray] = []
        analysis: list[np.ndarray] = []
        synthesis: list[np.ndarray] = []
        first = size = 0
        for g in self.groups:
            rows, length = g.analysis.shape
            for k in range(g.tiles):
                at = np.arange(length) if g.positions is None else g.positions[k]
                for of_rows, of_positions in _components(g.analysis, g.synthesis):
                    before = [sum(len(a) for a in arrays) for arrays in (positions, numbers)]
                    table.append([before[0], len(of_positions), before[1], len(of_rows), size])
                    positions.append(at[of_positions])
                    numbers.append(first + of_rows)
                    both = [m[np.ix_(of_rows, of_positions)] for m in (g.analysis, g.synthesis)]
                    padded = [np.pad(m, [(0, -n % 4) for n in m.shape]) for m in both]
                    # Shape (coefficients / 4, 4, positions / 4, 4). A block contains the two dimensions of size 4.
                    cut = [m.reshape(len(m) // 4, 4, -1, 4) for m in padded]
                    analysis.append(cut[0].transpose(2, 0, 1, 3).reshape(-1))
                    synthesis.append(cut[1].transpose(2, 0, 3, 1).reshape(-1))
                    size += analysis[-1].size
                first += rows
        return {
            "table": torch.tensor(table),
            "positions": torch.from_numpy(np.concatenate(positions).astype(np.int64)),
            "numbers": torch.from_numpy(np.concatenate(numbers).astype(np.int64)),
            "analysis": torch.from_numpy(np.concatenate(analysis).astype(np.float32)),
            "synthesis": torch.from_numpy(np.concatenate(synthesis).astype(np.float32)),
        }

    def project(self, x_BNC: Tensor, constants: Constants) -> Tensor:
        """Compute the coefficients (B, R, C) of tokens (B, N, C). The result is contiguous."""
        if constants.gather is None:
            return torch.bmm(constants.expanded(x_BNC.shape[0])[0], x_BNC)
        return self._multiply(constants.matrices[::2], x_BNC.index_select(1, constants.gather))

    def back(self, x_BRC: Tensor, constants: Constants, channels_first: bool = False) -> Tensor:
        """Compute tokens (B, N, C), or contiguous (B, C, N) with `channels_first=True`, from coefficients (B, R, C)."""
        if constants.scatter is None:
            if channels_first:
                return torch.matmul(x_BRC.transpose(1, 2), constants.matrices[1])
            return torch.bmm(constants.expanded(x_BRC.shape[0])[1], x_BRC)
        matrices = [matrix.T for matrix in constants.matrices[1::2]]
        x_BNC = self._multiply(matrices, x_BRC).index_select(1, constants.scatter)
        return x_BNC.transpose(1, 2).contiguous() if channels_first else x_BNC

    def _multiply(self, matrices: Sequence[Tensor], x: Tensor) -> Tensor:
        """Multiply each tile of x by the matrix of its group. The tiles of x must be in the order of the groups."""
        parts, start = [], 0
        for g, matrix in zip(self.groups, matrices, strict=True):
            rows, size = matrix.shape
            tiles = x[:, start : start + g.tiles * size].unflatten(1, (g.tiles, size))
            parts.append(torch.matmul(matrix, tiles).reshape(len(x), g.tiles * rows, -1))
            start += g.tiles * size
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)


@dataclass(frozen=True, eq=False)
class SubsetProjection:
    """Projection of the tokens that remain after other tokens have been dropped.

    For each image, columns are selected from the matrices of the full projection. If the full projection is exact, this
    projection is also exact. Fused tokens are not on the grid. Like a prefix token, each fused token is a separate tile
    with the matrix 1.

    Attributes:
        tokens: Number of remaining tokens, N.
        rank: Rank R of the full projection, plus the number of fused tokens.
        analysis_BNR, synthesis_BNR: Transposed matrices of each image. If the two matrices are equal, they are the same
            tensor.
    """

    tokens: int
    rank: int
    analysis_BNR: Tensor
    synthesis_BNR: Tensor

    @classmethod
    def from_columns(cls, whole: Projection, columns_BN: Tensor, fused: int, dtype: torch.dtype) -> SubsetProjection:
        """Create a projection from columns that are selected for each image from the matrices of a full projection.

        Args:
            whole: Projection of all tokens.
            columns_BN: Column index of each remaining token. Indices starting at `whole.tokens` belong to fused tokens.
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
        """Number of FLOPs to project one channel, or to reverse the projection. A multiply-add counts as 2 FLOPs."""
        return 2 * self.rank * self.tokens

    def constants(self, device: torch.device, dtype: torch.dtype) -> Constants:
        """Return the matrices, which already have the requested device and dtype."""
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
        # The key contains rounded matrices, because the matrices of equal tiles may differ in the last bit.
        key = t.analysis.shape, t.analysis.round(9).tobytes(), t.synthesis.round(9).tobytes()
        equal.setdefault(key, []).append(t)
    return [Group(np.stack([t.positions for t in ts]), ts[0].analysis, ts[0].synthesis) for ts in equal.values()]


def _components(analysis: np.ndarray, synthesis: np.ndarray) -> list[tuple[np.ndarray, np.ndarray]]:
    """Return the rows and columns of the independent blocks of two matrices that are zero outside the same blocks."""
    used = (analysis != 0) | (synthesis != 0)
    found: list[tuple[np.ndarray, np.ndarray]] = []
    rest = np.ones(len(used), bool)
    while rest.any():
        rows = np.zeros(len(used), bool)
        rows[rest.argmax()] = True
        while True:
            columns = used[rows].any(0)
            more = used[:, columns].any(1) | rows
            if (more == rows).all():
                break
            rows = more
        rest &= ~rows
        # Every position belongs to a block, even if all its coefficients are zero.
        columns |= ~used.any(0) if not found else False
        found.append((np.flatnonzero(rows), np.flatnonzero(columns)))
    return found


def _combination(group: Group) -> np.ndarray | None:
    """Return a vector c of shape (tiles·r,) with cᵀ·analysis = 1ᵀ on every tile, or None if no such vector exists."""
    c, *_ = np.linalg.lstsq(group.analysis.T, np.ones(group.analysis.shape[1]), rcond=None)
    exact = np.abs(group.analysis.T @ c - 1).max() < 1e-10
    return np.tile(c, group.tiles) if exact else None


Padding = Literal["ortho", "zero", "reflect"]


class Projector(Protocol):
    """Protocol of objects that select the projection for a grid and for the channels of a layer."""

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection for a layer with (C_in, C_out) channels.

        The input of the layer consists of `prefix` prefix tokens and a map of size `grid`.

        Raises:
            ValueError: If maps of this grid cannot be projected.
        """
        ...


def backward_flops(projection: Projection | SubsetProjection, channels: tuple[int, int]) -> tuple[int, int]:
    """Return how many FLOPs per image are executed to compute the gradients g_w and g_x of a linear layer.

    The first number counts exact gradients. The second number counts low-rank gradients, including the projections.
    """
    c_in, c_out = channels
    exact = 4 * c_in * c_out * projection.tokens
    return exact, 4 * c_in * c_out * projection.rank + projection.flops * (2 * c_in + c_out)


@dataclass(frozen=True)
class WalshProjector:
    """Projector with block-wise Walsh–Hadamard bases (LBP-WHT, Equations 6 to 9).

    Attributes:
        pairs: Sequencies (i, j) of the selected bases. The same bases are used in every 8×8 block.
        padding: Padding of the grid, ``ortho``, ``zero`` or ``reflect``. See `transforms.wht_tiles`.
    """

    pairs: Pairs
    padding: Padding = "ortho"

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection for maps of size `grid`. The projection does not depend on `channels`.

        Raises:
            ValueError: If an axis of the grid is too short for reflection.
        """
        return _walsh_projection(self, grid, prefix)


@dataclass(frozen=True)
class CosineProjector:
    """Projector with the lowest-frequency rows of the DCT-II.

    The orthonormalized WHT with the same LP_L1 order has the same number of rows on the same grid. Grids of up to 256
    positions use a single transform. Larger grids use tiles of 16×16 or 14×14 positions if the executed FLOPs,
    including projections, do not exceed the FLOPs of the zero-padded WHT. Otherwise, larger grids use tiles of about
    8×8 positions.

    Attributes:
        order: Order of the LP_L1 selection, from 1 to 15.
    """

    order: int

    def projection(self, grid: Grid, prefix: int, channels: tuple[int, int]) -> Projection:
        """Return the projection for maps of size `grid`. See `Projector.projection`."""
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
    """Divide n into pieces of nearly equal size, each at most `side`."""
    pieces = -(-n // side)
    return [n // pieces + (k < n % pieces) for k in range(pieces)]
