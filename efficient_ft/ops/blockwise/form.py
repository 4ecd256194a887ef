"""The block-wise form: values divided by the largest magnitude of their block, each as the nearest code of a codebook.

Sources: Dettmers, Lewis, Shleifer, Zettlemoyer, "8-bit Optimizers via Block-wise Quantization", ICLR 2022 (blocks,
dynamic codebook); Li, Chen, Zhu, "Memory Efficient Optimizers with 4-bit States", NeurIPS 2023 (blocks of 128, a linear
codebook without zero for the second moment). Block sizes, codebooks, the order of the two codes in a byte and the
choice of tensors are torchao's, so that a state can be read by either.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

#: Values in a block, by bits.
BLOCK = {8: 256, 4: 128}
#: Smaller tensors keep their values.
MIN_SIZE = 4096
#: The smallest scale of a block.
SMALLEST = 1e-12


def is_blockwise(size: int, bits: int) -> bool:
    """Return whether the states of a parameter of `size` values are kept in blocks: whole blocks, and not few."""
    return size >= MIN_SIZE and size % BLOCK[bits] == 0


@functools.cache
def codebook(bits: int, signed: bool) -> tuple[float, ...]:
    """Return the 2^bits values of the codes, ascending, the largest 1.

    Dynamic: of E decades (7 for 8 bits, 3 for 4) the one below 1 is divided most finely, and each smaller one half as
    finely. The midpoints of the divisions are the values, with 0 and 1. The unsigned one for 4 bits is linear,
    without 0: a second moment of 0 would make the step unbounded.
    """
    if (bits, signed) == (4, False):
        return tuple(k / 16 for k in range(1, 17))
    decades = {8: 7, 4: 3}[bits]
    values = [0.0, 1.0]
    for i in range(decades):
        count = 2 ** (i if signed else i + 1)
        midpoints = [(0.1 + 0.9 * (k + 0.5) / count) * 10.0 ** (i + 1 - decades) for k in range(count)]
        values += midpoints + ([-x for x in midpoints] if signed else [])
    return tuple(sorted(values))


@functools.cache
def _values(bits: int, signed: bool, device: torch.device) -> Tensor:
    return torch.tensor(codebook(bits, signed), dtype=torch.float32, device=device)


@functools.cache
def _midpoints(bits: int, signed: bool, device: torch.device) -> Tensor:
    values = _values(bits, signed, device).double()
    return ((values[:-1] + values[1:]) / 2).float()


def quantize(x: Tensor, bits: int, signed: bool) -> tuple[Tensor, Tensor]:
    """Quantize x to the nearest codes; a midpoint goes to the larger one.

    Args:
        x: (n,) float32, n a multiple of ``BLOCK[bits]``.
        bits: 8 or 4.
        signed: of the codebook; x >= 0 if not.

    Returns:
        Codes (n · bits / 8,) uint8, in 4 bits two in a byte, the first in the high half; scales (blocks,) float32. In a
        block with NaN the scale is NaN.
    """
    blocks = x.view(-1, BLOCK[bits])
    scale = blocks.abs().amax(1).clamp_min(SMALLEST)
    codes = torch.bucketize(blocks / scale[:, None], _midpoints(bits, signed, x.device), out_int32=True, right=True)
    codes = codes.view(-1).to(torch.uint8)
    return (codes if bits == 8 else codes[::2] << 4 | codes[1::2]), scale


def dequantize(codes: Tensor, scale: Tensor, bits: int, signed: bool) -> Tensor:
    """Return the values (n,) float32 of what `quantize` returned."""
    if bits == 4:
        codes = torch.stack((codes >> 4, codes & 15), 1)
    values = _values(bits, signed, codes.device)[codes.view(-1).int()]
    return (values.view(-1, BLOCK[bits]) * scale[:, None]).view(-1)
