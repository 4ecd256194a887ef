"""A step of Adam or AdamW with block-wise moments.

Sources: Kingma, Ba, "Adam", ICLR 2015, Algorithm 1; Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR
2019, Algorithm 2. The step uses the moments before they are quantized again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from efficient_ft.ops.blockwise import kernels
from efficient_ft.ops.blockwise.form import GROWTH, GROWTH_LEFT, Moments, dequantize, quantize


class AdamStep(NamedTuple):
    """The settings of one step.

    Attributes:
        lr: learning rate.
        beta1, beta2: decay rates of the moments.
        eps: constant added to the root of the second moment.
        weight_decay: coefficient of the weight decay.
        decoupled: True for decoupled weight decay (AdamW); False adds it to the gradient (Adam).
        step: number of the step, from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    def factors(self, growth: float = 0.0) -> tuple[float, ...]:
        """Return the factors of the formulas, in the order of `kernels.adam_step`.

        Args:
            growth: relative growth of the divisor as rounding errors accumulate (`form.GROWTH`).
        """
        return (
            0.0 if self.decoupled else self.weight_decay,
            1 - self.lr * self.weight_decay if self.decoupled else 1.0,
            self.beta1,
            1 - self.beta1,
            self.beta2,
            1 - self.beta2,
            (1 + growth * (1 - GROWTH_LEFT**self.step)) * (1 - self.beta2**self.step) ** -0.5,
            self.eps,
            self.lr / (1 - self.beta1**self.step),
        )


def adam_step(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    """Update a parameter and its block-wise moments in place.

    Args:
        p: (n,) float32, contiguous.
        grad: (n,) float32, contiguous. It is not changed.
        moments: moments of the parameter.
        bits: bits per code, 8 or 4.
        step: the settings of the step.
    """
    if kernels.supports(p):
        kernels.adam_step(p, grad, moments, bits, step.factors(GROWTH[bits]), step.step)
    else:
        adam_step_reference(p, grad, moments, bits, step)


def adam_step_reference(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    """Reference implementation of `adam_step` in plain PyTorch."""
    m, v = dequantize(moments, bits)
    root = dense_step(p, grad, m, v, step, GROWTH[bits])
    for held, new in zip(moments, quantize(m, root, bits, step.step), strict=True):
        held.copy_(new)


def dense_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: AdamStep, growth: float = 0.0) -> Tensor:
    """Update a parameter and its moments m and v, float32 tensors of one shape, in place; return the root of v.

    See `AdamStep.factors` for `growth`. Every product is rounded before it is added, like in the kernel, whereas
    ``add_(x, alpha=a)`` and ``lerp_`` round once.
    """
    l2, decay, beta1, rest1, beta2, rest2, correction, eps, rate = step.factors(growth)
    if l2:
        grad = p * l2 + grad
    m.mul_(beta1).add_(grad * rest1)
    v.mul_(beta2).add_((grad * grad).mul_(rest2))
    root = v.sqrt()
    p.mul_(decay).sub_((m / (root * correction).add_(eps)).mul_(rate))
    return root
