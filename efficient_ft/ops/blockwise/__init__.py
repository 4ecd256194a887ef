"""Block-wise storage of Adam's moments m and v, and the Adam step with these moments.

A block stores two codes for each value: a code of the ratio m / √v, and a code of the root √v. Storing the ratio
instead of m preserves Adam's bound on the size of a step, because an error of the root changes m and √v by the same
factor.

The codes of the root divide the range between the smallest and the largest positive root of the block into equal steps,
where the bits of a float32 root are interpreted as an integer. The codes are therefore nearly logarithmic, and a
positive root never becomes 0, regardless of the range of the roots. A separate code represents the root 0. The ratio is
the signed square of its code, multiplied by a scale, and does not depend on the range of the roots.

With beta2 = 0.999, v changes by about a thousandth per step. Rounding to the nearest code would discard such small
changes, so codes are rounded stochastically. The random numbers are hashes of the position and the step, so that every
run rounds in the same way. The rounding of the ratio is unbiased. The root is rounded up slightly more often than down,
so that rounding errors make steps smaller rather than larger. Over thousands of steps, the bias of the roots would
accumulate until the steps vanish. Each block therefore stores the mean rounding error of its roots, which is called the
shift. Decoding adds the shift to each root. With 4 bits, the remaining relative error of a root grows to about 0.2
within about 60 steps. A relative error of 0.2 increases the mean of 1 / √v by about 5 %, approximately the square of
the error. To compensate, the divisor of the step is increased by the same factor.

Each step updates the parameter with the new moments before these moments are quantized. The kernels use numba on a CPU
and Triton on a GPU. For the same gradients, the kernels compute the same codes as the reference implementation, unless
a difference in the last bit of a square root or a quotient changes the rounding. numba and Triton are optional. Without
these libraries, the reference implementation is used.

Sources: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022, for blocks;
Kingma, Ba, "Adam", ICLR 2015, Algorithm 1; Loshchilov, Hutter, "Decoupled Weight Decay Regularization", ICLR 2019,
Algorithm 2.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from efficient_ft.ops.optional import optional_module
from efficient_ft.ops.storage.eight_bits import uniform
from efficient_ft.ops.storage.kernels.cpu import run_in_threads

#: Number of values in a block.
BLOCK = 128
#: Minimum number of values that a tensor must have to be quantized.
MIN_SIZE = 4096
#: Unit of the distance between two root codes, in consecutive float32 values, for each number of bits per code.
UNIT = {8: 256, 4: 4096}
#: Resolution of the shift of a block, as a fraction of the distance between codes.
SHIFT = 2.0**-14
#: Relative increase of a step's divisor that compensates for accumulated rounding errors, for each number of bits.
GROWTH = {8: 0.0, 4: 0.05}
#: The relative increase of the divisor after n steps is GROWTH · (1 − GROWTH_LEFT^n).
GROWTH_LEFT = 0.97
#: Bits of the largest root (just below √(2^128)) as an integer. Larger roots and NaN are stored as this value.
LARGEST = 0x5F7FFFFF
#: Lower bound for the largest ratio in a block. The bound ensures that the scale is not 0.
SMALLEST = 1e-30

_AT_A_TIME = 1 << 14  # number of values that a CPU thread updates at a time
_ROWS = 8  # number of blocks that one GPU program updates


class Moments(NamedTuple):
    """Moments in the block-wise storage format.

    Attributes:
        ratio: Codes of m / √v, (n · bits / 8,) uint8. With 4 bits, each byte stores two codes (the first code in the
            four high bits).
        ratio_scale: Scale of the ratio in each block, which is the ratio for the signed code 1, (blocks,) float32.
        root: Codes of √v, (n · bits / 8,) uint8. Code 0 represents the root 0.
        root_range: Range of each block, (blocks, 3) int16. The columns contain the upper half of the bits of the
            smallest positive root, the distance between codes in multiples of `UNIT`, and the shift in multiples of
            `SHIFT`.
    """

    ratio: Tensor
    ratio_scale: Tensor
    root: Tensor
    root_range: Tensor


def is_blockwise(size: int) -> bool:
    """Return True if the moments are quantized: `size` must be at least `MIN_SIZE` and a multiple of `BLOCK`."""
    return size >= MIN_SIZE and size % BLOCK == 0


def empty_moments(size: int, bits: int, device: torch.device | None = None) -> Moments:
    """Return zero-initialized moments for a parameter with `size` values."""
    blocks, codes = size // BLOCK, size * bits // 8
    return Moments(
        torch.zeros(codes, dtype=torch.uint8, device=device),
        torch.zeros(blocks, dtype=torch.float32, device=device),
        torch.zeros(codes, dtype=torch.uint8, device=device),
        torch.zeros(blocks, 3, dtype=torch.int16, device=device),
    )


def levels(bits: int) -> tuple[int, int]:
    """Return the largest code of the ratio, and the number of steps from the smallest to the largest positive root."""
    return 2 ** (bits - 1) - 1, 2**bits - 2


def seed_of(step: int) -> int:
    """Return the seed for stochastic rounding in an optimizer step."""
    return step * 0x9E3779B9 % 2**32


def quantize(m: Tensor, root: Tensor, bits: int, step: int) -> Moments:
    """Quantize moments.

    Args:
        m: First moment, (n,) float32, where n is a multiple of `BLOCK`.
        root: Square root of the second moment v, (n,) float32.
        bits: Number of bits per code, 8 or 4.
        step: Number of the optimizer step. The stochastic rounding depends on this number.
    """
    noise = uniform(m.numel(), torch.tensor(seed_of(step)), m.device).view(-1, BLOCK)
    ratio, scale = _ratio_codes((m / root).view(-1, BLOCK), bits, noise * 4096 % 1)
    roots, range_ = _root_codes(root.view(-1, BLOCK), bits, noise)
    return Moments(_to_bytes(ratio, bits), scale, _to_bytes(roots, bits), range_)


def dequantize(moments: Moments, bits: int) -> tuple[Tensor, Tensor]:
    """Return m and v, each (n,) float32, restored from their codes."""
    ratio, roots = (_from_bytes(codes, bits) for codes in (moments.ratio, moments.root))
    low, distance, shift = moments.root_range.int().unbind(1)
    one = distance * UNIT[bits]
    shifted = (low << 16) + (shift.float() * one.float() * SHIFT).int()
    integers = ((roots - 1) * one[:, None]).add_(shifted[:, None]).clamp_(1, LARGEST)
    root = integers.view(torch.float32).mul_(roots > 0)
    signed = ratio - 2 ** (bits - 1)
    m = (signed * signed.abs()).float() * moments.ratio_scale[:, None] * root
    return m.view(-1), (root * root).view(-1)


def _ratio_codes(ratio: Tensor, bits: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the ratios, (blocks, BLOCK) int32, and the scales, (blocks,). Non-finite ratios become 0."""
    top, _ = levels(bits)
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    size = ratio.abs()
    scale = size.amax(1).clamp_min_(SMALLEST) * (1 / top**2)
    size = size * (1 / scale)[:, None]
    code = size.sqrt().floor_()
    up = noise * (2 * code + 1) < size - code * code  # the expected square of the rounded code is `size`
    code = (code + up).clamp_max_(top).int()
    return torch.where(ratio < 0, -code, code) + 2 ** (bits - 1), scale


def _root_codes(root: Tensor, bits: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes of the roots, (blocks, BLOCK) int32, and the ranges, (blocks, 3) int16."""
    _, top = levels(bits)
    integers = (root.view(torch.int32) & 0x7FFFFFFF).clamp_max_(LARGEST)
    positive = integers > 0
    low = torch.where(positive, integers, LARGEST).amin(1) >> 16
    span = integers.amax(1) - (low << 16)
    distance = ((span + (top * UNIT[bits] - 1)) // (top * UNIT[bits])).clamp_min_(1)
    one = (distance * UNIT[bits]).float()[:, None]
    place = (integers - (low << 16)[:, None]).float() * (1 / one)
    code = place.floor()
    rest = place - code
    # The bias towards rounding up increases with the distance between two codes, up to half an octave (2^22 floats).
    up = noise < rest + (one * 2.0**-22).clamp_max_(1) * (rest - rest * rest)
    code = (code + up).clamp_(0, top).int() + 1
    down = torch.where(positive, (rest * (1 / SHIFT)).int() - up * round(1 / SHIFT), 0)
    shift = down.sum(1) // positive.sum(1).clamp_min(1)
    return torch.where(positive, code, 0), torch.stack((low, distance, shift), 1).short()


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    codes = codes.view(-1).to(torch.uint8)
    return codes if bits == 8 else codes[::2] << 4 | codes[1::2]


def _from_bytes(codes: Tensor, bits: int) -> Tensor:
    """Unpack codes into an int32 tensor of shape (blocks, BLOCK)."""
    if bits == 4:
        codes = torch.stack((codes >> 4, codes & 15), 1)
    return codes.view(-1, BLOCK).int()


class AdamStep(NamedTuple):
    """Settings of an AdamW step (if `decoupled` is True) or of an Adam step. Steps are numbered from 1."""

    lr: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    decoupled: bool
    step: int

    def factors(self, growth: float = 0.0) -> tuple[float, ...]:
        """Return the factors of the update formulas, in the order that `dense_step` and the kernels expect.

        `growth` is the limit of the relative increase of the divisor for many steps (see `GROWTH`). The increase
        compensates for rounding errors.
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
    """Update a parameter and its block-wise moments in place. Each code has 8 or 4 bits.

    `p` and `grad` must be contiguous float32 tensors of shape (n,). `grad` is not changed.
    """
    if not supports(p):
        adam_step_reference(p, grad, moments, bits, step)
    elif p.device.type == "cpu":
        _on_cpu(p, grad, moments, bits, step)
    else:
        _on_gpu(p, grad, moments, bits, step)


def supports(x: Tensor) -> bool:
    """Return True if a kernel supports the device and dtype of `x`."""
    return x.dtype == torch.float32 and x.numel() > 0 and _kernels(x.device.type) is not None


def _on_cpu(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    at_a_time, n = _AT_A_TIME // BLOCK, p.numel()
    numbers = np.array([*step.factors(GROWTH[bits]), SMALLEST], np.float32)
    addresses = [t.data_ptr() for t in (p, grad, *moments)]
    job = [-(-(n // BLOCK) // at_a_time), at_a_time, n, *addresses, numbers.ctypes.data, seed_of(step.step)]
    run_in_threads(_kernels("cpu").adam_step(bits), job)


def _on_gpu(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    blocks, seed, (ratio_top, root_top) = p.numel() // BLOCK, seed_of(step.step), levels(bits)
    numbers = torch.tensor([*step.factors(GROWTH[bits]), SMALLEST], dtype=torch.float32)
    with torch.cuda.device_of(p):
        _kernels("cuda").adam_step[(-(-blocks // _ROWS),)](
            p, grad, *moments, numbers.to(p.device, non_blocking=True), seed - (seed >> 31 << 32), blocks, BITS=bits,
            ROWS=_ROWS, SIZE=BLOCK, RATIO_TOP=ratio_top, ROOT_TOP=root_top, UNIT=UNIT[bits], LARGEST=LARGEST,
            SHIFTS=round(1 / SHIFT),
        )  # fmt: skip


def _kernels(device: str) -> Any:
    name = {"cpu": "numba_kernels", "cuda": "triton_kernels"}.get(device)
    return name and optional_module(f"efficient_ft.ops.blockwise.{name}")


def adam_step_reference(p: Tensor, grad: Tensor, moments: Moments, bits: int, step: AdamStep) -> None:
    """Compute `adam_step` in plain PyTorch (reference implementation)."""
    m, v = dequantize(moments, bits)
    root = dense_step(p, grad, m, v, step, GROWTH[bits])
    for held, new in zip(moments, quantize(m, root, bits, step.step), strict=True):
        held.copy_(new)


def dense_step(p: Tensor, grad: Tensor, m: Tensor, v: Tensor, step: AdamStep, growth: float = 0.0) -> Tensor:
    """Update a parameter and its moments m and v in place, and return the root of v.

    All tensors are float32 and have the same shape. `AdamStep.factors` describes `growth`. Every product is rounded
    before it is added, as in the kernels. ``add_(x, alpha=a)`` and ``lerp_`` are not used, because these operations
    round only after the addition.
    """
    l2, decay, beta1, rest1, beta2, rest2, correction, eps, rate = step.factors(growth)
    if l2:
        grad = p * l2 + grad
    m.mul_(beta1).add_(grad * rest1)
    v.mul_(beta2).add_((grad * grad).mul_(rest2))
    root = v.sqrt()
    p.mul_(decay).sub_((m / (root * correction).add_(eps)).mul_(rate))
    return root
