"""Applying a projection to tensors: groups of tiles that share one small matrix.

Maps are logical (B, N, C) tensors of any strides: tokens as they are, channels-first maps as a transposed view. The
matrices are constants: they live in a cache by device and type beside the projection, never in a ``state_dict``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from scipy.linalg import block_diag
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components
from torch import Tensor
from torch._subclasses.fake_tensor import unset_fake_temporarily

#: Up to this many positions one dense matrix beats gathering tiles.
DENSE_LIMIT = 256


@dataclass(frozen=True, eq=False)
class Group:
    """Tiles of equal shape whose part of the matrix is the same."""

    positions: np.ndarray | None  # (T, l) positions of each tile; None: the one tile is the whole map, in order
    analysis: np.ndarray  # (r, l)
    synthesis: np.ndarray  # (r, l)

    @property
    def tiles(self) -> int:
        return 1 if self.positions is None else self.positions.shape[0]

    @property
    def multiply_adds(self) -> int:
        """Of one projection (or reverse projection) of one channel."""
        return self.tiles * self.analysis.size


@dataclass(frozen=True, eq=False)
class Constants:
    """The tensors of a projection on one device and in one type, in the order of its groups."""

    matrices: tuple[Tensor, ...]  # analysis, synthesis, analysis, synthesis, ... (one tensor twice where equal)
    gather: Tensor | None  # (N,) positions in the order of the groups
    scatter: Tensor | None  # (N,) its inverse
    ones: Tensor | None  # (R,) combination of coefficients that gives the sum over tokens


@dataclass(frozen=True, eq=False)
class Projection:
    """A pair of matrices over the tokens of a layer, split into independent tiles.

    Prefix tokens (class, distillation, registers) are not on the grid and take the exact path: each is a tile of its
    own with the matrix 1.

    Attributes:
        tokens: N = prefix + H·W.
        rank: R, the number of coefficients per channel, prefix tokens included.
        groups: the matrices.
        ones: c with cᵀ·analysis = 1ᵀ (R,), or None: where it exists the exact sum over tokens, a bias gradient, is
            read off the coefficients.
    """

    tokens: int
    rank: int
    groups: tuple[Group, ...]
    ones: np.ndarray | None
    _cache: dict[tuple[torch.device, torch.dtype], Constants] = field(default_factory=dict, repr=False)

    @property
    def flops(self) -> int:
        """Executed FLOPs of one projection, or one reverse projection, of one channel (2 per multiply-add)."""
        return 2 * sum(g.multiply_adds for g in self.groups)

    @classmethod
    def from_matrices(cls, analysis: np.ndarray, synthesis: np.ndarray, prefix: int = 0) -> Projection:
        """From R × L matrices over the grid; large maps are split into tiles, and rows reordered tile by tile."""
        assert analysis.shape == synthesis.shape, (analysis.shape, synthesis.shape)
        equal = synthesis is analysis
        analysis = block_diag(np.eye(prefix), analysis)
        synthesis = analysis if equal else block_diag(np.eye(prefix), synthesis)
        rank, tokens = analysis.shape
        if tokens - prefix <= DENSE_LIMIT:
            groups: tuple[Group, ...] = (Group(None, analysis, synthesis),)
        else:
            groups = _split(analysis, synthesis)
        rows = _rows_in_order(groups, tokens)
        combination, *_ = np.linalg.lstsq(rows.T, np.ones(tokens), rcond=None)
        exact = np.abs(rows.T @ combination - 1).max() < 1e-10
        return cls(tokens, rank, groups, combination if exact else None)

    def constants(self, device: torch.device, dtype: torch.dtype) -> Constants:
        """The tensors to compute with on `device`, in `dtype`; built once."""
        key = (device, dtype)
        if key not in self._cache:
            # A fake tensor made while costs are traced must never be kept for real steps.
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

    def project(self, x_BNC: Tensor, constants: Constants) -> Tensor:
        """(B, N, C) → (B, R, C) coefficients, contiguous."""
        if constants.gather is None:
            return torch.matmul(constants.matrices[0], x_BNC)
        x_BNC = x_BNC.index_select(1, constants.gather)
        parts, start = [], 0
        for g, matrix in zip(self.groups, constants.matrices[::2], strict=True):
            rank, size = matrix.shape
            tiles = x_BNC[:, start : start + g.tiles * size].unflatten(1, (g.tiles, size))
            parts.append(torch.matmul(matrix, tiles).reshape(len(x_BNC), g.tiles * rank, -1))
            start += g.tiles * size
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def back(self, x_BRC: Tensor, constants: Constants, channels_first: bool = False) -> Tensor:
        """(B, R, C) coefficients → (B, N, C), or (B, C, N) contiguous with `channels_first`."""
        if constants.scatter is None:
            if channels_first:
                return torch.matmul(x_BRC.transpose(1, 2), constants.matrices[1])
            return torch.matmul(constants.matrices[1].T, x_BRC)
        parts, start = [], 0
        for g, matrix in zip(self.groups, constants.matrices[1::2], strict=True):
            rank, size = matrix.shape
            tiles = x_BRC[:, start : start + g.tiles * rank].unflatten(1, (g.tiles, rank))
            parts.append(torch.matmul(matrix.T, tiles).reshape(len(x_BRC), g.tiles * size, -1))
            start += g.tiles * rank
        x_BNC = (parts[0] if len(parts) == 1 else torch.cat(parts, 1)).index_select(1, constants.scatter)
        return x_BNC.transpose(1, 2).contiguous() if channels_first else x_BNC


def _split(analysis: np.ndarray, synthesis: np.ndarray) -> tuple[Group, ...]:
    """Independent tiles of a block-diagonal pair (up to permutations), those with equal matrices grouped."""
    rank, length = analysis.shape
    row, column = np.nonzero((analysis != 0) | (synthesis != 0))
    graph = coo_array((np.ones_like(row), (row, column + rank)), shape=(rank + length,) * 2)
    _, label = connected_components(graph, directed=False)
    tiles: dict[tuple, list[np.ndarray]] = {}
    matrices: dict[tuple, tuple[np.ndarray, np.ndarray]] = {}
    for tile in dict.fromkeys(label[rank:]):
        rows, positions = np.flatnonzero(label[:rank] == tile), np.flatnonzero(label[rank:] == tile)
        pair = analysis[np.ix_(rows, positions)], synthesis[np.ix_(rows, positions)]
        key = (pair[0].shape, pair[0].round(12).tobytes(), pair[1].round(12).tobytes())
        tiles.setdefault(key, []).append(positions)
        matrices.setdefault(key, pair)
    return tuple(Group(np.stack(tiles[key]), a, a if np.array_equal(a, s) else s) for key, (a, s) in matrices.items())


def _rows_in_order(groups: tuple[Group, ...], tokens: int) -> np.ndarray:
    """The analysis matrix with its rows in the order `project` gives them."""
    rows = []
    for g in groups:
        if g.positions is None:
            return g.analysis
        for positions in g.positions:
            block = np.zeros((len(g.analysis), tokens))
            block[:, positions] = g.analysis
            rows.append(block)
    return np.concatenate(rows)
