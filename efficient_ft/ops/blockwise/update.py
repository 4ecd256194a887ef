"""One step of Adam or AdamW over moments that are kept block-wise.

Sources: Kingma, Ba, "Adam", ICLR 2015, algorithm 1; Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR
2019, algorithm 2. The step uses the moments before they are quantized again.
"""

from __future__ import annotations

from typing import NamedTuple

from torch import Tensor

from efficient_ft.ops.blockwise import kernels
from efficient_ft.ops.blockwise.form import GROWTH, GROWTH_LEFT, Moments, dequantize, quantize


class AdamStep(NamedTuple):
    """The numbers of one step.

    Attributes:
        lr: learning rate.
        beta1, beta2: decay of the moments.
        eps: added to the root of the second moment.
        weight_decay: decoupled (AdamW), or added to the gradient (Adam).
        decoupled: which of the two.
        step: number of this step, from 1.
    """

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    def factors(self, growth: float = 0.0) -> tuple[float, ...]:
        """Return what the formulas multiply by, in the order of `kernels.adam_step`.

        Args:
            growth: of the divisor, relative, as rounding errors build up (`form.GROWTH`).
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
    """Update a parameter and its block-wise moments, in place.

    Args:
        p: (n,) float32, contiguous.
        grad: (n,) float32, contiguous; not changed.
        moments: of the parameter; updated.
        bits: of the codes, 8 or 4.
        step: the numbers of the step.
    """
    if kernels.supports(p):
        kernels.adam_step(p, grad, moments, bits, step.factors(GROWTH[bits]), step.step)
    else:
        adam_step_reference(p, grad, moments, bits, step)


def adam_step_reference(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    """Compute `adam_step` in plain torch."""
    m, v = dequantize(moments, bits)
    root = dense_step(p, grad, m, v, step, GROWTH[bits])
    for held, new in zip(moments, quantize(m, root, bits, step.step), strict=True):
        held.copy_(new)


def dense_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: AdamStep, growth: float = 0.0) -> Tensor:
    """Update a parameter and its moments m and v, all float32 of one shape, in place; return the root of v.

    For `growth` see `AdamStep.factors`. Every product is rounded before it is added, as in the kernel;
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
