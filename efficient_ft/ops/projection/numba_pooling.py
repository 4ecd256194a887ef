"""The numba kernels of the pooling layers of EfficientFormer. Importing this module requires numba.

A job processes one image and `WIDTH` channels of a channels-last map, and computes all sums in float32.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32

from efficient_ft.ops.projection.numba_tiles import (
    _KINDS,
    _jit,
    _load,
    _store,
)
from efficient_ft.ops.storage.kernels.numba_job import _address, _take, as_job

WIDTH = 64  # number of channels that a job processes, so that its maps of 7×7 positions stay in the first caches


@_jit
def _part(j, chunks, n):
    """Return the image of a part of a job, its first channel, and the channel after its last channel."""
    first = (j % chunks) * WIDTH
    return j // chunks, first, min(first + WIDTH, n)


@_jit
def _sum_neighbors(map_, height, width, sums, total):
    """Compute in `total` the sum over the 3 × 3 neighborhood of each position. `sums` is scratch memory."""
    for y in range(height):
        for x in range(width):
            at = (y * width + x) * WIDTH
            left = at - WIDTH if x > 0 else at
            right = at + WIDTH if x < width - 1 else at
            a, b = float32(x > 0), float32(x < width - 1)
            _weighted(map_[at : at + WIDTH], map_[left : left + WIDTH], map_[right : right + WIDTH], a, b, sums[at:])
    row = width * WIDTH
    for y in range(height):
        for x in range(width):
            at = (y * width + x) * WIDTH
            above = at - row if y > 0 else at
            below = at + row if y < height - 1 else at
            a, b = float32(y > 0), float32(y < height - 1)
            _weighted(sums[at : at + WIDTH], sums[above : above + WIDTH], sums[below : below + WIDTH], a, b, total[at:])


@_jit
def _weighted(x, before, after, a, b, total):
    for i in range(WIDTH):
        total[i] = x[i] + before[i] * a + after[i] * b


@_jit
def _share(y, x, height, width):
    """Return 1 / n for the n positions in the 3 × 3 neighborhood of a position."""
    rows = 3 - (y == 0) - (y == height - 1)
    columns = 3 - (x == 0) - (x == width - 1)
    return float32(1) / float32(rows * columns)


@_jit
def _mix_row(x, total, share, scale, y):
    for i in range(WIDTH):
        y[i] = x[i] + (total[i] * share - x[i]) * scale[i]


@_jit
def _mix_row_gradient(g, total, x, scale, g_x, of_scale):
    for i in range(WIDTH):
        h = total[i] - g[i]
        of_scale[i] += h * x[i]
        g_x[i] = g[i] + h * scale[i]


@_jit
def _multiply_row(x, share, y):
    for i in range(WIDTH):
        y[i] = x[i] * share


@functools.cache
def mix(of: int, to: int) -> Any:
    """Compile the job that computes y = x + scale · (mean of the 3 × 3 neighborhood of x - x)."""
    of_kind, to_kind = _KINDS[of], _KINDS[to]

    def mix_job(pointer):
        job = carray(pointer, 20)
        jobs, n, height, width = job[1], job[2], job[3], job[4]
        chunks = (n + WIDTH - 1) // WIDTH
        tokens = height * width
        size = jobs // chunks * tokens * n
        x = carray(_address(job[5]), (size,), of_kind)
        y = carray(_address(job[6]), (size,), to_kind)
        scales = carray(_address(job[7]), (n,), np.float32)
        rows, sums = np.zeros(tokens * WIDTH, np.float32), np.zeros(tokens * WIDTH, np.float32)
        total = np.zeros(tokens * WIDTH, np.float32)
        scale, out = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            image, first, last = _part(j, chunks, n)
            _load(scales[first:last], scale)
            for t in range(tokens):
                start = (image * tokens + t) * n
                _load(x[start + first : start + last], rows[t * WIDTH : (t + 1) * WIDTH])
            _sum_neighbors(rows, height, width, sums, total)
            for t in range(tokens):
                start, at = (image * tokens + t) * n, t * WIDTH
                share = _share(t // width, t % width, height, width)
                _mix_row(rows[at : at + WIDTH], total[at : at + WIDTH], share, scale, out)
                _store(out, y[start + first : start + last])

    return as_job(of, to)(mix_job)


@functools.cache
def mix_backward(of: int, to: int, saved: int) -> Any:
    """Compile the job that computes the gradient of x (`to`) from g (`of`) and x (`saved`) for `mix`.

    The gradient of scale is computed for each image.
    """
    of_kind, to_kind, saved_kind = _KINDS[of], _KINDS[to], _KINDS[saved]

    def mix_backward_job(pointer):
        job = carray(pointer, 20)
        jobs, n, height, width = job[1], job[2], job[3], job[4]
        chunks = (n + WIDTH - 1) // WIDTH
        tokens = height * width
        batch = jobs // chunks
        g = carray(_address(job[5]), (batch * tokens * n,), of_kind)
        g_x = carray(_address(job[6]), (batch * tokens * n,), to_kind)
        scales = carray(_address(job[7]), (n,), np.float32)
        x = carray(_address(job[8]), (batch * tokens * n,), saved_kind)
        of_scales = carray(_address(job[9]), (batch * n,), np.float32)
        rows, sums = np.zeros(tokens * WIDTH, np.float32), np.zeros(tokens * WIDTH, np.float32)
        shares = np.zeros(tokens * WIDTH, np.float32)
        scale, of_scale = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        other, out = np.zeros(WIDTH, np.float32), np.zeros(WIDTH, np.float32)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            image, first, last = _part(j, chunks, n)
            _load(scales[first:last], scale)
            of_scale[:] = float32(0)
            for t in range(tokens):
                start, at = (image * tokens + t) * n, t * WIDTH
                _load(g[start + first : start + last], rows[at : at + WIDTH])
                share = _share(t // width, t % width, height, width)
                _multiply_row(rows[at : at + WIDTH], share, shares[at : at + WIDTH])
            _sum_neighbors(shares, height, width, sums, shares)
            for t in range(tokens):
                start, at = (image * tokens + t) * n, t * WIDTH
                _load(x[start + first : start + last], other)
                _mix_row_gradient(rows[at : at + WIDTH], shares[at : at + WIDTH], other, scale, out, of_scale)
                _store(out, g_x[start + first : start + last])
            _store(of_scale, of_scales[image * n + first : image * n + last])

    return as_job(of, to, saved)(mix_backward_job)
