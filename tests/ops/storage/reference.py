"""A naive NumPy implementation of sparse packing, test data, and bitwise comparisons."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from efficient_ft.ops.storage import sparse
from efficient_ft.ops.storage.kernels import cpu

DTYPES = [torch.float64, torch.float32, torch.float16, torch.bfloat16]
INTEGERS = {2: torch.int16, 4: torch.int32, 8: torch.int64}
KINDS = ["normal", "rounded", "half zero", "zero", "sorted", "misleading"]
needs_numba = pytest.mark.skipif(cpu._kernels() is None, reason="the CPU kernels need numba")


def budget(n: int, sparsity: float) -> int:
    k = min(max(math.floor(n * sparsity), 1), n)
    return n - k + 1


def kept_mask(x_SN: Tensor, sparsity: float) -> np.ndarray:
    """Return a mask (S, n) of the kept values of each sample. Ties at the threshold keep the first values."""
    keep = np.zeros(x_SN.shape, bool)
    for s, row in enumerate(x_SN.double().abs().numpy()):
        kept = budget(len(row), sparsity)
        threshold = np.sort(row)[len(row) - kept]
        keep[s] = row > threshold
        room = kept - keep[s].sum()
        keep[s, np.flatnonzero(row == threshold)[:room]] = True
    return keep


def form_of(x_SN: Tensor, keep: np.ndarray, kept: int) -> tuple[Tensor, Tensor]:
    """Return the kept values (S, kept) and the bitmap of the mask `keep`."""
    values = x_SN.new_zeros(len(x_SN), kept)
    for s, mask in enumerate(keep):
        values[s, : mask.sum()] = x_SN[s][torch.from_numpy(mask)]
    return values, torch.from_numpy(np.packbits(keep, axis=1, bitorder="little"))


def mask_of(bitmap: Tensor, n: int) -> np.ndarray:
    return np.unpackbits(bitmap.numpy(), axis=1, bitorder="little")[:, :n].astype(bool)


def data(kind: str, shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Tensor:
    """Return test values, including values for which a threshold estimate is difficult."""
    x = torch.randn(shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    if kind == "rounded":
        x = (2 * x).round() / 2
    elif kind == "half zero":
        x = x.clamp_min(0)
    elif kind == "zero":
        x[:: 2 if len(x) > 1 else 1] = 0
    elif kind == "sorted":
        x = x.flatten(1).sort(1).values.view(shape)
    elif kind == "misleading":  # the subsample contains only large values
        rows = x.view(len(x), -1)
        rows[:, looked_at(rows.shape[1])] += 100
    return x.to(dtype)


def looked_at(n: int) -> Tensor:
    """Return the indices of the subsample of a row."""
    return torch.arange(min(sparse.SUBSAMPLE, n // 2)) * sparse.subsample_stride(n) % n


def assert_same_bits(a: Tensor, b: Tensor) -> None:
    assert a.dtype == b.dtype
    integer = INTEGERS.get(a.element_size(), torch.uint8)
    assert torch.equal(a.contiguous().view(integer), b.contiguous().view(integer))


def assert_same_form(found: tuple[Tensor, Tensor], expected: tuple[Tensor, Tensor]) -> None:
    for a, b in zip(found, expected, strict=True):
        assert_same_bits(a, b)


def packs() -> list:
    """Return the reference implementation and the default implementation of packing."""
    return [sparse.sparse_pack_reference, sparse.sparse_pack]


def unpacks() -> list:
    return [sparse.sparse_unpack_reference, sparse.sparse_unpack]


SHAPES = [(3, 4, 17), (5, 1, 1023), (200, 3, 50), (2, 3, 1024), (1, 1, 40001), (40, 2, 1500), (1, 1, 1)]


def groups(shape: tuple[int, int, int], dtype: torch.dtype = torch.float32) -> tuple[Tensor, Tensor, Tensor]:
    """Return x and a range for each group. The groups become narrower, and some values exceed their range."""
    scale = 8.0 ** -torch.arange(shape[1])
    x = data("normal", shape, torch.float64) * scale[:, None]
    high = 1.5 * scale
    return x.to(dtype), -0.8 * high, high
