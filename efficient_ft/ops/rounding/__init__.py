"""Stochastic rounding of float32 tensors to bfloat16.

A value is rounded to one of the two neighboring bfloat16 values, such that the expected value is the value itself.
Small updates of a weight are therefore preserved on average. Rounding to nearest discards every update that is smaller
than half the distance to the next bfloat16 value, which is 2^-9 to 2^-8 of the weight.

The random numbers are hashes of the position in memory and the seed, so that equal seeds give equal results on every
device, independently of torch's random generators.

Source: Gupta, Agrawal, Gopalakrishnan, Narayanan, "Deep Learning with Limited Numerical Precision", ICML 2015.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensor

from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.eight_bits import hashes
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

_AT_A_TIME = 1 << 15  # number of values that a CPU thread rounds at a time
_PART = 1 << 24  # number of values that the reference implementation rounds at a time, which bounds its temporaries


def round_to_bf16(source: Tensor, target: Tensor, seed: int) -> None:
    """Round `source` stochastically, and write the result to `target`. NaN and infinity are preserved.

    Args:
        source: Tensor of dtype float32.
        target: Tensor of dtype bfloat16 with the shape of `source`.
        seed: Seed of the random numbers, an integer >= 0 and < 2^32.
    """
    if isinstance(target, FakeTensor):
        return
    flat = _in_memory_order(source, target)
    if flat is None:
        rounded = torch.empty(target.shape, dtype=target.dtype, device=target.device)
        round_to_bf16(source.contiguous(), rounded, seed)
        target.copy_(rounded)
        return
    kernels = _kernels() if source.device.type == "cpu" and source.numel() else None
    if kernels is None:
        round_reference(*flat, seed)
        return
    n = source.numel()
    run_in_threads(kernels.round_to_bf16(), [-(-n // _AT_A_TIME), _AT_A_TIME, n, seed, *(t.data_ptr() for t in flat)])


def round_reference(source: Tensor, target: Tensor, seed: int) -> None:
    """Compute `round_to_bf16` for contiguous tensors (n,) in plain PyTorch (reference implementation)."""
    for start in range(0, source.numel(), _PART):
        x, y = source[start : start + _PART], target[start : start + _PART]
        # A hash has 32 bits. Its upper half is added to the 16 bits that the conversion drops.
        noise = hashes(x.numel(), torch.tensor(seed + start), x.device).bitwise_right_shift_(16)
        bits = noise.add_(x.view(torch.int32)).bitwise_right_shift_(16)
        y.copy_(torch.where(x.isfinite(), bits.to(torch.int16).view(torch.bfloat16), x.bfloat16()))


def _in_memory_order(source: Tensor, target: Tensor) -> tuple[Tensor, Tensor] | None:
    """Return views (n,) of both tensors in memory order, or None if their memory layouts differ or have gaps."""
    order = sorted(range(source.dim()), key=source.stride().__getitem__, reverse=True)
    if source.stride() != target.stride() or not source.permute(order).is_contiguous():
        return None
    return source.permute(order).view(-1), target.permute(order).view(-1)


def _kernels() -> Any:
    return optional_module("efficient_ft.ops.rounding.numba_kernels")
