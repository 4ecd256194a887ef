"""A step of Adam or AdamW with block-wise moments, in kernels (numba on a CPU, Triton on a GPU) or in plain PyTorch.

Sources: Kingma, Ba, "Adam", ICLR 2015, Algorithm 1; Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR
2019, Algorithm 2. The step uses the moments before they are quantized again.

For equal gradients, the codes of the kernels equal those of the reference implementation, except where the last bit of
a square root or a quotient decides. Both libraries are optional. Without them, the reference implementation runs.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from efficient_ft.ops.blockwise import form
from efficient_ft.ops.blockwise.form import BLOCK, GROWTH, Moments, dequantize, quantize
from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

_AT_A_TIME = 1 << 14  # number of values that a CPU thread updates at a time
_ROWS = 8  # number of blocks that a GPU program updates


class AdamStep(NamedTuple):
    """The settings of one step.

    Attributes:
        lr: Learning rate.
        beta1, beta2: Decay rates of the moments.
        eps: Constant added to the root of the second moment.
        weight_decay: Coefficient of the weight decay.
        decoupled: True for decoupled weight decay (AdamW). False adds the weight decay to the gradient (Adam).
        step: Number of the step, starting at 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    def factors(self, growth: float = 0.0) -> tuple[float, ...]:
        """Return the factors of the formulas, in the order in which `dense_step` and the kernels read them.

        `growth` is the relative growth of the divisor as rounding errors accumulate (`form.GROWTH`).
        """
        return (
            0.0 if self.decoupled else self.weight_decay,
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            (1 + growth * (1 - form.GROWTH_LEFT**self.step)) * (1 - self.beta2**self.step) ** -0.5,
            self.eps,
            self.lr / (1 - self.beta1**self.step),
        )


def adam_step(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    """Update a parameter and its block-wise moments in place.

    Args:
        p: Parameter, (n,) float32, contiguous.
        grad: Gradient, (n,) float32, contiguous. It is not changed.
        moments: Moments of the parameter.
        bits: Number of bits per code, 8 or 4.
        step: Settings of the step.
    """
    if not supports(p):
        adam_step_reference(p, grad, moments, bits, step)
    elif p.device.type == "cpu":
        _on_cpu(p, grad, moments, bits, step)
    else:
        _on_gpu(p, grad, moments, bits, step)


def supports(x: Tensor) -> bool:
    """Return True if a kernel supports this tensor."""
    return x.dtype == torch.float32 and x.numel() > 0 and _kernels(x.device.type) is not None


def _on_cpu(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    at_a_time, n = _AT_A_TIME // BLOCK, p.numel()
    numbers = np.array([*step.factors(GROWTH[bits]), form.SMALLEST], np.float32)
    addresses = [t.data_ptr() for t in (p, grad, *moments)]
    job = [-(-(n // BLOCK) // at_a_time), at_a_time, n, *addresses, numbers.ctypes.data, form.seed_of(step.step)]
    run_in_threads(_kernels("cpu").adam_step(bits), job)


def _on_gpu(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    blocks, seed, (ratio_top, root_top) = p.numel() // BLOCK, form.seed_of(step.step), form.levels(bits)
    numbers = torch.tensor([*step.factors(GROWTH[bits]), form.SMALLEST], dtype=torch.float32)
    with torch.cuda.device_of(p):
        _kernels("cuda").adam_step[(-(-blocks // _ROWS),)](
            p, grad, *moments, numbers.to(p.device, non_blocking=True), seed - (seed >> 31 << 32), blocks, BITS=bits,
            ROWS=_ROWS, SIZE=BLOCK, RATIO_TOP=ratio_top, ROOT_TOP=root_top, UNIT=form.UNIT[bits], LARGEST=form.LARGEST,
            SHIFTS=round(1 / form.SHIFT),
        )  # fmt: skip


def _kernels(device: str) -> Any:
    name = {"cpu": "numba_kernels", "cuda": "triton_kernels"}.get(device)
    return name and optional_module(f"efficient_ft.ops.blockwise.{name}")


def adam_step_reference(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    """Reference implementation of `adam_step` in plain PyTorch."""
    m, v = dequantize(moments, bits)
    root = dense_step(p, grad, m, v, step, GROWTH[bits])
    for held, new in zip(moments, quantize(m, root, bits, step.step), strict=True):
        held.copy_(new)


def dense_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: AdamStep, growth: float = 0.0) -> Tensor:
    """Update a parameter and its moments m and v in place, and return the root of v.

    All tensors are float32 and have the same shape. `AdamStep.factors` describes `growth`. Every product is rounded
    before it is added, like in the kernel, whereas ``add_(x, alpha=a)`` and ``lerp_`` round once.
    """
    l2, decay, beta1, rest1, beta2, rest2, correction, eps, rate = step.factors(growth)
    if l2:
        grad = p * l2 + grad
    m.mul_(beta1).add_(grad * rest1)
    v.mul_(beta2).add_((grad * grad).mul_(rest2))
    root = v.sqrt()
    p.mul_(decay).sub_((m / (root * correction).add_(eps)).mul_(rate))
    return root
