"""A dense float64 reference of the low-rank backward pass, based on the equations of the paper alone.

The reference pads, crops, transforms and multiplies in separate steps. It uses scipy's Hadamard matrix and explicit
loops over blocks, and shares no code with the package.
"""

from __future__ import annotations

import itertools

import numpy as np
from scipy.linalg import hadamard


def sequency_hadamard() -> np.ndarray:
    h = hadamard(8).astype(float)
    changes = [sum(1 for a, b in itertools.pairwise(row) if a != b) for row in h]
    return h[[changes.index(k) for k in range(8)]]


def chosen(bases: str, order: int) -> list[tuple[int, int]]:
    every = [(i, j) for i in range(8) for j in range(8)]
    if bases == "l1":
        return [(i, j) for i, j in every if i + j <= order - 1]
    return [(i, j) for i, j in every if max(i, j) <= order - 1]


def blocks_of(map_HWC: np.ndarray) -> list[np.ndarray]:
    height, width, _ = map_HWC.shape
    return [map_HWC[y : y + 8, x : x + 8] for y in range(0, height, 8) for x in range(0, width, 8)]


def padding_of(size: int) -> tuple[int, int]:
    missing = (8 - size % 8) % 8
    return missing - missing // 2, missing // 2


def coefficients(map_HWC: np.ndarray, bases: list[tuple[int, int]], mode: str) -> np.ndarray:
    """Return the coefficient of each chosen basis in each block, with shape (blocks · R, C)."""
    pad = [padding_of(map_HWC.shape[0]), padding_of(map_HWC.shape[1]), (0, 0)]
    padded = np.pad(map_HWC, pad, mode="reflect" if mode == "reflect" else "constant")
    h = sequency_hadamard()
    return np.array(
        [[np.einsum("yx,yxc->c", np.outer(h[i], h[j]), block) for i, j in bases] for block in blocks_of(padded)]
    ).reshape(-1, map_HWC.shape[2])


def synthesis(coefficients_RC: np.ndarray, grid: tuple[int, int], bases: list[tuple[int, int]]) -> np.ndarray:
    """Return the map that the coefficients represent, cropped to shape (H, W, C)."""
    h = sequency_hadamard()
    (top, bottom), (left, right) = padding_of(grid[0]), padding_of(grid[1])
    padded = np.zeros((grid[0] + top + bottom, grid[1] + left + right, coefficients_RC.shape[1]))
    k = 0
    for y in range(0, padded.shape[0], 8):
        for x in range(0, padded.shape[1], 8):
            for i, j in bases:
                padded[y : y + 8, x : x + 8] += np.outer(h[i], h[j])[:, :, None] * coefficients_RC[k]
                k += 1
    return padded[top : top + grid[0], left : left + grid[1]]


def projector(grid: tuple[int, int], bases: list[tuple[int, int]]) -> np.ndarray:
    """Return the L × L orthogonal projector onto the span of the cropped bases, for padding ``ortho``."""
    length = grid[0] * grid[1]
    blocks = (-(-grid[0] // 8)) * (-(-grid[1] // 8)) * len(bases)
    columns = np.stack([synthesis(np.eye(blocks)[k][:, None], grid, bases).reshape(length) for k in range(blocks)], 1)
    return columns @ np.linalg.pinv(columns, rcond=1e-9)


def low_rank_backward(
    x_BNC: np.ndarray,
    g_BNC: np.ndarray,
    weight: np.ndarray,
    grid: tuple[int, int],
    prefix: int,
    bases: list[tuple[int, int]],
    mode: str,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return (g_x, g_w, g_b) by Algorithm 1 for each image. The bias and the prefix tokens have exact gradients."""
    g_x, g_w = np.zeros_like(x_BNC), np.zeros_like(weight)
    for b in range(len(x_BNC)):
        x_map = x_BNC[b, prefix:].reshape(*grid, -1)
        g_map = g_BNC[b, prefix:].reshape(*grid, -1)
        if mode == "ortho":
            p = projector(grid, bases)
            g_low = p @ g_map.reshape(len(p), -1)
            g_w += g_low.T @ (p @ x_map.reshape(len(p), -1))
            g_x[b, prefix:] = p @ (g_low @ weight)
        else:
            x_hat, g_hat = coefficients(x_map, bases, mode), coefficients(g_map, bases, mode) / 64
            g_w += g_hat.T @ x_hat
            g_x[b, prefix:] = synthesis(g_hat @ weight, grid, bases).reshape(-1, x_BNC.shape[2])
        g_w += g_BNC[b, :prefix].T @ x_BNC[b, :prefix]
        g_x[b, :prefix] = g_BNC[b, :prefix] @ weight
    return g_x, g_w, g_BNC.sum((0, 1))
