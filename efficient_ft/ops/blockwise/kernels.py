"""The kernels of the block-wise Adam step: numba on a CPU, Triton on a GPU.

For equal gradients, their codes equal those of the reference implementation, except where the last bit of a square root
or a quotient decides. Both libraries are optional: without them, the reference implementation runs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efficient_ft.ops.blockwise.form import BLOCK, LARGEST, SHIFT, SMALLEST, UNIT, Moments, levels, seed_of
from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

_AT_A_TIME = 1 << 14  # number of values that a CPU thread updates at a time
_ROWS = 8  # number of blocks that a GPU program updates


def supports(x: Tensor) -> bool:
    """Return True if a kernel supports this tensor."""
    return x.dtype == torch.float32 and x.numel() > 0 and _kernels(x.device.type) is not None


def adam_step(p: Tensor, grad: Tensor, moments: Moments, bits: int, factors: Sequence[float], step: int) -> None:
    """Compute `blockwise.adam_step` with the `factors` and the number of the step."""
    (_on_cpu if p.device.type == "cpu" else _on_gpu)(p, grad, moments, bits, factors, seed_of(step))


def _on_cpu(p: Tensor, grad: Tensor, moments: Moments, bits: int, factors: Sequence[float], seed: int) -> None:
    at_a_time, n = _AT_A_TIME // BLOCK, p.numel()
    numbers = np.array([*factors, SMALLEST], np.float32)
    addresses = [t.data_ptr() for t in (p, grad, *moments)]
    jobs = -(-(n // BLOCK) // at_a_time)
    run_in_threads(_kernels("cpu").adam_step(bits), [jobs, at_a_time, n, *addresses, numbers.ctypes.data, seed])


def _on_gpu(p: Tensor, grad: Tensor, moments: Moments, bits: int, factors: Sequence[float], seed: int) -> None:
    blocks, (ratio_top, root_top) = p.numel() // BLOCK, levels(bits)
    numbers = torch.tensor([*factors, SMALLEST], dtype=torch.float32).to(p.device, non_blocking=True)
    with torch.cuda.device_of(p):
        _kernels("cuda").adam_step[(-(-blocks // _ROWS),)](
            p, grad, *moments, numbers, seed - (seed >> 31 << 32), blocks, BITS=bits, ROWS=_ROWS, SIZE=BLOCK,
            RATIO_TOP=ratio_top, ROOT_TOP=root_top, UNIT=UNIT[bits], LARGEST=LARGEST, SHIFTS=round(1 / SHIFT),
        )  # fmt: skip


def _kernels(device: str) -> Any:
    name = {"cpu": "numba_kernels", "cuda": "triton_kernels"}.get(device)
    return name and optional_module(f"efficient_ft.ops.blockwise.{name}")
