"""The block-wise form of Adam's moments m and v: codes of the ratio m / √v and of the root √v.

A code of the root counts equal steps between the smallest and the largest positive root of its block, in the order of
float32 numbers: nearly a logarithm. A positive root never becomes 0, however far the roots of a block are spread; 0 has
a code of its own. The ratio, which no spread affects, is a signed square of its code. Storing the ratio rather than m
keeps Adam's bound on a step: an error of the root changes m and √v by the same factor.

v changes by a thousandth per step (beta2 = 0.999), which rounding to nearest would lose. Codes are therefore rounded at
random, from a hash of position and step: the same in every run. The ratio has no bias. The root is rounded up slightly
more often, so that coarse codes make steps smaller rather than larger. Over thousands of steps this would add up until
steps vanish. A block therefore stores the mean rounding error of its roots (the shift), which decoding adds to each
root. The errors that remain grow within some sixty steps to a fifth of a root in 4 bits. They make the mean of 1 / √v
larger by their square, 5 %, and a step divides by that much more.

Source of blocks: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from efficient_ft.ops.storage.eight_bits import uniform

#: Values in a block.
BLOCK = 128
#: Smaller tensors keep their values.
MIN_SIZE = 4096
#: Float32 numbers in a unit of the codes' distance, by bits.
UNIT = {8: 256, 4: 4096}
#: The shift of a block is a multiple of this share of the codes' distance.
SHIFT = 2.0**-14
#: Relative growth of a step's divisor as rounding errors build up, by bits.
GROWTH = {8: 0.0, 4: 0.05}
#: Share of this growth that each step leaves to the later ones.
GROWTH_LEFT = 0.97
#: The largest root, √(2^128), as an integer; larger ones and NaN are stored as this.
LARGEST = 0x5F7FFFFF
#: The smallest largest ratio of a block.
SMALLEST = 1e-30


class Moments(NamedTuple):
    """Moments in the block-wise form.

    Attributes:
        ratio: (n · bits / 8,) uint8, codes of m / √v; in 4 bits two in a byte, the first in the high half.
        ratio_scale: (blocks,) float32, the ratio at code 1.
        root: (n · bits / 8,) uint8, codes of √v; 0 is exactly 0.
        root_range: (blocks, 3) int16: upper half of the smallest positive root's bits, distance of the codes in units,
            and the shift.
    """

    ratio: Tensor
    ratio_scale: Tensor
    root: Tensor
    root_range: Tensor


def is_blockwise(size: int) -> bool:
    """Return whether the moments of a parameter of `size` values are kept in blocks: whole blocks, and not few."""
    return size >= MIN_SIZE and size % BLOCK == 0


def empty_moments(size: int, bits: int, device: torch.device | None = None) -> Moments:
    """Return moments of zero for a parameter of `size` values."""
    blocks, codes = size // BLOCK, size * bits // 8
    return Moments(
        torch.zeros(codes, dtype=torch.uint8, device=device),
        torch.zeros(blocks, dtype=torch.float32, device=device),
        torch.zeros(codes, dtype=torch.uint8, device=device),
        torch.zeros(blocks, 3, dtype=torch.int16, device=device),
    )


def levels(bits: int) -> tuple[int, int]:
    """Return the largest code of the ratio, and the steps from the smallest to the largest positive root."""
    return 2 ** (bits - 1) - 1, 2**bits - 2


def seed_of(step: int) -> int:
    """Return the seed of the random rounding in a step."""
    return step * 0x9E3779B9 % 2**32


def quantize(m: Tensor, root: Tensor, bits: int, step: int) -> Moments:
    """Round moments to codes.

    Args:
        m: (n,) float32, n a multiple of ``BLOCK``.
        root: (n,) float32, the root of v.
        bits: 8 or 4.
        step: of the optimizer; determines the rounding.
    """
    noise = uniform(m.numel(), torch.tensor(seed_of(step)), m.device).view(-1, BLOCK)
    ratio, scale = _ratio_codes((m / root).view(-1, BLOCK), bits, noise * 4096 % 1)
    roots, range_ = _root_codes(root.view(-1, BLOCK), bits, noise)
    return Moments(_to_bytes(ratio, bits), scale, _to_bytes(roots, bits), range_)


def dequantize(moments: Moments, bits: int) -> tuple[Tensor, Tensor]:
    """Return m and v, (n,) float32."""
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
    """Return codes (blocks, BLOCK) int32 and scales; a ratio that is not finite becomes 0."""
    top, _ = levels(bits)
    ratio = torch.where(ratio.isfinite(), ratio, 0.0)
    size = ratio.abs()
    scale = size.amax(1).clamp_min_(SMALLEST) * (1 / top**2)
    size = size * (1 / scale)[:, None]
    code = size.sqrt().floor_()
    up = noise * (2 * code + 1) < size - code * code  # the mean of the squares of both codes is the size
    code = (code + up).clamp_max_(top).int()
    return torch.where(ratio < 0, -code, code) + 2 ** (bits - 1), scale


def _root_codes(root: Tensor, bits: int, noise: Tensor) -> tuple[Tensor, Tensor]:
    """Return codes (blocks, BLOCK) int32 and ranges."""
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
    # More often up than in proportion, the more octaves (2^23 numbers) are between two codes.
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
