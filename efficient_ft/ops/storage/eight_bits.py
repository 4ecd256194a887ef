"""8-bit format, which divides the range of each group into 255 steps and uses unbiased stochastic rounding.

Source: Mesa (Pan et al., 2021).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.storage.kernels import cpu, kernels_for


def quantize(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """Quantize x to 256 levels between `low` and `high`.

    Values are rounded up or down at random, so that the expected value is x.

    Args:
        x: Tensor, (outer, G, inner) of any floating dtype.
        low, high: Range of each group, (G,) float32. Values outside the range are clamped.
        seed: Seed, () int64. Equal seeds and inputs give equal results on every device.

    Returns:
        Codes, (outer, G, inner) uint8.
    """
    if isinstance(x, FakeTensor):
        return x.new_empty(x.shape, dtype=torch.uint8)
    if kernels := kernels_for(x):
        return kernels.quantize(x, low, high, seed)
    return quantize_reference(x, low, high, seed)


def quantize_reference(x: Tensor, low: Tensor, high: Tensor, seed: Tensor) -> Tensor:
    """Compute `quantize` in plain PyTorch (reference implementation)."""
    steps = 255 / (high - low).clamp_min(1e-30)
    scaled = (x.float() - low[:, None]) * steps[:, None]
    return (scaled + uniform(x.numel(), seed, x.device).view(x.shape)).floor_().clamp_(0, 255).to(torch.uint8)


def uniform(count: int, seed: Tensor, device: torch.device) -> Tensor:
    """Return `count` uniform multiples of 2⁻²⁴ in [0, 1): hashes of position and seed."""
    return (hashes(count, seed, device) >> 8).float() * 2.0**-24


def hashes(count: int, seed: Tensor, device: torch.device) -> Tensor:
    """Return `count` hashes of position and seed (Wellons' lowbias32), (count,) int64 with values below 2³²."""
    mask = 0xFFFFFFFF
    h = (torch.arange(count, device=device, dtype=torch.int64) + seed.to(device)) & mask
    h = ((h ^ (h >> 16)) * 0x7FEB352D) & mask
    h = ((h ^ (h >> 15)) * 0x846CA68B) & mask
    return h ^ (h >> 16)


def dequantize(q: Tensor, low: Tensor, high: Tensor, dtype: torch.dtype = torch.float32) -> Tensor:
    """Convert uint8 codes q (outer, G, inner) to values of `dtype` between `low` (G,) and `high` (G,)."""
    if isinstance(q, FakeTensor):
        return low.new_empty(q.shape, dtype=dtype)
    if q.numel() and (kernels := kernels_for(low)):
        return kernels.dequantize(q, low, high, dtype)
    return dequantize_reference(q, low, high).to(dtype)


def dequantize_reference(q: Tensor, low: Tensor, high: Tensor) -> Tensor:
    """Compute `dequantize` in plain PyTorch and in float32 (reference implementation)."""
    return low[:, None] + q.float() * ((high - low) / 255)[:, None]


def extremes(x: Tensor, old: tuple[Tensor, Tensor] | None = None, share: float = 1.0) -> tuple[Tensor, Tensor]:
    """Return the minimum and the maximum of each group of x (outer, G, inner), each (G,) float32.

    If `old` ranges are given, they are moved by the fraction `share` towards the minimum and the maximum, and the
    moved ranges are returned.
    """
    if isinstance(x, FakeTensor):
        return x.new_empty(x.shape[1], dtype=torch.float32), x.new_empty(x.shape[1], dtype=torch.float32)
    kernels = kernels_for(x)
    if kernels is cpu:
        return cpu.extremes(x, old, share)
    low, high = extremes_reference(x) if kernels is None else kernels.extremes(x)
    return (low, high) if old is None else (old[0].lerp(low, share), old[1].lerp(high, share))


def extremes_reference(x: Tensor) -> tuple[Tensor, Tensor]:
    """Compute `extremes` in plain PyTorch (reference implementation)."""
    return x.amin((0, 2)).float(), x.amax((0, 2)).float()
