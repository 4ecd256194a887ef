"""Loads, stores, analysis and synthesis of the tiles of a projection in numba. Importing this module requires numba.

bfloat16 values are passed as int16. A projection consists of tiles (see `Projection.blocks`). A tile is processed in
blocks of 4 positions, and its matrices are stored in blocks of 4 positions × 4 coefficients.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray, float32, int64, njit

from efficient_ft.ops.storage.kernels.numba_job import _address, prefetch, to_bits, to_float

WIDTH = 128  # number of channels that a job processes
_FOUR = 4 * WIDTH  # number of values of four positions, which are processed together
_KINDS = {2: np.int16, 4: np.float32}  # types of the elements of tensors, by size in bytes

_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract"})


@_jit
def _layout(job):
    """Return the arrays that describe the tiles of a job, the number of chunks of channels, and the batch size.

    A job starts with the counter, the numbers of jobs, channels n, tokens, coefficients and tiles, and the addresses of
    the tile table, the positions and the coefficients of the tiles. The addresses of matrices and tensors follow. A row
    of the tile table contains the first position, the number of positions, the first coefficient, the number of
    coefficients, and the start of the matrix of the tile.
    """
    table = carray(_address(job[6]), (job[5], 5), np.int64)
    positions = carray(_address(job[7]), (job[3],), np.int64)
    numbers = carray(_address(job[8]), (job[4],), np.int64)
    chunks = _chunks(job[2])
    return table, positions, numbers, chunks, job[1] // chunks


@_jit
def _chunks(n):
    return (n + WIDTH - 1) // WIDTH


@_jit
def _part(j, chunks, n):
    """Return the image of a part of a job, its first channel, and the channel after its last channel."""
    first = (j % chunks) * WIDTH
    return j // chunks, first, min(first + WIDTH, n)


@_jit
def _load(source, target):
    for i in range(len(source)):
        target[i] = to_float(source[i])


@_jit
def _store(source, target):
    for i in range(len(target)):
        target[i] = to_bits(target, source[i])


@_jit
def _set_block(target, source, m):
    """Set the four rows of `target` to m (4 × 4) times the four rows of `source`."""
    m00, m01, m02, m03, m10, m11, m12, m13 = m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7]
    m20, m21, m22, m23, m30, m31, m32, m33 = m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15]
    for c in range(WIDTH):
        s0, s1, s2, s3 = source[c], source[WIDTH + c], source[2 * WIDTH + c], source[3 * WIDTH + c]
        t = m00 * s0
        t += m01 * s1
        t += m02 * s2
        t += m03 * s3
        target[c] = t
        t = m10 * s0
        t += m11 * s1
        t += m12 * s2
        t += m13 * s3
        target[WIDTH + c] = t
        t = m20 * s0
        t += m21 * s1
        t += m22 * s2
        t += m23 * s3
        target[2 * WIDTH + c] = t
        t = m30 * s0
        t += m31 * s1
        t += m32 * s2
        t += m33 * s3
        target[3 * WIDTH + c] = t


@_jit
def _add_block(target, source, m):
    """Add m (4 × 4) times the four rows of `source` to the four rows of `target`."""
    m00, m01, m02, m03, m10, m11, m12, m13 = m[0], m[1], m[2], m[3], m[4], m[5], m[6], m[7]
    m20, m21, m22, m23, m30, m31, m32, m33 = m[8], m[9], m[10], m[11], m[12], m[13], m[14], m[15]
    for c in range(WIDTH):
        s0, s1, s2, s3 = source[c], source[WIDTH + c], source[2 * WIDTH + c], source[3 * WIDTH + c]
        t = target[c]
        t += m00 * s0
        t += m01 * s1
        t += m02 * s2
        t += m03 * s3
        target[c] = t
        t = target[WIDTH + c]
        t += m10 * s0
        t += m11 * s1
        t += m12 * s2
        t += m13 * s3
        target[WIDTH + c] = t
        t = target[2 * WIDTH + c]
        t += m20 * s0
        t += m21 * s1
        t += m22 * s2
        t += m23 * s3
        target[2 * WIDTH + c] = t
        t = target[3 * WIDTH + c]
        t += m30 * s0
        t += m31 * s1
        t += m32 * s2
        t += m33 * s3
        target[3 * WIDTH + c] = t


@_jit
def _analyze(rows, hats, matrix, blocks):
    """Add the coefficients of four positions to `hats`."""
    for k in range(blocks):
        _add_block(hats[4 * k * WIDTH : 4 * (k + 1) * WIDTH], rows, matrix[16 * k : 16 * (k + 1)])


@_jit
def _synthesize(hats, rows, matrix, blocks):
    """Compute four positions from the coefficients `hats`."""
    _set_block(rows, hats, matrix)
    for k in range(1, blocks):
        _add_block(rows, hats[4 * k * WIDTH : 4 * (k + 1) * WIDTH], matrix[16 * k : 16 * (k + 1)])


@_jit
def _load_four(x, starts, width, rows):
    """Load four positions of x, which start at `starts`. A position with a negative start is set to zero."""
    for k in range(4):
        start, to = starts[k], k * WIDTH
        if start < 0:
            rows[to : to + WIDTH] = float32(0)
        else:
            _load(x[start : start + width], rows[to : to + width])


@_jit
def _prefetch_four(x, positions, p, count, before, n, first):
    """Request 128 channels of the four positions that start at p, if they exist.

    The channels of a position are too few for the prefetcher of the processor, which follows long streams.
    """
    step = 64 // x.itemsize
    for k in range(p, min(p + 4, count)):
        start = (before + positions[k]) * n + first
        for i in range(0, min(WIDTH, n - first), step):
            prefetch(x, start + i)


@_jit
def _store_four(rows, starts, width, x):
    for k in range(4):
        start, to = starts[k], k * WIDTH
        if start >= 0:
            _store(rows[to : to + width], x[start : start + width])


@_jit
def _repeat(x, four):
    """Write x (at most `WIDTH` values) four times."""
    for k in range(4):
        _load(x, four[k * WIDTH : (k + 1) * WIDTH])


@_jit
def _sum_four(four, total):
    for i in range(len(total)):
        total[i] = (four[i] + four[WIDTH + i]) + (four[2 * WIDTH + i] + four[3 * WIDTH + i])


@_jit
def _find_four(starts, positions, p, count, before, n, first):
    """Set the starts of four positions in an image that starts at row `before`, or -1 after the last position."""
    for k in range(4):
        starts[k] = (before + positions[p + k]) * n + first if p + k < count else int64(-1)
