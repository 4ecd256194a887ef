"""CPU kernels of GELU in float32, compiled by numba. numba is optional: without it, torch's operations run."""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor

from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

_AT_A_TIME = 1 << 14  # number of values that a thread processes at a time
_PIECES = 64  # number of pieces of a map with separate sums; it does not depend on the number of threads

#: The compiled kernels, or None without numba.
_kernels = partial(optional_module, "efficient_ft.ops.gelu.numba_kernels")


def supports(x: Tensor) -> bool:
    """Return True if the kernels support this tensor."""
    real = type(x) in (Tensor, torch.nn.Parameter)  # a fake tensor has no data
    return real and x.device.type == "cpu" and x.dtype == torch.float32 and x.numel() > 0 and _kernels() is not None


def forward(x: Tensor, scale: Tensor | None, shift: Tensor | None, y: Tensor) -> None:
    """Write GELU(x · scale + shift) to y, a dense tensor with the layout of x.

    The layout is channels-last if `scale` and `shift` (C,) are given.
    """
    if scale is None or shift is None:
        _run(_kernels().forward(False), x, None, [x, y])
    else:
        _run(_kernels().forward(True), x, _AT_A_TIME // len(scale), [x, y, scale, shift], len(scale))


def backward(
    g: Tensor, x: Tensor, scale: Tensor | None, shift: Tensor | None, mean: Tensor | None, g_x: Tensor
) -> tuple[Tensor, Tensor] | None:
    """Write the gradient of x to g_x.

    Args:
        g, x, g_x: dense tensors of the same layout, channels-last with a scale.
        scale, shift: (C,), or both None.
        mean: (C,); None: no sums are computed.

    Returns:
        With a mean, Σ h and Σ h · (x - mean), (C,) each, where h is the gradient of x · scale + shift.
    """
    if scale is None or shift is None:
        _run(_kernels().backward(False, False), x, None, [g, x, g_x])
        return None
    n = len(scale)
    if mean is None:
        _run(_kernels().backward(True, False), x, _AT_A_TIME // n, [g, x, g_x, scale, shift], n)
        return None
    rows = x.numel() // n
    at_a_time = -(-rows // _PIECES)
    sums = x.new_empty(2, -(-rows // at_a_time), n)
    _run(_kernels().backward(True, True), x, at_a_time, [g, x, g_x, scale, shift, mean, *sums], n)
    of_shift, of_scale = sums.sum(1)
    return of_shift, of_scale


def _run(kernel: Any, x: Tensor, at_a_time: int | None, tensors: list[Tensor], n: int = 1) -> None:
    rows, at_a_time = x.numel() // n, max(1, _AT_A_TIME if at_a_time is None else at_a_time)
    run_in_threads(kernel, [-(-rows // at_a_time), at_a_time, rows, n, *(t.data_ptr() for t in tensors)])
