"""The numba kernels of the low-rank backward pass. Importing this module requires numba.

A job processes one image and `WIDTH` channels. The tensors of the model are read and written once, in their own dtype,
and all sums are computed in float32. The module `numba_tiles` describes the tiles of a projection.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32

from efficient_ft.ops.gelu.numba_kernels import _cdf, _density
from efficient_ft.ops.projection.numba_tiles import (
    _FOUR,
    _KINDS,
    WIDTH,
    _analyze,
    _find_four,
    _jit,
    _layout,
    _load,
    _load_four,
    _part,
    _prefetch_four,
    _repeat,
    _store,
    _store_four,
    _sum_four,
    _synthesize,
)
from efficient_ft.ops.storage.kernels.numba_job import _address, _take, as_job, to_bits, to_float

_SHORT = 64  # length of the loops that compute GELU; loops of length 128 took twice the time


@_jit
def _gelu_short(x, scale, shift, y):
    for i in range(_SHORT):
        u = x[i] * scale[i] + shift[i]
        y[i] = u * _cdf(u)


@_jit
def _gelu_four(x, scale, shift, y):
    for a in range(0, _FOUR, _SHORT):
        b = a + _SHORT
        _gelu_short(x[a:b], scale[a:b], shift[a:b], y[a:b])


#: For all larger values of |u|, the derivative of GELU differs from 0 or 1 by less than 2e-5.
_LARGEST = float32(4.8)


@_jit
def _rounded_derivative(u):
    """Compute the derivative of GELU with an absolute error below 3e-5, which is far less than bfloat16 resolves.

    The odd function GELU'(u) - 1/2 is approximated by u · p(u²), where p is the minimax polynomial of degree 11.
    """
    u = min(max(u, -_LARGEST), _LARGEST)
    v = u * u * float32(2 / 4.8**2) - float32(1)
    p = v * float32(-0.0124141764) + float32(0.0297253168)
    p = p * v + float32(-0.0236890962)
    p = p * v + float32(0.026012565)
    p = p * v + float32(-0.0612787227)
    p = p * v + float32(0.0865286502)
    p = p * v + float32(-0.0887080351)
    p = p * v + float32(0.0863508491)
    p = p * v + float32(-0.0805230928)
    p = p * v + float32(0.0739234822)
    p = p * v + float32(-0.0802264135)
    p = p * v + float32(0.148467747)
    return float32(0.5) + u * p


@_jit
def _gelu_short_gradient(g, x, scale, shift, of_shift, of_scale):
    for i in range(_SHORT):
        u = x[i] * scale[i] + shift[i]
        h = g[i] * (_cdf(u) + u * _density(u))
        g[i] = h * scale[i]
        of_shift[i] += h
        of_scale[i] += h * x[i]


@_jit
def _gelu_four_gradient(g, x, scale, shift, of_shift, of_scale):
    """Replace g by the gradient of x, and add to the gradients of shift and scale."""
    for a in range(0, _FOUR, _SHORT):
        b = a + _SHORT
        _gelu_short_gradient(g[a:b], x[a:b], scale[a:b], shift[a:b], of_shift[a:b], of_scale[a:b])


@_jit
def _gelu_four_rounded_gradient(g, x, scale, shift, of_shift, of_scale):
    """Compute `_gelu_four_gradient` with `_rounded_derivative`."""
    for i in range(_FOUR):
        h = g[i] * _rounded_derivative(x[i] * scale[i] + shift[i])
        g[i] = h * scale[i]
        of_shift[i] += h
        of_scale[i] += h * x[i]


@_jit
def _add_four(x, total):
    for i in range(_FOUR):
        total[i] += x[i]


@_jit
def _add_products(x, f, total):
    for i in range(_FOUR):
        total[i] += x[i] * f[i]


@_jit
def _scale(x, scale):
    for i in range(WIDTH):
        x[i] *= scale[i]


@_jit
def _affine_row(x, f, scale, shift, y):
    for i in range(len(scale)):
        y[i] = to_bits(y, to_float(x[i]) + (to_float(f[i]) * scale[i] + shift[i]))


@functools.cache
def project(of: int, to: int, second: int, scaled: bool, sums: bool, copies: bool) -> Any:
    """Compile the job that computes the coefficients of x.

    `of` and `to` are the numbers of bytes per element of x and of the coefficients. Options: Σ x over the tokens
    (`sums`), Σ x · f with the tensor f (`second` bytes per element, or 0), scaled coefficients, and a copy of x in the
    dtype of the coefficients.
    """
    of_kind, to_kind, second_kind = _KINDS[of], _KINDS[to], _KINDS[second or 4]

    def project_job(pointer):
        job = carray(pointer, 20)
        jobs, n, tokens, rank, tiles = job[1], job[2], job[3], job[4], job[5]
        table, positions, numbers, chunks, batch = _layout(job)
        matrices = carray(_address(job[9]), (job[10],), np.float32)
        x = carray(_address(job[11]), (batch * tokens * n,), of_kind)
        x_hat = carray(_address(job[12]), (batch * rank * n,), to_kind)
        hats = np.empty(4 * ((rank + 3) // 4) * WIDTH, np.float32)
        rows, other = np.zeros(_FOUR, np.float32), np.zeros(_FOUR, np.float32)
        of_x, of_product = np.empty(_FOUR, np.float32), np.empty(_FOUR, np.float32)
        factor, starts = np.zeros(WIDTH, np.float32), np.empty(4, np.int64)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            image, first, last = _part(j, chunks, n)
            of_x[:] = float32(0)
            of_product[:] = float32(0)
            if scaled:
                scale = carray(_address(job[13]), (n,), np.float32)
                _load(scale[first:last], factor)
            for t in range(tiles):
                at, count, at_hat, count_hat, at_matrix = table[t]
                blocks = (count_hat + 3) // 4
                hats[: 4 * blocks * WIDTH] = float32(0)
                for p in range(0, count, 4):
                    _find_four(starts, positions[at:], p, count, image * tokens, n, first)
                    _prefetch_four(x, positions[at:], p + 4, count, image * tokens, n, first)
                    _load_four(x, starts, last - first, rows)
                    if copies:
                        y = carray(_address(job[14]), (batch * tokens * n,), to_kind)
                        _store_four(rows, starts, last - first, y)
                    if sums:
                        _add_four(rows, of_x)
                    if second != 0:
                        f = carray(_address(job[15]), (batch * tokens * n,), second_kind)
                        _prefetch_four(f, positions[at:], p + 4, count, image * tokens, n, first)
                        _load_four(f, starts, last - first, other)
                        _add_products(rows, other, of_product)
                    _analyze(rows, hats, matrices[at_matrix + 4 * p * blocks :], blocks)
                for r in range(count_hat):
                    row = hats[r * WIDTH : (r + 1) * WIDTH]
                    if scaled:
                        _scale(row, factor)
                    start = (image * rank + numbers[at_hat + r]) * n
                    _store(row, x_hat[start + first : start + last])
            if sums:
                total = carray(_address(job[16]), (batch * n,), np.float32)
                _sum_four(of_x, total[image * n + first : image * n + last])
            if second != 0:
                total = carray(_address(job[17]), (batch * n,), np.float32)
                _sum_four(of_product, total[image * n + first : image * n + last])

    return as_job(of, to, second, scaled, sums, copies)(project_job)


@functools.cache
def back(of: int, to: int, second: int) -> Any:
    """Compile the job that computes tokens from coefficients, plus a second tensor if `second` is not 0."""
    of_kind, to_kind, second_kind = _KINDS[of], _KINDS[to], _KINDS[second or 4]

    def back_job(pointer):
        job = carray(pointer, 20)
        jobs, n, tokens, rank, tiles = job[1], job[2], job[3], job[4], job[5]
        table, positions, numbers, chunks, batch = _layout(job)
        matrices = carray(_address(job[9]), (job[10],), np.float32)
        x_hat = carray(_address(job[11]), (batch * rank * n,), of_kind)
        x = carray(_address(job[12]), (batch * tokens * n,), to_kind)
        hats = np.zeros(4 * ((rank + 3) // 4) * WIDTH, np.float32)
        rows, other, starts = np.zeros(_FOUR, np.float32), np.zeros(_FOUR, np.float32), np.empty(4, np.int64)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            image, first, last = _part(j, chunks, n)
            for t in range(tiles):
                at, count, at_hat, count_hat, at_matrix = table[t]
                blocks = (count_hat + 3) // 4
                hats[4 * (blocks - 1) * WIDTH : 4 * blocks * WIDTH] = float32(0)
                for r in range(count_hat):
                    start = (image * rank + numbers[at_hat + r]) * n
                    _load(x_hat[start + first : start + last], hats[r * WIDTH : (r + 1) * WIDTH])
                for p in range(0, count, 4):
                    _synthesize(hats, rows, matrices[at_matrix + 4 * p * blocks :], blocks)
                    _find_four(starts, positions[at:], p, count, image * tokens, n, first)
                    if second != 0:
                        g = carray(_address(job[13]), (batch * tokens * n,), second_kind)
                        _prefetch_four(g, positions[at:], p + 4, count, image * tokens, n, first)
                        _load_four(g, starts, last - first, other)
                        _add_four(other, rows)
                    _store_four(rows, starts, last - first, x)

    return as_job(of, to, second)(back_job)


@functools.cache
def activate(size: int, projects: bool) -> Any:
    """Compile the job that computes y = GELU(f · scale + shift), and the coefficients of y if `projects` is True."""
    kind = _KINDS[size]

    def activate_job(pointer):
        job = carray(pointer, 20)
        jobs, n, tokens, rank, tiles = job[1], job[2], job[3], job[4], job[5]
        table, positions, numbers, chunks, batch = _layout(job)
        matrices = carray(_address(job[9]), (job[10],), np.float32)
        f = carray(_address(job[11]), (batch * tokens * n,), kind)
        y = carray(_address(job[12]), (batch * tokens * n,), kind)
        all_scales = carray(_address(job[13]), (n,), np.float32)
        all_shifts = carray(_address(job[14]), (n,), np.float32)
        hats = np.empty(4 * ((rank + 3) // 4) * WIDTH, np.float32)
        rows, other, starts = np.zeros(_FOUR, np.float32), np.zeros(_FOUR, np.float32), np.empty(4, np.int64)
        scale, shift = np.zeros(_FOUR, np.float32), np.zeros(_FOUR, np.float32)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            image, first, last = _part(j, chunks, n)
            _repeat(all_scales[first:last], scale)
            _repeat(all_shifts[first:last], shift)
            for t in range(tiles):
                at, count, at_hat, count_hat, at_matrix = table[t]
                blocks = (count_hat + 3) // 4
                hats[: 4 * blocks * WIDTH] = float32(0)
                for p in range(0, count, 4):
                    _find_four(starts, positions[at:], p, count, image * tokens, n, first)
                    _prefetch_four(f, positions[at:], p + 4, count, image * tokens, n, first)
                    _load_four(f, starts, last - first, other)
                    _gelu_four(other, scale, shift, rows)
                    _store_four(rows, starts, last - first, y)
                    if projects:
                        _analyze(rows, hats, matrices[at_matrix + 4 * p * blocks :], blocks)
                if projects:
                    y_hat = carray(_address(job[15]), (batch * rank * n,), kind)
                    for r in range(count_hat):
                        start = (image * rank + numbers[at_hat + r]) * n
                        _store(hats[r * WIDTH : (r + 1) * WIDTH], y_hat[start + first : start + last])

    return as_job(size, projects)(activate_job)


@functools.cache
def activate_backward(size: int) -> Any:
    """Compile the job that computes the coefficients of the gradient of f from the coefficients of the gradient of y.

    The sums for the gradients of scale and shift are computed for each image.
    """
    kind = _KINDS[size]

    def activate_backward_job(pointer):
        job = carray(pointer, 20)
        jobs, n, tokens, rank, tiles = job[1], job[2], job[3], job[4], job[5]
        table, positions, numbers, chunks, batch = _layout(job)
        analysis = carray(_address(job[9]), (job[10],), np.float32)
        synthesis = carray(_address(job[11]), (job[10],), np.float32)
        f = carray(_address(job[12]), (batch * tokens * n,), kind)
        g_hat = carray(_address(job[13]), (batch * rank * n,), kind)
        out = carray(_address(job[14]), (batch * rank * n,), kind)
        all_scales = carray(_address(job[15]), (n,), np.float32)
        all_shifts = carray(_address(job[16]), (n,), np.float32)
        of_scales = carray(_address(job[17]), (batch * n,), np.float32)
        of_shifts = carray(_address(job[18]), (batch * n,), np.float32)
        size_hats = 4 * ((rank + 3) // 4) * WIDTH
        before, after = np.zeros(size_hats, np.float32), np.zeros(size_hats, np.float32)
        rows, other, starts = np.zeros(_FOUR, np.float32), np.zeros(_FOUR, np.float32), np.empty(4, np.int64)
        scale, shift = np.zeros(_FOUR, np.float32), np.zeros(_FOUR, np.float32)
        of_scale, of_shift = np.empty(_FOUR, np.float32), np.empty(_FOUR, np.float32)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            image, first, last = _part(j, chunks, n)
            _repeat(all_scales[first:last], scale)
            _repeat(all_shifts[first:last], shift)
            of_scale[:] = float32(0)
            of_shift[:] = float32(0)
            for t in range(tiles):
                at, count, at_hat, count_hat, at_matrix = table[t]
                blocks = (count_hat + 3) // 4
                after[: 4 * blocks * WIDTH] = float32(0)
                before[4 * (blocks - 1) * WIDTH : 4 * blocks * WIDTH] = float32(0)
                for r in range(count_hat):
                    start = (image * rank + numbers[at_hat + r]) * n
                    _load(g_hat[start + first : start + last], before[r * WIDTH : (r + 1) * WIDTH])
                for p in range(0, count, 4):
                    at_block = at_matrix + 4 * p * blocks
                    _synthesize(before, rows, synthesis[at_block:], blocks)
                    _find_four(starts, positions[at:], p, count, image * tokens, n, first)
                    _prefetch_four(f, positions[at:], p + 4, count, image * tokens, n, first)
                    _load_four(f, starts, last - first, other)
                    if size == 2:
                        _gelu_four_rounded_gradient(rows, other, scale, shift, of_shift, of_scale)
                    else:
                        _gelu_four_gradient(rows, other, scale, shift, of_shift, of_scale)
                    _analyze(rows, after, analysis[at_block:], blocks)
                for r in range(count_hat):
                    start = (image * rank + numbers[at_hat + r]) * n
                    _store(after[r * WIDTH : (r + 1) * WIDTH], out[start + first : start + last])
            _sum_four(of_scale, of_scales[image * n + first : image * n + last])
            _sum_four(of_shift, of_shifts[image * n + first : image * n + last])

    return as_job(size)(activate_backward_job)


@functools.cache
def add_affine(of: int, second: int) -> Any:
    """Compile the job that computes x + f · scale + shift in the dtype of x (`of` bytes per element)."""
    of_kind, second_kind = _KINDS[of], _KINDS[second]

    def add_affine_job(pointer):
        job = carray(pointer, 20)
        jobs, n, rows = job[1], job[2], job[3]
        x = carray(_address(job[4]), (rows * n,), of_kind)
        f = carray(_address(job[5]), (rows * n,), second_kind)
        y = carray(_address(job[6]), (rows * n,), of_kind)
        scale = carray(_address(job[7]), (n,), np.float32)
        shift = carray(_address(job[8]), (n,), np.float32)
        at_a_time = job[9]
        while True:
            j = _take(job)
            if j >= jobs:
                break
            for r in range(j * at_a_time, min((j + 1) * at_a_time, rows)):
                a, b = r * n, (r + 1) * n
                _affine_row(x[a:b], f[a:b], scale, shift, y[a:b])

    return as_job(of, second)(add_affine_job)
