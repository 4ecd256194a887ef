"""The kernels of the block-wise step: numba's on a CPU, Triton's on a GPU.

From the same gradients they find the codes of the plain torch form, except where the last bit of a square root or a
quotient decides. Optional: without numba or Triton the plain torch form is used.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from efficient_ft.ops.blockwise.form import BLOCK, LARGEST, SHIFT, SMALLEST, UNIT, Moments, levels, seed_of
from efficient_ft.ops.storage.kernels.cpu import _run as run_in_threads

_AT_A_TIME = 1 << 14  # values that a thread of a CPU updates at a time
_ROWS = 8  # blocks that a program of a GPU updates


def supports(x: Tensor) -> bool:
    """Return whether a kernel takes this tensor."""
    return x.dtype == torch.float32 and x.numel() > 0 and _kernels(x.device.type) is not None


def adam_step(p: Tensor, grad: Tensor, moments: Moments, bits: int, factors: Sequence[float], step: int) -> None:
    """Compute `blockwise.adam_step` with the `factors` and the number of its step."""
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


@functools.cache
def _kernels(device: str) -> Any:
    name = {"cpu": "numba_kernels", "cuda": "triton_kernels"}.get(device)
    if name is None:
        return None
    try:
        return importlib.import_module(f"efficient_ft.ops.blockwise.{name}")
    except ImportError:
        return None
