"""The block-wise storage format of Adam's moments m and v: codes of the ratio m / √v and of the root √v.

The codes of the root divide the range between the smallest and the largest positive root of a block. The steps are
equal in the order of float32 numbers, which is nearly logarithmic. A positive root therefore never becomes 0,
regardless of the range. The root 0 has a separate code. The ratio does not depend on this range, and is a signed square
of its code times a scale. Storing the ratio instead of m preserves Adam's bound on a step, because an error of the root
changes m and √v by the same factor.

With beta2 = 0.999, v changes by a thousandth per step, which rounding to nearest would lose. Codes are therefore
rounded stochastically by a hash of the position and the step, which is the same in every run. The ratio is unbiased.
The root is rounded up slightly more often, so that coarse codes make steps smaller rather than larger. Over thousands
of steps, this bias would accumulate until steps vanish. Each block therefore stores the mean rounding error of its
roots, the shift, and decoding adds the shift to each root. With 4 bits, the remaining errors grow to a fifth of a root
within about 60 steps. They increase the mean of 1 / √v by their square, 5 %, and the step is divided by the same
factor.

Source of blocks: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_ft.ops.storage.eight_bits import uniform

#: Number of values in a block.
BLOCK = 128
#: Tensors with fewer values are not quantized.
MIN_SIZE = 4096
#: Number of consecutive float32 numbers in one unit of the distance between codes, by number of bits.
UNIT = {8: 256, 4: 4096}
#: Resolution of the shift of a block, as a fraction of the distance between codes.
SHIFT = 2.0**-14
#: Relative growth of a step's divisor as rounding errors accumulate, by number of bits.
GROWTH = {8: 0.0, 4: 0.05}
#: Fraction of this growth that remains after each step.
GROWTH_LEFT = 0.97
#: The largest root, √(2^128), as an integer. Larger roots and NaN are stored as this value.
LARGEST = 0x5F7FFFFF
#: Lower bound of the largest ratio of a block.
SMALLEST = 1e-30


class Moments(NamedTuple):
    """Moments in the block-wise storage format.

    Attributes:
        ratio: Codes of m / √v, (n · bits / 8,) uint8. With 4 bits, a byte stores two codes, the first in its high half.
        ratio_scale: Ratio at code 1, (blocks,) float32.
        root: Codes of √v, (n · bits / 8,) uint8. Code 0 is exactly 0.
        root_range: Range of each block, (blocks, 3) int16: the upper half of the smallest positive root's bits, the
            distance between codes in units, and the shift.
    """

    ratio: Tensor
    ratio_scale: Tensor
    root: Tensor
    root_range: Tensor


def is_blockwise(size: int) -> bool:
    """Return True if the moments of a parameter are quantized: its size is a multiple of BLOCK and >= MIN_SIZE."""
    return size >= MIN_SIZE and size % BLOCK == 0


def empty_moments(size: int, bits: int, device: torch.device | None = None) -> Moments:
    """Return zero moments for a parameter of `size` values."""
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
    """Return the seed of stochastic rounding in a step."""
    return step * 0x9E3779B9 % 2**32


def quantize(m: Tensor, root: Tensor, bits: int, step: int) -> Moments:
    """Quantize moments.

    Args:
        m: First moment, (n,) float32, where n is a multiple of `BLOCK`.
        root: Root of v, (n,) float32.
        bits: Number of bits per code, 8 or 4.
        step: Number of the optimizer step, which determines the rounding.
    """
    noise = uniform(m.numel(), torch.tensor(seed_of(step)), m.device).view(-1, BLOCK)
    ratio, scale = _ratio_codes((m / root).view(-1, BLOCK), bits, noise * 4096 % 1)
    roots, range_ = _root_codes(root.view(-1, BLOCK), bits, noise)
    return Moments(_to_bytes(ratio, bits), scale, _to_bytes(roots, bits), range_)


def dequantize(moments: Moments, bits: int) -> tuple[Tensor, Tensor]:
    """Return m and v, (n,) float32 each."""
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
    """Return the codes (blocks, BLOCK) int32, and the scales (blocks,). A non-finite ratio becomes 0."""
    top, _ = levels(bits)
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    size = ratio.abs()
    scale = size.amax(1).clamp_min_(SMALLEST) * (1 / top**2)
    size = size * (1 / scale)[:, None]
    code = size.sqrt().floor_()
    up = noise * (2 * code + 1) < size - code * code  # the mean square of the rounded code equals the size
    code = (code + up).clamp_max_(top).int()
    return torch.where(ratio < 0, -code, code) + 2 ** (bits - 1), scale


def _root_codes(root: Tensor, bits: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes (blocks, BLOCK) int32, and the ranges (blocks, 3) int16."""
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
    # The bias towards rounding up increases with the number of octaves (2^23 numbers) between two codes.
    up = noise < rest + (one * 2.0**-22).clamp_max_(1) * (rest - rest * rest)
    code = (code + up).clamp_(0, top).int() + 1
    down = torch.where(positive, (rest * (1 / SHIFT)).int() - up * round(1 / SHIFT), 0)
    shift = down.sum(1) // positive.sum(1).clamp_min(1)
    return torch.where(positive, code, 0), torch.stack((low, distance, shift), 1).short()


def _to_bytes(codes: Tensor, bits: int) -> Tensor:
    codes = codes.view(-1).to(torch.uint8)
    return codes if bits == 8 else codes[::2] << 4 | codes[1::2]


def _from_bytes(codes: Tensor, bits: int) -> Tensor:
    """Return codes (blocks, BLOCK) int32."""
    if bits == 4:
        codes = torch.stack((codes >> 4, codes & 15), 1)
    return codes.view(-1, BLOCK).int()
