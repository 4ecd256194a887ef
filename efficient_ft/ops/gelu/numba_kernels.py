"""The numba kernels of GELU. Importing this module requires numba.

A job is a C function with one pointer argument, like the jobs in `ops.storage.kernels.numba_job`. For a tensor in
channels-last memory format, a row contains one value for each channel. For other tensors, a row contains a single
value, and scale and shift are not used.
"""
# mypy: ignore-errors
# mypy cannot check code that numba compiles.

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, float32, njit

from efficient_ft.ops.storage.kernels.numba_job import _address, _exp, _take, as_job

# `contract` fuses a product and a sum if the processor supports fused operations. Other fast-math options are disabled,
# so that the vectorized part of a loop and the remaining elements are computed in the same way.
_jit: Any = njit(nogil=True, boundscheck=False, error_model="numpy", fastmath={"contract"})

_SQRT_HALF = float32(0.5**0.5)
_DENSITY = float32((2 * np.pi) ** -0.5)
#: In float32, erf(t) is 1 for all t ≥ `_ONE`.
_ONE = float32(3.92)


@_jit
def _erf(t):
    """Compute erf(t) in float32 with the rational approximation of the Eigen library."""
    t = min(max(t, -_ONE), _ONE)
    s = t * t
    p = s * float32(-2.72614225801306e-10) + float32(2.77068142495902e-08)
    p = s * p + float32(-2.10102402082508e-06)
    p = s * p + float32(-5.69250639462346e-05)
    p = s * p + float32(-7.34990630326855e-04)
    p = s * p + float32(-2.95459980854025e-03)
    p = s * p + float32(-1.60960333262415e-02)
    q = s * float32(-1.45660718464996e-05) + float32(-2.13374055278905e-04)
    q = s * q + float32(-1.68282697438203e-03)
    q = s * q + float32(-7.37332916720468e-03)
    q = s * q + float32(-1.42647390514189e-02)
    return t * p / q


@_jit
def _cdf(u):
    t = u * _SQRT_HALF
    e = _erf(t)
    e = float32(1) if t >= _ONE else e
    e = float32(-1) if t <= -_ONE else e
    return float32(0.5) + float32(0.5) * e


@_jit
def _density(u):
    """Compute the normal density φ(u)."""
    return _exp(float32(-0.5) * u * u) * _DENSITY


@_jit
def _row(x, y):
    for i in range(len(x)):
        y[i] = x[i] * _cdf(x[i])


@_jit
def _affine_row(x, scale, shift, y):
    for i in range(len(x)):
        u = x[i] * scale[i] + shift[i]
        y[i] = u * _cdf(u)


@_jit
def _row_gradient(g, x, g_x):
    for i in range(len(x)):
        g_x[i] = g[i] * (_cdf(x[i]) + x[i] * _density(x[i]))


@_jit
def _affine_row_gradient(g, x, scale, shift, g_x):
    for i in range(len(x)):
        u = x[i] * scale[i] + shift[i]
        g_x[i] = g[i] * (_cdf(u) + u * _density(u)) * scale[i]


@_jit
def _affine_row_gradients(g, x, scale, shift, mean, g_x, of_shift, of_scale):
    for i in range(len(x)):
        u = x[i] * scale[i] + shift[i]
        h = g[i] * (_cdf(u) + u * _density(u))
        g_x[i] = h * scale[i]
        of_shift[i] += h
        of_scale[i] += h * (x[i] - mean[i])


@functools.cache
def forward(affine: bool) -> Any:
    """Compile the job that computes GELU of x, or GELU of x · scale + shift if `affine` is True."""

    def gelu_job(pointer):
        job = carray(pointer, 9)
        jobs, at_a_time, rows, n = job[1], job[2], job[3], job[4]
        size = rows * n
        x = carray(_address(job[5]), (size,), np.float32)
        y = carray(_address(job[6]), (size,), np.float32)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            first, last = j * at_a_time, min((j + 1) * at_a_time, rows)
            if affine:
                scale = carray(_address(job[7]), (n,), np.float32)
                shift = carray(_address(job[8]), (n,), np.float32)
                for r in range(first, last):
                    _affine_row(x[r * n : (r + 1) * n], scale, shift, y[r * n : (r + 1) * n])
            else:
                _row(x[first * n : last * n], y[first * n : last * n])

    return as_job(affine)(gelu_job)


@functools.cache
def backward(affine: bool, sums: bool) -> Any:
    """Compile the job that computes the gradient of x.

    If `sums` is True, the job also computes the sums for the gradients of scale and shift for each piece of x.
    """

    def gelu_backward_job(pointer):
        job = carray(pointer, 13)
        jobs, at_a_time, rows, n = job[1], job[2], job[3], job[4]
        size = rows * n
        g = carray(_address(job[5]), (size,), np.float32)
        x = carray(_address(job[6]), (size,), np.float32)
        g_x = carray(_address(job[7]), (size,), np.float32)
        while True:
            j = _take(job)
            if j >= jobs:
                break
            first, last = j * at_a_time, min((j + 1) * at_a_time, rows)
            if not affine:
                _row_gradient(g[first * n : last * n], x[first * n : last * n], g_x[first * n : last * n])
                continue
            scale = carray(_address(job[8]), (n,), np.float32)
            shift = carray(_address(job[9]), (n,), np.float32)
            if sums:
                mean = carray(_address(job[10]), (n,), np.float32)
                of_shift = carray(_address(job[11]), (jobs * n,), np.float32)[j * n : (j + 1) * n]
                of_scale = carray(_address(job[12]), (jobs * n,), np.float32)[j * n : (j + 1) * n]
                of_shift[:] = float32(0)
                of_scale[:] = float32(0)
                for r in range(first, last):
                    a, b = r * n, (r + 1) * n
                    _affine_row_gradients(g[a:b], x[a:b], scale, shift, mean, g_x[a:b], of_shift, of_scale)
            else:
                for r in range(first, last):
                    a, b = r * n, (r + 1) * n
                    _affine_row_gradient(g[a:b], x[a:b], scale, shift, g_x[a:b])

    return as_job(affine, sums)(gelu_backward_job)
